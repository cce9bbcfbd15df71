"""Lines of OpenAI's batches in `task=predict`: their requests, and their answers in the format of /v1/batches."""

from dataclasses import replace
from functools import partial
from typing import Any

from conf.errors import UserError
from conf.schema import RunConfig
from pipelines.engine import Output, Request
from pipelines.jobs.prompt_encoder import EncodedPrompt
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import Row, RowRequest
from pipelines.jobs.text_generator import TextGenerator
from pipelines.loading.model_source import ModelSource
from pipelines.replicas.engine_process.frames import Done
from pipelines.replicas.engine_process.loading import described
from pipelines.replicas.engine_process.process import told_error, told_logprobs, whole_delta
from pipelines.server.api.batch_lines import BatchRequest, RefusedLine, row_of
from pipelines.server.api.batches import answer_line
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import SERVER_ERROR, ApiError, bad_request
from pipelines.server.api.generation import Generation, RequestContext
from pipelines.server.api.named import named
from pipelines.server.api.requests import ChatRequest
from pipelines.server.api.writers import ChatWriter, CompletionWriter, Writer


class BatchAnswers:
    """Converts the lines of a batch to engine requests, and their outputs to answers."""

    def __init__(self, run: RunConfig, source: ModelSource, generator: TextGenerator) -> None:
        """`run`: has resolved `decode` settings. Raises UserError for a chat template that cannot be read."""
        run = replace(run, serve=replace(run.serve, chat_template=run.predict.chat_template))
        self._run, self._generator = run, generator
        self._served = described(run, source, generator.engine)
        self._chat = Chat(generator.engine.tokenizer, run.serve)

    def ask(self, row: PromptRow) -> RowRequest:
        """Return the engine request of a line. Raises RefusedLine if the line cannot be run."""
        assert row.batch is not None
        try:
            _, body = row_of(row.batch)
            if row.error is not None:  # invalid id or text
                raise UserError(row.error)
            return self._row_request(row, body)
        except RefusedLine:
            raise
        except ApiError as error:
            raise RefusedLine(error, error.message) from error
        except UserError as error:
            raise RefusedLine(bad_request(str(error), None), str(error)) from error

    def _row_request(self, row: PromptRow, body: BatchRequest) -> RowRequest:
        generator, names = self._generator, named(self._run.model, body.model)
        tokenizer, served = generator.engine.tokenizer, self._served.after(names.prefix or generator.prefix)
        if isinstance(body, ChatRequest):
            head = RequestContext(f"chatcmpl-{_id(row)}", body.model)
            chat = self._chat.prompt(body, served.context_length)
            prompt = EncodedPrompt(chat.text, chat.token_ids)
            generation = Generation(body, [prompt.token_ids], served, head, tokenizer, chat.settings)
            writer: Writer = ChatWriter(generation, body, chat.reader)
        else:
            head, prompt = RequestContext(f"cmpl-{_id(row)}", body.model), generator.encoder.encode(row)
            generation = Generation(body, [prompt.token_ids], served, head, tokenizer)
            writer = CompletionWriter(generation, body)
        try:
            adapted_row = replace(row, decode=generation.settings[0], prefix=names.prefix, adapter=names.adapter)
            row_request = generator.request(adapted_row, self._run.decode, prompt=prompt)
        except UserError as error:
            raise generation.refused(str(error)) from error
        return replace(row_request, answer=partial(_answer, row, row_request.request, generation, writer))


def _answer(row: PromptRow, request: Request, generation: Generation, writer: Writer, output: Output) -> Row:
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
    return answer_line(f"batch_req_{_id(row)}", row.id, status, _id(row), body)


def _id(row: PromptRow) -> str:
    """Return the id of a line's answer. It is equal in each run of the same file."""
    return f"{row.digest}{row.index:016x}"
