"""Several engines on Ray: those that share a server's requests, and those that share the rows of a job.

Nothing is imported here: what needs Ray is imported where there are replicas.
"""
