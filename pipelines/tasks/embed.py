"""`task=embed`: one vector per row, pooled as the checkpoint's sentence-transformers files or the settings say.

Dimensions: N rows, E hidden channels.
"""

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from conf.errors import UserError
from conf.schema import RunConfig
from pipelines.jobs import report
from pipelines.jobs.journal import dumps
from pipelines.jobs.rows import Record, Row
from pipelines.tasks.pooled import PooledJob, PooledRows, print_results, run_pooled


class EmbedRows(PooledRows):
    """Computes vectors from rows. The journal stores them as base64 of little-endian float32."""

    @staticmethod
    def with_values(result: Row, values: Tensor) -> Record:
        vector = values.numpy().astype("<f4").tobytes()
        return {"row": result, "vector": base64.b64encode(vector).decode()}


class EmbedJob(PooledJob):
    """Writes a line of rows.jsonl and a row of embeddings.npy for each input row."""

    def write(self, records: Callable[[], Iterator[Record]]) -> None:
        folder, size = self.journal.folder, self.executor.loaded.num_values
        missing = torch.full((size,), torch.nan).numpy().astype("<f4").tobytes()  # the vector of a row with an error
        vectors = (base64.b64decode(r["vector"]) if "vector" in r else missing for r in records())
        report.write_atomically(folder / "embeddings.npy", _npy((self.totals["num_prompts"], size), vectors))
        report.write_atomically(folder / "rows.jsonl", (f"{dumps(r['row'])}\n" for r in records()))


def _npy(shape: tuple[int, int], rows: Iterator[bytes]) -> Iterator[bytes]:
    """Yield a .npy file of float32 [N, E], one row at a time. Memory holds one row."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, {"descr": np.dtype("<f4").str, "fortran_order": False, "shape": shape})
    yield header.getvalue()
    yield from rows


def run_embed(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Run the task.

    Raises UserError before any file is written; if the job cannot go on, with all finished rows kept; and if no row has
    a vector, after all files are written.
    """
    finished, folder = run_pooled(run, output_dir, dump, EmbedRows, EmbedJob)
    size, metrics = finished.metrics["num_values"], finished.metrics
    print_results([f"{row['num_prompt_tokens']} tokens, {size} numbers" for row in finished.first], finished, folder)
    if metrics["num_errors"] == metrics["num_prompts"]:
        raise UserError(
            f"none of the {metrics['num_prompts']} rows has a vector; the first: {finished.first[0]['error']}"
        )
