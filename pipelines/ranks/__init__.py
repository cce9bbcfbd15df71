"""Ranks: several processes that compute one model. Rank 0 is the driver; the other ranks are workers.

`launch` starts the workers. If a launcher (torchrun, srun) has started them, `rendezvous` connects them to rank 0. `control` detects lost
workers. `messages` defines what crosses the socket to each, and `encoding` puts operations and tensors into messages. `rank_context` makes
the groups for collectives. In `pipelines/loading`, `driver` is rank 0's side of a computation, `worker` the process of another rank, and
`rank_worker` its side of the computation. This file imports nothing: a worker sets its CPU affinity before it imports torch.
"""
