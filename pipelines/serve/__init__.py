"""Floor 4b, the server's HTTP, without torch.

A request passes the guard (`guard`), finds its route (`routes`), is admitted (`service`, `admission`) and deals with the
engine (`exchange`), which runs in a process of its own (`pipelines.engine_process`, several of them by
`pipelines.replicas`). `pipelines.api` makes settings of a request and writes the answer, which `stream` sends.
"""
