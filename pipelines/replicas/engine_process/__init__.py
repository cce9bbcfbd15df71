"""The engine in its own process, and the client that starts, queries and restarts that process.

`frames` defines the messages between the two processes. The client side imports no torch: `client` tracks the requests
in flight, `suspects` tracks the requests that were in flight at a crash, and `child` is the process handle. The engine
side (`__main__`) loads the model (`loading`) and runs the engine's steps (`process`). It receives requests through
`channel` and `inbox`, and sends deltas through `gate`.
"""
