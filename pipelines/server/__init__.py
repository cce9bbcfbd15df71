"""The HTTP side of the server, without torch.

A request passes the guard (`guard`) and reaches its route (`routes`, `service`). The server admits or rejects it
(`admission`). `engine_session` connects it to the engine, which runs in its own process (`pipelines.replicas.engine_process`, or
several processes with `pipelines.replicas`). `pipelines.server.api` converts the request to decode settings and writes the
answer, and `stream` sends it.
"""
