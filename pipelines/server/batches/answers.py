"""Answers to the lines of OpenAI's batches in `task=predict`, in the format of /v1/batches."""

from typing import Any

from pipelines.engine import Output, Request
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import Row
from pipelines.replicas.engine_process.frames import Done
from pipelines.replicas.engine_process.process import told_error, told_logprobs, whole_delta
from pipelines.server.api.batch_lines import RefusedLine
from pipelines.server.api.batches import answer_line
from pipelines.server.api.errors import SERVER_ERROR, ApiError
from pipelines.server.api.generation import Generation
from pipelines.server.api.writers import Writer


def row_answer(row: PromptRow, request: Request, generation: Generation, writer: Writer, output: Output) -> Row:
    """Return the line of the output file that answers `row`."""
    deltas = [whole_delta(request, *item) for item in enumerate(output.completions)]
    choices = [generation.take(0, delta)[2] for delta in deltas]
    logprobs = told_logprobs(request.prompt_token_ids[1:], output.prompt_logprobs, request.params.prompt_logprobs)
    generation.dones = {
        0: Done(
            row.index,
            output.num_prompt_tokens,
            output.num_cached_tokens,
            generation.num_generated,
            0.0,
            None,
            0.0,
            prompt_logprobs=logprobs,
        )
    }
    return _line(row, 200, writer.body(choices))


def refusal(row: PromptRow, error: BaseException) -> Row:
    """Return the answer to a line that failed."""
    if not isinstance(error, RefusedLine):
        return _line(row, 500, ApiError(500, told_error(error, row.index), SERVER_ERROR).body())
    return _line(row, error.error.status, error.error.body())


def _line(row: PromptRow, status: int, body: Any) -> Row:
    return answer_line(f"batch_req_{line_id(row)}", row.id, status, line_id(row), body)


def line_id(row: PromptRow) -> str:
    """Return the id of a line's answer. It is equal in each run of the same file."""
    return f"{row.digest}{row.index:016x}"
