"""Ranks: several processes that compute one model. Rank 0 is the driver; the other ranks are workers.

`launch` starts the others, by `meeting` rank 0 and those that a launcher has started find each other. `control` watches over them,
`messages` is what crosses the socket to each. `driver` is what rank 0 computes, `worker` the process of another rank, `rank_worker` what
that computes. Nothing is imported here: a worker takes its cores before torch is imported.
"""
