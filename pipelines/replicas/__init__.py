"""Replicas: several engines on Ray, which share a server's requests or the rows of a job.

This module imports nothing, so that only runs with replicas import Ray.
"""
