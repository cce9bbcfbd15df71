"""LoRA adapters that are not merged into the weights, so that each row of a batch can have another adapter.

y = W x + s B (A x) (arXiv 2106.09685), where A, B and s belong to the row's adapter. I inputs, O outputs, r rank.

In a smoothed model a layer reads x / u and returns y / v. Its factors are then A diag(u) and diag(1 / v) B.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.all_finite import all_finite
from kernels.lora import AdapterTable
from models.causal_lm import CausalLM
from models.formats.base import WeightFile
from models.formats.lora import CONFIG, Change, expect_factors, open_adapter, read_changes
from models.layers.linear import Linear
from models.layers.lora_target import LoRATarget
from models.layers.missing import is_missing
from models.layers.moe import Experts
from models.weights import full_names


@dataclass(frozen=True)
class Factors:
    """The low-rank matrices that an adapter adds to one linear layer."""

    a: Tensor
    """[r, I]"""
    b: Tensor
    """[O, r]. On a tensor-parallel rank, O counts the rank's outputs only."""
    scale: float


@dataclass(frozen=True)
class Fold:
    """The scales that smoothing folded into a linear layer: its inputs and outputs are divided by them.

    None: no scales.
    """

    input_scales: Tensor | None = None
    """[I] float32"""
    output_scales: Tensor | None = None
    """[O] float32"""


@dataclass(frozen=True)
class Adapter:
    """An adapter in the model's dtype, on the CPU."""

    digest: str
    """The sha256 of the adapter's files."""
    factors: dict[str, Factors]
    """Keyed by the linear layer's name in the model."""


def read_adapter(
    folder: Path, model: CausalLM, dtype: torch.dtype, folds: Mapping[str, Fold], base: Iterable[WeightFile] = ()
) -> Adapter:
    """Read an adapter in PEFT's layout for a loaded model.

    folds: the smoothing scales of each linear layer, by its name.
    base: the files of the base model. PEFT may save copies of base tensors together with an adapted head; these copies
    are ignored.

    Raises UserError for damaged files, for an adapter of another model, and for changes that must be merged.
    """
    settings, weights = open_adapter(folder)
    tensors, content = weights.read_whole()
    modules = dict(model.named_modules())
    names = full_names(modules)  # an adapter of a model without a head lacks the first part of the names
    factors = {}
    with ThreadPoolExecutor(1) as executor:  # hashing takes about half as long as all other work
        digest = executor.submit(_digest, (folder / CONFIG).read_bytes(), content)
        for parameter, change in read_changes(weights, settings).items():
            module = parameter.rpartition(".")[0]
            name = names.get(module, module)
            if is_missing(module, {stored_name: modules[full] for stored_name, full in names.items()}):
                continue
            if change.replacement and _is_copy(tensors[change.replacement], (parameter, f"{name}.weight"), base):
                change.replacement = None
                if change.a is None and change.b is None:
                    continue
            layer = _lora_target(name, change, modules, model, folder)
            outputs, inputs = layer.whole_shape
            keys = expect_factors(weights, change, settings.rank(module), inputs, outputs)
            a, b = _fold_factors(tensors[keys[0]], tensors[keys[1]], folds.get(name, Fold()))
            a, b = a.to(dtype), b.to(dtype)
            if not (all_finite(a.view(1, -1)).all() and all_finite(b.view(1, -1)).all()):
                remedy = "download the adapter again, or give a wider model.dtype"
                raise UserError(f"{weights.path}: {name} holds NaN or infinite numbers in {dtype}: {remedy}")
            factors[name] = Factors(*layer.slice_factors(a, b), settings.scale(module))
        return Adapter(digest.result(), factors)


def _is_copy(tensor: Tensor, names: Collection[str], base: Iterable[WeightFile]) -> bool:
    """Whether a base file holds the same values under one of these names.

    The values are compared in the file's dtype.
    """
    for file in base:
        for _, base_tensor in file.read([name for name in names if name in file.shapes]):
            return (
                base_tensor.is_floating_point()
                and base_tensor.shape == tensor.shape
                and torch.equal(tensor.to(base_tensor.dtype), base_tensor)
            )
    return False


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()


def _fold_factors(a: Tensor, b: Tensor, fold: Fold) -> tuple[Tensor, Tensor]:
    if fold.input_scales is not None:
        a = a.float() * fold.input_scales
    if fold.output_scales is not None:
        b = b.float() / fold.output_scales[:, None]
    return a, b


def _lora_target(name: str, change: Change, modules: dict[str, nn.Module], model: CausalLM, folder: Path) -> LoRATarget:
    module = modules.get(name)
    if module is None:
        raise UserError(f"{folder} changes {name}, {model.missing_layer_reason}")
    reason = (
        "replaces a bias or a saved module"
        if change.replacement is not None
        else _unsupported_reason(name, modules, model)
    )
    if reason is not None or not isinstance(module, LoRATarget):
        remedy = f"merge it: task=convert convert.lora={folder}"
        raise UserError(f"{folder} {reason} ({name}), which an unmerged adapter cannot do: {remedy}")
    return module


def _unsupported_reason(name: str, modules: dict[str, nn.Module], model: CausalLM) -> str | None:
    """Return the reason why a module cannot have another adapter for each row. None: it can."""
    module = modules[name]
    parents = (modules[name.rsplit(".", level)[0]] for level in range(1, name.count(".") + 1))
    if not isinstance(module, LoRATarget):
        return f"adapts {type(module).__name__}, which is not a linear layer"
    if not isinstance(module, Linear):
        return None
    if any(isinstance(parent, Experts) for parent in parents):
        return "adapts an expert"
    if module.tied_embedding is not None:
        return "adapts a head that is tied to the embedding"
    if not module.is_packable or not name.startswith((f"{model.layout.layers}.", model.layout.head)):
        return "adapts a matrix that is not a product of its own"
    return None


def adaptable_layers(model: CausalLM) -> dict[str, LoRATarget]:
    """Return, by name, the linear layers that can have another adapter for each row."""
    modules = dict(model.named_modules())
    layers = ((name, module) for name, module in modules.items() if isinstance(module, LoRATarget))
    return {name: layer for name, layer in layers if _unsupported_reason(name, modules, model) is None}


class AdapterTables:
    """The adapter tables of a model's linear layers. Each adapter uses one slot in all tables."""

    def __init__(self, model: CausalLM, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRATarget)}
        self._num_slots, self._dtype, self._device = num_slots, dtype, device

    def fit(self, adapters: Collection[Adapter]) -> bool:
        """Give each layer a table of the largest rank of these adapters, or none. Return whether a table has changed.

        Steps that were recorded with the old tables do not use the new ones. If memory is too small, torch's error is
        raised and no table is replaced.
        """
        misfits = self._misfits(adapters)
        tables = {layer: self._table(layer, rank) if rank else None for layer, rank in misfits.items()}
        for layer, table in tables.items():
            layer.adapters = table
        return bool(tables)

    def missing_bytes(self, adapters: Collection[Adapter]) -> int:
        """Return the bytes of the tables that `fit` would make."""
        num_values = sum(rank * sum(layer.shape) for layer, rank in self._misfits(adapters).items())
        return self._num_slots * num_values * self._dtype.itemsize

    def _misfits(self, adapters: Collection[Adapter]) -> dict[LoRATarget, int]:
        """Return the layers whose table has another rank than these adapters need, with this rank."""
        needed = dict.fromkeys(self._layers, 0)
        for adapter in adapters:
            for name, factors in adapter.factors.items():
                needed[name] = max(needed[name], len(factors.a))
        ranks = {layer: needed[name] for name, layer in self._layers.items()}
        return {
            layer: rank for layer, rank in ranks.items() if rank != (layer.adapters.max_rank if layer.adapters else 0)
        }

    def _table(self, layer: LoRATarget, rank: int) -> AdapterTable:
        """Return a new table with the content of the layer's table. Content beyond `rank` belongs to no adapter."""
        (outputs, inputs), old = layer.shape, layer.adapters
        table = AdapterTable.empty(self._num_slots, rank, inputs, outputs, self._dtype, self._device)
        if old is not None:
            common = min(rank, old.max_rank)
            table.a[:, :common].copy_(old.a[:, :common])
            table.b[:, :common].copy_(old.b[:, :common])
            table.ranks.copy_(old.ranks.clamp(max=rank))
            table.scales.copy_(old.scales)
        return table

    def put(self, slot: int, adapter: Adapter) -> None:
        """Write an adapter into a slot.

        Call `fit` first. Layers that the adapter does not change get an empty slot.
        """
        for name, layer in self._layers.items():
            if layer.adapters is None:
                continue
            if (factors := adapter.factors.get(name)) is None:
                layer.adapters.clear(slot)
            else:
                layer.adapters.put(slot, factors.a, factors.b, factors.scale)


def has_adapters(model: CausalLM) -> bool:
    """Whether any layer of the model has an adapter table."""
    return any(isinstance(module, LoRATarget) and module.adapters is not None for module in model.modules())
