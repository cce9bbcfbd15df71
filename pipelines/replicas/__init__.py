"""Several engines that share a server's requests, on Ray.

Nothing is imported here: what needs Ray is imported where there are replicas.
"""
