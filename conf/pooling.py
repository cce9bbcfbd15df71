"""Settings of the tasks that give a vector or scores for each row instead of a continuation."""

from dataclasses import dataclass
from enum import Enum

from conf.errors import check


class PoolingMode(Enum):
    auto = "auto"  # what the checkpoint's modules.json says, else last
    mean = "mean"  # of the hidden states of all tokens
    last = "last"  # the last token's hidden state
    cls = "cls"  # the first token's


@dataclass
class EmbedConfig:
    """A vector for each row. The rows and how they run are settings of `predict`."""

    pooling: PoolingMode = PoolingMode.auto
    normalize: bool | None = None
    """Give vectors the length 1; null: what the checkpoint's modules.json says, else not."""
    instruction: str | None = None
    """What stands before each prompt: a text, or the name of one in config_sentence_transformers.json, such as `query`; empty: nothing;
    null: the checkpoint's default, mostly nothing."""


@dataclass
class ScoreConfig:
    """Scores for each row. The rows and how they run are settings of `predict`."""

    instruction: str = "Given a web search query, retrieve relevant passages that answer the query"
    """What a reranker is told to judge `query` and `document` by."""

    def __post_init__(self) -> None:
        check(bool(self.instruction), "score.instruction", repr(self.instruction), "a text")
