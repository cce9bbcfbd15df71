"""Engine requests for the lines of OpenAI's batches in `task=predict`."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import ModelConfig
from conf.serving import ServeConfig
from pipelines.jobs.prompt_encoder import EncodedPrompt
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import RowRequest
from pipelines.jobs.text_generator import TextGenerator
from pipelines.replicas.engine_process.loading import described
from pipelines.server.api.batch_lines import BatchRequest, line_errors, row_of
from pipelines.server.api.conversation import Chat
from pipelines.server.api.generation import Generation, RequestContext, named
from pipelines.server.api.requests import ChatRequest
from pipelines.server.api.writers import ChatWriter, CompletionWriter, Writer
from pipelines.server.batches.answers import line_id, row_answer


class BatchRequests:
    """Converts the lines of a batch to engine requests. Each request knows how to write its answer."""

    def __init__(
        self,
        generator: TextGenerator,
        model: ModelConfig,
        serve: ServeConfig,
        decode: DecodeConfig,
        fingerprint: str | None,
    ) -> None:
        """`serve`: contains the chat template for the lines. `decode`: resolved settings.

        `fingerprint`: the result of `answer_fingerprint`.

        Raises UserError for a chat template that cannot be read.
        """
        self._generator, self._model, self._decode = generator, model, decode
        self._served = described(generator.engine, decode, fingerprint)
        self._chat = Chat(generator.engine.tokenizer, serve)

    def ask(self, row: PromptRow) -> RowRequest:
        """Return the engine request of a line. Raises RefusedLine if the line cannot be run."""
        assert row.batch is not None
        with line_errors():
            _, body = row_of(row.batch)
            if row.error is not None:  # invalid id or text
                raise UserError(row.error)
            return self._row_request(row, body)

    def _row_request(self, row: PromptRow, body: BatchRequest) -> RowRequest:
        model = body.model or Path(os.path.abspath(self._model.path)).name
        generator, names = self._generator, named(self._model, model)
        tokenizer, served = (
            generator.engine.tokenizer,
            self._served.with_named(names.adapter or generator.adapter, names.prefix or generator.prefix),
        )
        if isinstance(body, ChatRequest):
            head = RequestContext(f"chatcmpl-{line_id(row)}", model)
            chat = self._chat.prompt(body, served.context_length)
            prompt = EncodedPrompt(chat.text, chat.token_ids)
            generation = Generation(body, [prompt.token_ids], served, head, tokenizer, chat.settings)
            writer: Writer = ChatWriter(generation, body, chat.reader)
        else:
            head, prompt = RequestContext(f"cmpl-{line_id(row)}", model), generator.encoder.encode(row)
            generation = Generation(body, [prompt.token_ids], served, head, tokenizer)
            writer = CompletionWriter(generation, body)
        try:
            adapted_row = replace(row, decode=generation.settings[0], prefix=names.prefix, adapter=names.adapter)
            row_request = generator.request(adapted_row, self._decode, prompt=prompt)
        except UserError as error:
            raise generation.refused(str(error)) from error
        return replace(row_request, answer=partial(row_answer, row, row_request.request, generation, writer))
