"""A model with another head than that of its vocabulary, and the config that says which one a checkpoint has.

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

CLASSIFIER = "ForSequenceClassification"  # the end of transformers' name for a model with a head of labels
LABEL_HEAD = "score"  # the name of that head in checkpoints
OTHER_HEADS = ("RewardModel", "ForTokenClassification", "ForQuestionAnswering")
"""The ends of names of heads that are not supported."""
DEFAULT_LABELS = 2  # where config.json says nothing, as in transformers


class HeadKind(Enum):
    """The last layer, which turns hidden states into a model's outputs."""

    vocabulary = "vocabulary"  # logits of the next token
    labels = "labels"  # scores of a whole text: reward models
    none = "none"  # nothing: the outputs are the hidden states


class NoHead(Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.shape = channels, channels

    def forward(self, hidden: Tensor, batch: None) -> Tensor:
        """Return the hidden states [R, E] as they are."""
        return hidden


def read_num_labels(config: ConfigReader) -> int | None:
    """Return the number of labels where config.json's architecture is a classifier; None for every other one.

    Raises UserError for an architecture with a head of another kind.
    """
    names = config.raw("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if other := next((name for name in names if name.endswith(OTHER_HEADS)), None):
        remedy = f"give a reward model that is a ...{CLASSIFIER}"
        raise UserError(f"config.json: architectures={other!r} has a head that is not supported: {remedy}")
    if not any(name.endswith(CLASSIFIER) for name in names):
        return None
    labels = config.get("id2label", dict, {})
    config.raw("label2id"), config.raw("problem_type")  # names of labels, and a setting of training
    return config.count("num_labels", len(labels) or DEFAULT_LABELS)


def put_label_head(model: CausalLM, num_labels: int) -> None:
    """Replace the head of the vocabulary by one of labels, a product without a bias. It stays in floats."""
    head = Linear(_channels(model), num_labels, bias=False, is_quantizable=False)
    parent, _, name = model.layout.head.rpartition(".")
    delattr(model.get_submodule(parent), name)
    model.layout = replace(model.layout, head=LABEL_HEAD)
    register(model, LABEL_HEAD, head)


def remove_head(model: CausalLM) -> None:
    """Let the model give hidden states. A stored head is not read."""
    register(model, model.layout.head, NoHead(_channels(model)))


def _channels(model: CausalLM) -> int:
    """Return E, the inputs of the model's head."""
    assert isinstance(model.head, Linear)
    return model.head.shape[1]


def refuse_bidirectional(config: ConfigReader) -> None:
    """Raise UserError for a config whose tokens see later ones by a switch, whatever its `model_type` is."""
    for key, bidirectional in (("is_causal", False), ("use_bidirectional_attention", True)):
        if config.raw(key) is bidirectional:
            what = f"config.json: {key}={str(bidirectional).lower()} is bidirectional attention, which is not supported"
            raise UserError(f"{what}: give a model whose tokens see the earlier ones alone")
