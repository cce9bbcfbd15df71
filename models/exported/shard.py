"""The entry of export.json for a rank's part of a sharded model. It is untrusted input."""

from dataclasses import dataclass, replace
from typing import Any

from models.adapters import adaptable_layers
from models.causal_lm import CausalLM
from models.layers.attention import Heads
from models.layers.missing import MissingLayer
from models.sharding import ParallelLayout

LIMIT = 2**31
LAYOUT_FIELDS = ("tp", "pp", "tp_rank", "stage")
"""The exported fields of a parallel layout. Its ranks gather, and each rank has a shard of every expert."""


@dataclass(frozen=True)
class ExportedShard:
    parallel_layout: ParallelLayout
    local_layers: range
    width: int
    """The channels [E] that a stage sends to the next stage. 0: there is only one stage."""
    keys: list[tuple[int, int]]
    """For each own attention layer: the index of its first key head, and the number of key heads of the whole layer."""
    outputs: dict[str, tuple[range, ...]]
    """The output ranges in the whole layer of each sharded linear layer that can have adapters, by name."""
    absent: list[str]
    """The names of the modules of other stages."""

    def with_positions(self, heads: list[Heads]) -> list[Heads]:
        """Return the heads of each own attention layer with their positions in the whole layer."""
        return [
            replace(layer_heads, first_key=first, num_whole_keys=num_whole)
            for layer_heads, (first, num_whole) in zip(heads, self.keys, strict=True)
        ]


def describe_part(model: CausalLM, parallel_layout: ParallelLayout) -> dict[str, Any]:
    """Return the entry of export.json for a rank's part."""
    link = model.before or model.after
    return {
        "division": {name: getattr(parallel_layout, name) for name in LAYOUT_FIELDS},
        "own_layers": [model.local_layers.start, model.local_layers.stop],
        "width": 0 if link is None else link.width,
        "keys": [[heads.first_key, heads.whole_keys] for heads in model.attention_heads],
        "outputs": {
            name: [[indices.start, indices.stop] for indices in layer.outputs]
            for name, layer in adaptable_layers(model).items()
            if layer.outputs is not None
        },
        "absent": [name for name, module in model.named_modules() if isinstance(module, MissingLayer)],
    }


def read_part(
    entry: dict[str, Any], num_layers: int, num_attention_layers: int, linears: dict[str, tuple[int, int]]
) -> ExportedShard:
    """Read the entry that `describe_part` returns. Raises KeyError, TypeError or ValueError for any other content.

    `num_layers`: of the whole model. `num_attention_layers`: of the part.
    `linears`: the outputs and inputs of the layers that can have adapters.
    """
    parallel_layout = ParallelLayout(*[entry["division"][name] for name in LAYOUT_FIELDS])
    first, last = entry["own_layers"]
    keys = [(start, num_whole) for start, num_whole in entry["keys"]]
    outputs = {name: tuple(range(start, stop) for start, stop in ranges) for name, ranges in entry["outputs"].items()}
    numbers = [
        *(getattr(parallel_layout, name) for name in LAYOUT_FIELDS),
        first,
        last,
        entry["width"],
        *(number for pair in keys for number in pair),
    ]
    if any(type(number) is not int or not 0 <= number < LIMIT for number in numbers):
        raise ValueError("its part has a number that is not an integer from 0 to 2**31 - 1")
    if not (
        parallel_layout.tp_rank < parallel_layout.tp
        and parallel_layout.stage < parallel_layout.pp
        and first < last <= num_layers
    ):
        raise ValueError("its part belongs to no rank")
    for name, ranges in outputs.items():
        if any(not 0 <= indices.start < indices.stop <= linears[name][0] for indices in ranges):
            raise ValueError(f"its part has outputs that are not in {name}")
    if len(keys) != num_attention_layers or any(type(name) is not str for name in entry["absent"]):
        raise ValueError("its part lacks the keys of a layer, or the name of an absent module")
    return ExportedShard(parallel_layout, range(first, last), entry["width"], keys, outputs, [*entry["absent"]])
