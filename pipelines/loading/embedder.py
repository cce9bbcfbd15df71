"""Embeddings of rows, pooled as the checkpoint's sentence-transformers files or the settings say."""

import re
from typing import Any

from torch import Tensor

from conf.errors import UserError, list_known_names
from conf.pooling import EmbedConfig, PoolingMode
from conf.tasks import PredictConfig
from models.formats.sentence_transformers import EmbeddingFiles, appends_eos, read_embedding_files
from models.tokenizers import Tokenizer
from models.tokenizers.truncation import truncated
from pipelines.engine import Engine, Output
from pipelines.engine.request import Pooling
from pipelines.jobs.prompt_encoder import EncodedPrompt, PromptEncoder
from pipelines.jobs.prompts import PromptRow
from pipelines.loading.model_source import ModelSource
from pipelines.loading.pooler import Pooler

NAME = re.compile(r"[\w-]+")  # the name of an instruction; an instruction's text contains a space or a colon


class Embedder(Pooler):
    """Computes vectors from rows, by the `embed` settings of the run."""

    section = "embed"

    def __init__(self, config: EmbedConfig, predict: PredictConfig, source: ModelSource, engine: Engine) -> None:
        super().__init__(predict, engine)
        files = read_embedding_files(source.checkpoint.path)
        mode = config.pooling.name if config.pooling is not PoolingMode.auto else files.pooling or "last"
        self._pooling = Pooling[mode]
        self._normalizes = files.normalizes if config.normalize is None else config.normalize
        self._instruction = _instruction(config.instruction, files)
        self._prompts = files.prompts if config.instruction is None else {}
        tokenizer = engine.tokenizer
        self._encoder = PromptEncoder(tokenizer, predict.add_special_tokens, predict.chat_template, False)
        is_plain = predict.add_special_tokens and predict.chat_template in ("auto", "none")
        self._eos = _missing_eos(tokenizer) if tokenizer and is_plain else None
        self._max_tokens = files.max_tokens and min(files.max_tokens, engine.config.context.num_tokens)

    @property
    def pooling(self) -> Pooling:
        return self._pooling

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "pooling": self._pooling.name,
            "normalize": self._normalizes,
            "instruction": self._instruction,
            "eos": self._eos,
            "max_tokens": self._max_tokens,
        }

    @property
    def num_values(self) -> int:
        outputs: int = self.engine.executor.model.head.shape[0]  # type: ignore[index, assignment]
        return outputs

    @property
    def query_instruction(self) -> str:
        """Return the instruction of a query that is compared with documents: embed.instruction, else the checkpoint's
        prompt of this name, as in sentence-transformers, else its default."""
        return self._instruction_of("query")

    @property
    def document_instruction(self) -> str:
        """Return the instruction of a document that is compared with a query, as `query_instruction`."""
        return self._instruction_of("document", "passage", "corpus")

    def _instruction_of(self, *names: str) -> str:
        return next((self._prompts[name] for name in names if name in self._prompts), self._instruction)

    def encode(self, row: PromptRow) -> list[EncodedPrompt]:
        """Return the row's tokens. An instruction is put before a prompt."""
        if row.prompt is None:
            if self._instruction and row.error is None:
                raise UserError(
                    "embed.instruction stands before a prompt, and the row has none: give a prompt, or embed.instruction=''"
                )
            return [self._encoder.encode(row)]
        return [self.encode_text(self._instruction + row.prompt)]

    def encode_text(self, text: str) -> EncodedPrompt:
        """Return the tokens of a text, which begins with its instruction, and an eos if the tokenizer's settings
        request one.

        A text is truncated to the checkpoint's max_seq_length, as in sentence-transformers. Raises UserError for a text
        that is not Unicode.
        """
        end = [] if self._eos is None else [self._eos]
        token_ids, num_truncated = self._encoder.encode(PromptRow(0, prompt=text)).token_ids, 0
        if self._max_tokens and self.engine.tokenizer:
            most = self._max_tokens - len(end)
            token_ids, num_truncated = truncated(self.engine.tokenizer, text, token_ids, most)
        return EncodedPrompt(text, [*token_ids, *end], num_truncated=num_truncated)

    def values(self, output: Output) -> Tensor:
        return self.vector(output.pooled)

    def vector(self, pooled: Tensor) -> Tensor:
        """Return the float32 vector [E] of a prompt's pooled hidden states [E]."""
        if not self._normalizes:
            return pooled
        exact = pooled.double()
        return exact.div(exact.norm().clamp(min=1e-12)).float()  # torch's normalize uses the same minimum norm


def _missing_eos(tokenizer: Tokenizer) -> int | None:
    """Return the eos if the tokenizer's settings request one that the tokenizer does not append."""
    eos = tokenizer.eos_token_id
    return eos if appends_eos(tokenizer.source) and tokenizer.encode("a", True)[-1:] != [eos] else None


def _instruction(instruction: str | None, files: EmbeddingFiles) -> str:
    if instruction is None:
        return files.prompts[files.default_prompt] if files.default_prompt else ""
    if instruction in files.prompts:
        return files.prompts[instruction]
    if NAME.fullmatch(instruction):
        known = list_known_names(list(files.prompts), instruction) if files.prompts else "the checkpoint has none"
        raise UserError(
            f"embed.instruction={instruction} is the name of no prompt: {known}; a text has a space or a colon"
        )
    return instruction
