"""A rank's share of a quantisation. Without ranks, the share of the only process is the whole.

The ranks of a stage run their shards of its layers over the samples together. The first rank of the stage also has the
whole inputs of a layer, and its whole float weights while it prunes and chooses codes, like a single process. So zeros,
codes and scales are bit-identical to one process.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from conf.quantization import QuantConfig
from kernels.collectives import Alone, Group
from models.batch import Batch, KVCache
from models.causal_lm import CausalLM
from models.layers.linear import tied_embedding
from models.rank_tensors import gather_on_first, scatter_from_first
from models.sharding import Shard
from models.weights import embedding_name, place_tensor, refuse_damaged
from pipelines.engine.kv_cache import allocate_kv_cache
from quantization.calibration import SequentialCalibrator
from quantization.file_layout import FileLayout
from quantization.kv_scales import choose_kv_scales, static_kv_formats
from quantization.quantizer import LinearReport, QuantizedLayer, Quantizer, is_sequential, parts_of
from quantization.smoothing_record import fold_tensors
from quantization.stored_parts import StoredPart, part_tensors, place_part

Result = TypeVar("Result")


class Step(Generic[Result]):
    """A step of a quantisation. Subclasses are frozen dataclasses: messages to ranks."""

    def compute(self, share: "Share") -> Result:
        """Compute this rank's share of the step."""
        raise NotImplementedError


class Share:
    """Processes the parts of its stage in order: `choose` or `pass_over` a part, then `place` it.

    `run` computes a step on all ranks of the part's stage. On each rank `Step.compute` calls a method of its share.
    """

    def __init__(
        self,
        config: QuantConfig,
        layout: FileLayout,
        model: CausalLM,
        batches: list[Batch],
        cache: KVCache,
        full_model: CausalLM | None = None,
        shards: Mapping[str, Shard] | None = None,
        group: Group | None = None,
    ) -> None:
        """`model` has float weights.

        `cache` has one layer of each shape, with room for each of the batches. The first batch is the probe.

        For a rank, `full_model` is the unsharded model on the meta device, `shards` describes its shard, and `group` connects
        the ranks of its stage. Raises UserError for weights that are not finite.
        """
        refuse_damaged(model)
        self._config, self._layout, self._model, self._shards = config, layout, model, shards or {}
        self._full_model, self._group = full_model or model, group or Alone()
        self.parts = parts_of(self._full_model, layout.schemes, layout.pruned)
        self.is_tied = tied_embedding(self._full_model.head) is not None and len(self.parts) == len(
            self._full_model.layers
        )
        """Whether the head has no tensors of its own."""
        is_first, (probe, *rest) = self._group.rank == 0, batches
        of_probe = None if full_model is None else (full_model, _probe_cache(full_model, model, probe, cache))
        self.calibrator = SequentialCalibrator(
            model, rest, probe, cache, is_sequential(config), config.has_static_kv_cache, is_first, of_probe
        )
        self._quantizer = Quantizer(self._full_model, config, self.calibrator)

    def has(self, part: QuantizedLayer) -> bool:
        """Return whether the part belongs to this rank's stage."""
        num_layers = len(self._full_model.layers)
        return min(part.index, num_layers - 1) in self._model.local_layers

    def run(self, step: "PartStep[Result]") -> Result:
        return step.compute(self)

    def rest(self) -> dict[str, Tensor]:
        """Return the stage's tensors that belong to no part, whole on the first rank."""
        prefixes = tuple(part.prefix for part in self.parts)
        if self._layout.ties_codes:
            prefixes += (embedding_name(self._full_model),)
        return self._joined(name for name, _ in self._full_model.named_parameters() if not name.startswith(prefixes))

    def choose(self, part: QuantizedLayer) -> StoredPart | None:
        """Prune the part, observe its inputs, and choose its codes on the first rank.

        Other ranks return None. Raises UserError.
        """
        self._arrive(part)
        pruned = self._prune(part) if part.pruned else {}
        is_first, is_head = self._group.rank == 0, part.index == len(self._full_model.layers)
        groups = self._quantizer.observe(part) if is_first or not is_head else []
        names = [name for name, _ in self._full_model.named_parameters() if name.startswith(part.prefix)]
        if is_head and tied_embedding(self._full_model.head) is not None:
            names.append(embedding_name(self._full_model))
        with self._whole_floats(names):
            if not is_first:
                return None
            stored, reports, folds = self._quantizer.quantize(part, groups, pruned)
            tensors = part_tensors(part, self._full_model, stored, self._layout.layout_of, self._layout.ties_codes)
        return StoredPart(tensors, reports, None if folds is None else fold_tensors(folds))

    def pass_over(self, part: QuantizedLayer) -> None:
        """Run the steps of `choose` that a part from an earlier run still needs."""
        self._arrive(part)
        if part.index < len(self._full_model.layers):
            self.calibrator.observe()

    def place(self, part: QuantizedLayer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace a part's float weights by its whole `tensors`, and advance.

        Returns the static scales of its KV cache, whole on the first rank.
        """
        place_part(part, self._model, tensors, self._shards, self._layout.layout_of, self._layout.ties_codes)
        absmax = self.calibrator.advance() if part.index < len(self._full_model.layers) else None
        if absmax is None:
            return {}
        shards = choose_kv_scales(self._model, part.index, absmax, self._config.kv_cache)
        return {
            n: gather_on_first(self._model.get_parameter(n).data, shard, self._group) for n, shard in shards.items()
        }

    def leave(self) -> None:
        """Send the next stage the inputs of its layers."""
        self.calibrator.send()

    def static_cache(self, cache: KVCache) -> KVCache:
        """Return a cache with as many blocks as `cache`, with the static scales that were computed."""
        sizes, formats = (cache.num_blocks, cache.block_size), static_kv_formats(self._model, self._config.kv_cache)
        return allocate_kv_cache(self._model.layer_caches, *sizes, formats, cache.dtype, cache.device, cache.num_slots)

    def _arrive(self, part: QuantizedLayer) -> None:
        if part.index == self._model.local_layers.start > 0:
            self.calibrator.receive()

    def _prune(self, part: QuantizedLayer) -> dict[str, LinearReport]:
        """Prune the part in the ranks' models, on inputs from its float weights. Returns reports on the first rank."""
        groups = self._quantizer.observe_unpruned(part)
        names = [f"{name}.weight" for name in part.pruned]
        with self._whole_floats(names):
            reports = self._quantizer.prune(part, groups) if self._group.rank == 0 else {}
            if self._full_model is not self._model:
                for name in names:
                    rank_weight, full_weight = (
                        model.get_parameter(name).data for model in (self._model, self._full_model)
                    )
                    place_tensor(
                        self._model,
                        name,
                        scatter_from_first(full_weight, rank_weight, self._shards.get(name), self._group),
                    )
        self._group.check()  # if the first rank failed, the other ranks continue with invalid values until here
        return reports

    @contextmanager
    def _whole_floats(self, names: Iterable[str]) -> Iterator[None]:
        """Load these parameters into the first rank's whole model within the block.

        All ranks of the stage must enter it.
        """
        # Sorted, because placing moves a tensor to the end of its module, and only the first rank places tensors.
        joined = {} if self._full_model is self._model else self._joined(sorted(names))
        floats = joined if self._group.rank == 0 else {}
        for name, tensor in floats.items():
            place_tensor(self._full_model, name, tensor)
        yield
        for name, tensor in floats.items():
            place_tensor(self._full_model, name, torch.empty_like(tensor, device="meta"))

    def _joined(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the parameters of these names that the stage has, whole on the first rank."""
        parameters = dict(self._model.named_parameters())
        return {
            n: gather_on_first(parameters[n].data, self._shards.get(n), self._group) for n in names if n in parameters
        }


def _probe_cache(full_model: CausalLM, model: CausalLM, probe: Batch, cache: KVCache) -> KVCache:
    num_blocks, device = int(probe.block_tables.max()) + 1, probe.numbers.device
    first_of_shape = {content.kind: content for content in reversed(full_model.layer_caches)}
    return allocate_kv_cache(
        list(first_of_shape.values()), num_blocks, cache.block_size, None, cache.dtype, device, num_state_slots=1
    )


@dataclass(frozen=True)
class Rest(Step[dict[str, Tensor]]):
    def compute(self, share: Share) -> dict[str, Tensor]:
        return share.rest()


@dataclass(frozen=True)
class Leave(Step[None]):
    def compute(self, share: Share) -> None:
        share.leave()


@dataclass(frozen=True)
class PartStep(Step[Result]):
    part: int
    """The part's index in `Share.parts`."""


@dataclass(frozen=True)
class Choose(PartStep[StoredPart | None]):
    def compute(self, share: Share) -> StoredPart | None:
        return share.choose(share.parts[self.part])


@dataclass(frozen=True)
class PassOver(PartStep[None]):
    def compute(self, share: Share) -> None:
        share.pass_over(share.parts[self.part])


@dataclass(frozen=True)
class PlaceTensors(PartStep[dict[str, Tensor]]):
    tensors: dict[str, Tensor]

    def compute(self, share: Share) -> dict[str, Tensor]:
        return share.place(share.parts[self.part], self.tensors)


STEPS = Rest, Leave, Choose, PassOver, PlaceTensors
