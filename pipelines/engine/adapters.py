"""The LoRA adapters that requests can name: read once, kept on the CPU, and copied into the model's tables on demand."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from conf.errors import UserError, list_known_names, shortened
from models.adapters import Adapter, AdapterTables, Fold, read_adapter
from models.causal_lm import CausalLM
from models.formats.base import WeightFile
from pipelines.engine.adapter_slots import AdapterId, AdapterSlots
from pipelines.engine.kv_cache import free_memory
from pipelines.engine.request import Request

MAX_ADAPTERS = 8  # default number of slots


@dataclass(frozen=True)
class LoadAdapter:
    name: str
    folder: str
    digest: str
    """See `AdapterId.digest`."""


@dataclass(frozen=True)
class UnloadAdapter:
    name: str


@dataclass(frozen=True)
class FillSlot:
    slot: int
    name: str


AdapterChange = LoadAdapter | UnloadAdapter | FillSlot
"""A change that the worker ranks repeat."""


class Adapters:
    """The adapters of one model, by name."""

    def __init__(
        self,
        model: CausalLM,
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int = MAX_ADAPTERS,
        folds: Mapping[str, Fold] | None = None,
        smoothed_by: str | None = None,
        base: Sequence[WeightFile] = (),
        on_change: Callable[[AdapterChange], None] | None = None,
    ) -> None:
        """`folds`: the scales folded into the model's weights, by linear layer.

        `smoothed_by`: the quantisation method that folded some scales; without `folds` the model then rejects adapters.
        `base`: the model's weight files. `on_change`: repeats a change on the other ranks, if there are any; raises
        UserError if one of them cannot.
        """
        self._model, self._dtype, self._device, self._folds = model, dtype, device, folds or {}
        self._base, self._on_change = base, on_change
        self._smoothed_by = smoothed_by if folds is None else None
        self._tables = AdapterTables(model, num_slots, dtype, device)
        self._ids: dict[str, AdapterId] = {}
        self._adapters: dict[AdapterId, Adapter] = {}
        self.slots = AdapterSlots(num_slots, self.fill)
        self.table_version = 0
        """Grows with each change of the tables, which invalidates recorded steps."""

    def fill(self, slot: int, id: AdapterId) -> None:
        self._repeat_elsewhere(FillSlot(slot, id.name))
        self._tables.put(slot, self._adapters[id])

    @property
    def ids(self) -> list[AdapterId]:
        return list(self._ids.values())

    @property
    def digests(self) -> set[str]:
        return {id.digest for id in self.ids}

    def find(self, name: str) -> AdapterId:
        """Return the adapter of this name. Raises UserError that lists the loaded names."""
        if name in self._ids:
            return self._ids[name]
        remedy = "there are none: give model.adapters={NAME: FOLDER}"
        known = list_known_names(list(self._ids), name) if self._ids else remedy
        raise UserError(f"adapter {shortened(repr(name))} does not exist: {known}")

    def give(self, request: Request, name: str) -> Request:
        """Return the request with the adapter of this name.

        Raises UserError as `find` does, and if the request has a soft prefix.
        """
        adapter = self.find(name)
        if request.prefix.num_tokens:
            raise UserError(
                f"adapter {name} cannot be used with a prefix, which was made without the adapter: leave one of them out"
            )
        return replace(request, adapter=adapter)

    def check(self, id: AdapterId | None) -> None:
        """Raise UserError if the adapter was unloaded or replaced after the request was made."""
        if id is not None and id not in self._adapters:
            raise UserError(f"adapter {id.name} was unloaded since the request was made: make the request again")

    def load(self, name: str, folder: Path, in_use: Container[AdapterId | None], is_pinned: bool = False) -> None:
        """Read an adapter, and replace a loaded adapter of the same name. `is_pinned`: see `AdapterSlots.pin`.

        Raises UserError as `read_adapter` does, if an adapter of this name is in use, if the tables do not fit into
        memory, and if the fold scales of a smoothed model are unknown. Then nothing changes. Also raises UserError if
        another rank cannot load the adapter. Then the replaced adapter is lost.
        """
        if self._smoothed_by is not None:
            problem = f"adapter {name} was trained on activations that {self._smoothed_by} has scaled in this model"
            remedy = "quantise the float model here without quant.shift, use the float model, or merge the adapter and then quantise"
            raise UserError(f"{problem}, and the model's files do not contain the scales: {remedy}")
        self._refuse_in_use(name, in_use)
        adapter = read_adapter(folder, self._model, self._dtype, self._folds, self._base)
        kept = [self._adapters[id] for id in self.ids if id.name != name]
        self._check_memory(name, adapter, kept)
        self._fit_tables([*kept, adapter])
        if name in self._ids:
            self._remove(name)
        self._ids[name] = id = AdapterId(name, adapter.digest)
        self._adapters[id] = adapter
        if is_pinned:
            self.slots.pin(id)
        try:
            self._repeat_elsewhere(LoadAdapter(name, str(folder.absolute()), adapter.digest))
        except UserError:
            self.unload(name, in_use=())
            raise

    def unload(self, name: str, in_use: Container[AdapterId | None]) -> None:
        """Remove an adapter and release its memory. Raises UserError if it does not exist or is in use."""
        self.find(name)
        self._refuse_in_use(name, in_use)
        self._remove(name)
        self._repeat_elsewhere(UnloadAdapter(name))
        self._fit_tables(list(self._adapters.values()))

    def _remove(self, name: str) -> None:
        id = self._ids.pop(name)
        self.slots.forget(id)
        del self._adapters[id]

    def _fit_tables(self, adapters: Sequence[Adapter]) -> None:
        # A stage may have layers that the adapter changes when rank 0 has none.
        self.table_version += self._tables.fit(adapters) or self._on_change is not None

    def _repeat_elsewhere(self, change: AdapterChange) -> None:
        if self._on_change is not None:
            self._on_change(change)

    def _check_memory(self, name: str, adapter: Adapter, kept: Sequence[Adapter]) -> None:
        needed, free = self._tables.missing_bytes([*kept, adapter]), free_memory(self._device, 1.0)
        if needed > free:
            rank = max(len(factors.a) for factors in adapter.factors.values())
            problem = f"adapter {name} has rank {rank}: the tables of all slots need {needed / 1e9:.2f} GB"
            raise UserError(
                f"{problem}, and {free / 1e9:.2f} GB is free: give less model.max_adapters, or a lower rank"
            )

    def repeat(self, change: AdapterChange, rank: str) -> None:
        """Repeat rank 0's change on a worker, whose name is `rank`.

        Raises UserError if the worker cannot load the adapter, or if the adapter differs from rank 0's.
        """
        match change:
            case LoadAdapter(name, folder, digest):
                self.load(name, Path(folder), in_use=())
                if self.find(name).digest != digest:
                    raise UserError(f"{rank} has another adapter {name} than rank 0: give all machines the same files")
            case UnloadAdapter(name):
                if name in self._ids:  # this rank may have failed to load it
                    self.unload(name, in_use=())
            case FillSlot(slot, name):
                self.fill(slot, self.find(name))

    def _refuse_in_use(self, name: str, in_use: Container[AdapterId | None]) -> None:
        if name in self._ids and self._ids[name] in in_use:
            raise UserError(f"adapter {name} is in use: unload or replace it when its requests have finished")
