"""Models with a classification head or without a head, and the config keys that select the head.

R output rows, E hidden channels.
"""

from dataclasses import replace
from enum import Enum

from torch import Tensor

from conf.errors import UserError
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.layers.linear import Linear
from models.layers.module import Module
from models.layers.named_parts import register

CLASSIFIER = "ForSequenceClassification"  # suffix of transformers' class names of sequence classifiers
LABEL_HEAD = "score"  # the name of the classification head in checkpoints
OTHER_HEADS = ("RewardModel", "ForTokenClassification", "ForQuestionAnswering")
"""Suffixes of transformers' class names whose heads are not supported."""
DEFAULT_LABELS = 2  # used if config.json has no labels, as in transformers


class HeadKind(Enum):
    """The kind of a model's last layer."""

    vocabulary = "vocabulary"  # logits of the next token
    labels = "labels"  # scores of a whole text, as in reward models
    none = "none"  # no head: the model outputs hidden states


class NoHead(Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.shape = channels, channels

    def forward(self, hidden: Tensor, batch: None) -> Tensor:
        """Return the hidden states [R, E] unchanged."""
        return hidden


def read_num_labels(config: ConfigReader) -> int | None:
    """Return the number of labels of a classifier. None: config.json describes another architecture.

    Raises UserError for an architecture with an unsupported head.
    """
    architectures = config.raw("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if unsupported := next((name for name in names if name.endswith(OTHER_HEADS)), None):
        remedy = f"give a reward model that is a ...{CLASSIFIER}"
        raise UserError(f"config.json: architectures={unsupported!r} has a head that is not supported: {remedy}")
    if not any(name.endswith(CLASSIFIER) for name in names):
        return None
    labels = config.get("id2label", dict, {})
    config.raw("label2id"), config.raw("problem_type")  # label names, and a training setting
    return config.count("num_labels", len(labels) or DEFAULT_LABELS)


def put_label_head(model: CausalLM, num_labels: int) -> None:
    """Replace the vocabulary head by a linear classification head without bias. The new head is never quantised."""
    head = Linear(_channels(model), num_labels, bias=False, is_quantizable=False)
    parent, _, name = model.layout.head.rpartition(".")
    delattr(model.get_submodule(parent), name)
    model.layout = replace(model.layout, head=LABEL_HEAD)
    register(model, LABEL_HEAD, head)


def remove_head(model: CausalLM) -> None:
    """Remove the head, so that the model returns hidden states. A head in the checkpoint is not read."""
    register(model, model.layout.head, NoHead(_channels(model)))


def _channels(model: CausalLM) -> int:
    assert isinstance(model.head, Linear)
    return model.head.shape[1]


def refuse_bidirectional(config: ConfigReader) -> None:
    """Raise UserError for a config that enables bidirectional attention, for any `model_type`."""
    for key, bidirectional in (("is_causal", False), ("use_bidirectional_attention", True)):
        if config.raw(key) is bidirectional:
            problem = (
                f"config.json: {key}={str(bidirectional).lower()} is bidirectional attention, which is not supported"
            )
            raise UserError(f"{problem}: give a model with causal attention")
