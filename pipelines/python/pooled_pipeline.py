"""The Python API of `task=embed` and `task=score`: from rows to a NumPy array.

Dimensions: N rows, O numbers per row.
"""

import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import fields, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from conf.decoding import DecodeConfig
from conf.errors import UserError, list_known_names
from conf.pooling import PoolingMode
from conf.schema import RunConfig
from pipelines.engine import Output, Request
from pipelines.jobs.prompts import rows_from_python
from pipelines.jobs.rows import RowOutputs, RowRequest
from pipelines.loading.memory import explained_out_of_memory
from pipelines.loading.model_source import OpenModel
from pipelines.loading.open_pooler import open_pooler, pooler_of
from pipelines.loading.pooler import Pooler

OF_ROWS = ("batch_size", "add_special_tokens", "chat_template", "prefix", "adapter")
"""Settings of `predict` that are also arguments."""
KINDS: dict[str, tuple[type, ...]] = {
    "pooling": (str,),
    "normalize": (bool, type(None)),
    "instruction": (str, type(None)),
    "batch_size": (int,),
    "add_special_tokens": (bool,),
    "chat_template": (str,),
    "prefix": (str, type(None)),
    "adapter": (str, type(None)),
}


class PooledPipeline:
    """Computes one float32 vector per row.

    `engine` runs token ids directly. Concurrent calls from several threads run one after another.
    """

    task: str

    def __init__(self, run: RunConfig, open_model: OpenModel | None = None, **arguments: Any) -> None:
        self.run = self._with(run, arguments)
        with explained_out_of_memory():
            self._source, pooler = open_pooler(self.run, open_model=open_model)
        self.engine, self.tokenizer = pooler.engine, pooler.engine.tokenizer
        self._turn = threading.Lock()

    def __reduce__(self) -> NoReturn:
        remedy = "make one in each process, by pipeline(...) with the same arguments"
        raise UserError(f"a pipeline holds threads and memory, which cannot be pickled or copied: {remedy}")

    def __call__(self, rows: Any, **arguments: Any) -> NDArray[np.float32]:
        """Return numbers [N, O] in row order.

        A row is a text, a conversation or a row as in a .jsonl; `rows` may be one or many.

        Arguments override the constructor's arguments. Raises UserError for the first row that cannot be run.
        """
        run = self._with(self.run, arguments)
        if run.predict.batch_size > self.engine.config.max_num_requests:
            most = f"the {self.engine.config.max_num_requests} that this pipeline was made for"
            raise UserError(f"batch_size={run.predict.batch_size} is more than {most}: give fewer, or make it for more")
        with self._turn, explained_out_of_memory():
            pooler = pooler_of(run, self._source, self.engine)
            with closing(self._outputs(pooler, run, rows)) as outputs:
                values_by_row = {output.request_id: pooler.values(output).float().numpy() for output in outputs}
        stacked = [values_by_row[index] for index in range(len(values_by_row))]
        return np.stack(stacked) if stacked else np.empty((0, pooler.num_values), np.float32)

    def _outputs(self, pooler: Pooler, run: RunConfig, rows: Any) -> Generator[Output, None, None]:
        """Yield the output of each row, in any order."""
        num_requests: dict[int, int] = {}

        def requests() -> Iterator[Request]:
            for row_request in _row_requests(pooler, run.decode, rows):
                num_requests[row_request.request.id] = len(row_request.requests)
                yield from row_request.requests

        row_outputs = RowOutputs()
        with closing(self.engine.generate(requests(), run.predict.batch_size)) as outputs:
            for output in outputs:
                if output.error:
                    raise output.error
                yield from row_outputs.add(output, num_requests[output.request_id])

    def _with(self, run: RunConfig, arguments: dict[str, Any]) -> RunConfig:
        section = getattr(run, run.task.name)
        option_names = {field.name for field in fields(section)}
        for name, value in arguments.items():
            if name not in option_names | set(OF_ROWS):
                raise UserError(
                    f"argument {name} does not exist: {list_known_names(sorted(option_names | set(OF_ROWS)), name)}"
                )
            if type(value) not in KINDS[name]:
                kinds = " or ".join(kind.__name__.removesuffix("Type") for kind in KINDS[name])
                raise UserError(f"{name}={value!r} is of type {type(value).__name__}, not {kinds}")
        values = dict(arguments)
        if "pooling" in values:
            modes = list(PoolingMode.__members__)
            if values["pooling"] not in modes:
                raise UserError(
                    f"pooling={values['pooling']} does not exist: {list_known_names(modes, values['pooling'])}"
                )
            values["pooling"] = PoolingMode[values["pooling"]]
        predict = replace(run.predict, **{name: value for name, value in values.items() if name in OF_ROWS})
        section = replace(section, **{name: value for name, value in values.items() if name in option_names})
        return replace(run, predict=predict, **{run.task.name: section})


class EmbeddingPipeline(PooledPipeline):
    """Computes vectors. Arguments: `pooling`, `normalize`, `instruction`, and the names in OF_ROWS."""

    task = "embed"


class ScorePipeline(PooledPipeline):
    """Computes scores. Arguments: `instruction`, and the names in OF_ROWS."""

    task = "score"


def _row_requests(pooler: Pooler, decode: DecodeConfig, rows: Any) -> Iterator[RowRequest]:
    for row in rows_from_python(rows):
        try:
            yield pooler.request(row, decode)
        except UserError as error:
            raise UserError(f"row {row.index}: {error}") from error
