"""Settings of the tasks that return a vector or scores per row instead of generated text."""

from dataclasses import dataclass
from enum import Enum

from conf.constraints import check_fields, option


class PoolingMode(Enum):
    auto = "auto"  # as in the checkpoint's modules.json, else last
    mean = "mean"  # mean of the hidden states of all tokens
    last = "last"  # the last token's hidden state
    cls = "cls"  # the first token's hidden state


@dataclass
class EmbedConfig:
    """A vector per row. The settings of `predict` define the rows and how they run.

    task=score and task=serve read these settings if the model is an embedding model.
    """

    pooling: PoolingMode = PoolingMode.auto
    normalize: bool | None = None
    """Scale vectors to length 1; null: as in the checkpoint's modules.json, else false."""
    instruction: str | None = None
    """Text before each prompt, or the name of a prompt in config_sentence_transformers.json, such as `query`.

    Empty: none; null: the checkpoint's default, usually none.
    """


@dataclass
class ScoreConfig:
    """Scores per row. The settings of `predict` define the rows and how they run."""

    instruction: str = option(
        "Given a web search query, retrieve relevant passages that answer the query", form=(bool, "a text")
    )
    """The instruction by which a reranker judges `query` and `document`."""

    def __post_init__(self) -> None:
        check_fields(self, "score")
