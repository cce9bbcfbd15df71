"""Stored responses of /v1/responses: the store, continued conversations, background responses and their routes."""
