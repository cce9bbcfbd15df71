"""`task=score`: a reward model's label outputs, or a reranker's probability that a document answers a query."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.errors import UserError
from conf.pooling import ScoreConfig
from conf.schema import RunConfig
from conf.tasks import PredictConfig
from models.tokenizers import Tokenizer
from pipelines.engine import Engine, Output
from pipelines.engine.request import Pooling
from pipelines.jobs import report
from pipelines.jobs.journal import dumps
from pipelines.jobs.prompt_encoder import EncodedPrompt, PromptEncoder
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import Record, Row
from pipelines.loading.model_source import ModelSource
from pipelines.loading.pooler import Pooler
from pipelines.tasks.pooled import PooledJob, PooledRows, print_results, run_pooled

# From Qwen3-Reranker's model card: three pieces, which are tokenized separately.
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TURN = "<|im_start|>"
ANSWERS = ("no", "yes")


class Scorer(Pooler):
    """Computes scores from rows.

    With a label head the scores are the head's outputs for the last token. With a vocabulary head the score is the
    probability of yes against no.
    """

    head = None

    def __init__(self, config: ScoreConfig, predict: PredictConfig, source: ModelSource, engine: Engine) -> None:
        super().__init__(config, predict, source, engine)
        self._num_labels = source.architecture.num_labels
        self._pad = source.checkpoint.config.raw("pad_token_id")
        self._instruction = config.instruction
        if self._num_labels is not None and self._instruction != ScoreConfig().instruction:
            raise UserError("score.instruction is a reranker's, and this model has a head of labels: leave it out")
        self._encoder = PromptEncoder(
            engine.tokenizer, predict.add_special_tokens, predict.chat_template, self._num_labels is None
        )
        self._answers = [] if self._num_labels is not None else _answer_ids(engine.tokenizer)

    @property
    def pooling(self) -> Pooling:
        return Pooling.last

    @property
    def settings(self) -> dict[str, Any]:
        return {} if self._num_labels is not None else {"instruction": self._instruction}

    @property
    def num_values(self) -> int:
        return 1 if self._num_labels is None else self._num_labels

    def encode(self, row: PromptRow) -> EncodedPrompt:
        if row.pair is None:
            prompt = self._encoder.encode(row)
            token_ids = prompt.token_ids if self._num_labels is None else self._without_padding(prompt.token_ids)
            return replace(prompt, token_ids=token_ids)
        if self._num_labels is not None:
            labels = f"a head of {self._num_labels} labels, which scores one text"
            raise UserError(
                f"query and document are a reranker's, and this model has {labels}: give a prompt or messages"
            )
        return EncodedPrompt(None, self._encode_pair(*row.pair))

    def _without_padding(self, token_ids: list[int]) -> list[int]:
        """Return the tokens up to the last token that is not padding.

        Classifiers in transformers use the output at that token.
        """
        end = len(token_ids)
        while end > 1 and token_ids[end - 1] == self._pad:
            end -= 1
        return token_ids[:end]

    def _encode_pair(self, query: str, document: str) -> list[int]:
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        if len(tokenizer.encode(TURN, add_special_tokens=False)) != 1:
            lacks = f"the tokenizer has no token {TURN}"
            raise UserError(
                f"query and document are put into Qwen3-Reranker's template, but {lacks}: give this model's own format as prompt"
            )
        pair = PAIR.format(instruction=self._instruction, query=query, document=document)
        before, behind = (tokenizer.encode(text, add_special_tokens=False) for text in (BEFORE, BEHIND))
        return [*before, *self._encoder.encode(PromptRow(0, prompt=pair)).token_ids, *behind]

    def values(self, output: Output) -> Tensor:
        outputs: Tensor = output.pooled  # [O]: label outputs, or vocabulary logits
        return outputs[self._answers].softmax(0)[1:] if self._answers else outputs


def _answer_ids(tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise UserError("a model without a head of labels scores by its tokens yes and no: give model.tokenizer=PATH")
    answer_token_ids = [tokenizer.encode(answer, add_special_tokens=False) for answer in ANSWERS]
    if any(len(token_ids) != 1 for token_ids in answer_token_ids):
        problem = "a model without a head of labels scores by the tokens yes and no, which this tokenizer does not have"
        raise UserError(
            f"{problem}: give a reward model, whose architecture ends in ForSequenceClassification, or a reranker"
        )
    return [token_ids[0] for token_ids in answer_token_ids]


class ScoreRows(PooledRows):
    """Computes scores from rows."""

    pooler = Scorer

    @staticmethod
    def with_values(result: Row, values: Tensor) -> Record:
        return {"row": {**result, "scores": values.tolist()}}

    @staticmethod
    def failed(row: PromptRow, error: BaseException) -> Record:
        return {"row": {**PooledRows.failed(row, error)["row"], "scores": None}}


class ScoreJob(PooledJob):
    """Writes a line of scores.jsonl for each input row."""

    def write(self, records: Callable[[], Iterator[Record]]) -> None:
        report.write_atomically(self.journal.folder / "scores.jsonl", (f"{dumps(r['row'])}\n" for r in records()))


def run_score(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Run the task.

    Raises UserError before any file is written; if the job cannot go on, with all finished rows kept; and if no row has
    scores, after all files are written.
    """
    finished, folder = run_pooled(run, output_dir, dump, ScoreRows, ScoreJob)
    lines = [", ".join(f"{score:.6g}" for score in row["scores"] or []) for row in finished.first]
    print_results(lines, finished, folder)
    metrics = finished.metrics
    if metrics["num_errors"] == metrics["num_prompts"]:
        raise UserError(
            f"none of the {metrics['num_prompts']} rows has scores; the first: {finished.first[0]['error']}"
        )
