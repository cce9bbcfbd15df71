"""A replica for tests of replicas' processors, while tests of other files also run replicas on this machine."""

import ray

from pipelines.jobs.rows import EngineRows
from pipelines.replicas import cores, row_worker


class RowWorker(row_worker.RowWorker):
    """A worker that shares processors with replicas of other Rays."""

    def load(self, kind: type[EngineRows], content: bytes) -> bytes:
        cores.NAME = f"{ray.get_runtime_context().get_node_id()}-{cores.NAME}"
        return super().load(kind, content)
