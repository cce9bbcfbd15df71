"""The HTTP side of the server, without torch.

A request passes the guard (`guard`) and reaches its route (`routes`; the handlers are in `generation_routes` and
`token_routes`). The server admits or rejects it (`service`, `admission`). `engine_session` connects it to the engine,
which runs in its own process (`pipelines.replicas.engine_process`, or several processes with `pipelines.replicas`).
`pipelines.server.api` converts the request to decode settings and writes the answer, and `stream` sends it.
`pipelines.server.responses` stores and continues responses.
"""
