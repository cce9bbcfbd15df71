"""Floor 4b, the engine in a process of its own, and the client that starts it, asks it, and starts it again.

`frames` are the messages between the two. The client's side imports no torch: `client`, which keeps the requests on their
way, `suspects`, which knows those that crashed it, and `child`, the handle of the process. The process (`__main__`) loads
the model (`loading`) and runs the engine's steps (`process`) between what comes (`channel`, `inbox`) and goes (`gate`).
"""
