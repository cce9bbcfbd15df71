"""Floor 4b, the server: HTTP in one process, the engine in its child, and frames between them.

The HTTP process imports no torch. A request passes the guard (`guard`), finds its route (`routes`), is admitted
(`service`, `admission`) and deals with the engine (`exchange`, `client`); `pipelines.api` makes settings of it and writes
the answer, which `stream` sends. The child (`engine_process`) runs the engine's steps.
"""
