"""Floor 4b, the server: HTTP in one process, the engine in its child, and frames between them.

The HTTP process imports no torch. It reads requests (`app`), admits them (`admission`), makes token ids of them (`chat`), hands these to
the engine (`client`), and writes what comes back (`stream`). The child (`engine_process`) runs the engine's steps.
"""
