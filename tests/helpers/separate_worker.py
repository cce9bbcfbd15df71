"""A replica for tests of the processors that replicas have, beside which tests of other files have replicas of this machine, too."""

import ray

from pipelines.jobs.rows import EngineRows
from pipelines.replicas import cores, row_worker


class RowWorker(row_worker.RowWorker):
    """It shares processors with replicas of other Rays."""

    def load(self, kind: type[EngineRows], content: bytes) -> bytes:
        cores.NAME = f"{ray.get_runtime_context().get_node_id()}-{cores.NAME}"
        return super().load(kind, content)
