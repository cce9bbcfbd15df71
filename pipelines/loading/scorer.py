"""Scores of rows: a reward model's label outputs, or a reranker's probability that a document answers a query."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from conf.errors import UserError
from conf.pooling import ScoreConfig
from conf.tasks import PredictConfig
from models.tokenizers.pairs import answer_ids, encode_pair, encode_question
from pipelines.engine import Engine, Output
from pipelines.engine.request import Pooling
from pipelines.jobs.prompt_encoder import EncodedPrompt, PromptEncoder
from pipelines.jobs.prompts import PromptRow, check_unicode
from pipelines.loading.model_source import ModelSource
from pipelines.loading.pooler import Pooler

ACTIVATIONS = {"regression": "none", "multi_label_classification": "sigmoid", "single_label_classification": "softmax"}


class Scorer(Pooler):
    """Computes scores from rows.

    With a label head the scores are the head's outputs for the last token. With a vocabulary head the score is the
    probability of yes against no.
    """

    section = "score"

    def __init__(self, config: ScoreConfig, predict: PredictConfig, source: ModelSource, engine: Engine) -> None:
        super().__init__(predict, engine)
        self._num_labels = source.architecture.num_labels
        config_file = source.checkpoint.config
        self._pad, self._problem_type = config_file.raw("pad_token_id"), config_file.raw("problem_type")
        self._label_names = config_file.get("id2label", dict, {})
        self._instruction = config.instruction
        if self._num_labels is not None and self._instruction != ScoreConfig().instruction:
            raise UserError("score.instruction is a reranker's, and this model has a head of labels: leave it out")
        self._encoder = PromptEncoder(
            engine.tokenizer, predict.add_special_tokens, predict.chat_template, self._num_labels is None
        )
        self._answers = [] if self._num_labels is not None else answer_ids(engine.tokenizer)

    @property
    def pooling(self) -> Pooling:
        return Pooling.last

    @property
    def settings(self) -> dict[str, Any]:
        return {} if self._num_labels is not None else {"instruction": self._instruction}

    @property
    def num_values(self) -> int:
        return 1 if self._num_labels is None else self._num_labels

    @property
    def labels(self) -> list[str]:
        """The names of the labels; empty for a vocabulary head."""
        return [self._label_names.get(str(i), f"LABEL_{i}") for i in range(self._num_labels or 0)]

    @property
    def activation(self) -> str:
        """How label outputs become probabilities: transformers' rule, and sigmoid for one label."""
        if self._num_labels is None:
            return "none"
        return ACTIVATIONS.get(str(self._problem_type), "sigmoid" if self._num_labels == 1 else "softmax")

    def encode(self, row: PromptRow) -> list[EncodedPrompt]:
        if row.pair is not None:
            return [EncodedPrompt(None, self._encode_pair(*row.pair))]
        prompt = self._encoder.encode(row)
        return [replace(prompt, token_ids=self.without_padding(prompt.token_ids))]

    def without_padding(self, token_ids: list[int]) -> list[int]:
        """Return the tokens up to the last token that is not padding, whose output classifiers in transformers use."""
        if self._num_labels is None:
            return token_ids
        end = len(token_ids)
        while end > 1 and token_ids[end - 1] == self._pad:
            end -= 1
        return token_ids[:end]

    def _encode_pair(self, query: str, document: str) -> list[int]:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise UserError("query and document need a tokenizer: give model.tokenizer=PATH")
        for text in (query, document):
            check_unicode("the text", text)
        if self._num_labels is None:
            return encode_question(tokenizer, self._instruction, query, document)
        return self.without_padding(encode_pair(tokenizer, query, document))

    def values(self, output: Output) -> Tensor:
        outputs: Tensor = output.pooled  # [O]: label outputs, or vocabulary logits
        return outputs[self._answers].softmax(0)[1:] if self._answers else outputs
