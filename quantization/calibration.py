"""Runs a model layer by layer over calibration batches and observes what reaches its linear layers.

One layer's activations are in memory at a time. Hidden states are a tensor [T, E] or a ResidualStream, as a family's layers pass them on.

T tokens of a batch, E hidden channels, I input channels of a linear layer, G key/value heads.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.kv_format import PagedVectors
from kernels.quantize_rows import Rows
from models.batch import Batch, KVCache
from models.causal_lm import CausalLM
from models.layers.norm import ResidualStream
from quantization.activations import ActivationRange
from quantization.gptq import Hessian

Hidden = Tensor | ResidualStream

NUM_SAMPLES = 512  # rows of activations that searches and reports work on


class Observed:
    """What came to one or more linear layers that share their input. Scales and shifts that are folded in later are counted in."""

    def __init__(self, linears: list[str], norm: str | None, x: Tensor, with_hessian: bool) -> None:
        self.linears = linears
        """Their names."""
        self.norm = norm
        """The name of the norm whose output it is."""
        self.hessian = Hessian(x.shape[1], x.device) if with_hessian else None
        self._range = ActivationRange(x.shape[1], x.device)
        self._samples: list[Tensor] = []  # [some T, I] each
        self._shift: Tensor = torch.zeros(x.shape[1], device=x.device)
        self._scales: Tensor = torch.ones(x.shape[1], device=x.device)

    def add(self, x: Tensor, num_samples: int) -> None:
        """Counts x [T, I], of which so many rows are kept."""
        self._range.add(x)
        self._samples.append(x[:: max(1, -(-len(x) // num_samples))].clone())
        if self.hessian:
            self.hessian.add(x)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """The least and greatest value of each channel [I] float32."""
        low, high = self._range.bounds()
        return (low - self._shift) / self._scales, (high - self._shift) / self._scales

    @property
    def absmax(self) -> Tensor:
        """[I] float32"""
        low, high = self.bounds
        return torch.maximum(low.abs(), high.abs())

    @property
    def sample(self) -> Tensor:
        """About NUM_SAMPLES rows [.., I] float32."""
        return (torch.cat(self._samples).float() - self._shift) / self._scales

    def lessen(self, shift: Tensor) -> None:
        """From now on the input is lessened by shift [I]."""
        self._shift = self._shift + shift * self._scales

    def divide(self, scales: Tensor) -> None:
        """From now on the input is divided by scales [I]."""
        self._scales = self._scales * scales


class LayerByLayer:
    """Holds the hidden states of all batches before the next layer."""

    def __init__(self, model: CausalLM, batches: list[Batch], cache: KVCache) -> None:
        """`cache`, which is not quantised, has room for a batch, which is computed in one step: its layers may share their memory."""
        self._model, self._batches, self._cache = model, batches, cache
        self._parent, self._name = find_layers(model)
        self.layers: nn.ModuleList = self._parent.get_submodule(self._name)  # type: ignore[assignment]
        self._states: list[Hidden] = []
        self._others: list[tuple[Any, ...]] = []  # what the layers get besides hidden states and their own cache
        self._next = 0
        for batch in batches:
            end = _Ends(None)
            self._run_ends(end, batch)
            assert end.state is not None
            self._states.append(end.state)
            self._others.append(end.others)

    def observe(self, linears: Iterable[str], with_hessian: bool) -> list[Observed]:
        """What comes to the linear layers, by their names in the next layer. Those that nothing reaches are in no group."""
        layer = self.layers[self._next]
        modules = {name: layer.get_submodule(name) for name in linears}
        norms = {name: module for name, module in layer.named_modules() if "norm" in type(module).__name__.lower()}
        observing = _Observing(-(-NUM_SAMPLES // len(self._batches)), with_hessian)
        hooks = [module.register_forward_pre_hook(observing.input_of(name)) for name, module in modules.items()]
        hooks += [module.register_forward_hook(observing.output_of(name)) for name, module in norms.items()]
        try:
            for i in range(len(self._batches)):
                self.output(i)
                observing.forget()
        finally:
            for hook in hooks:
                hook.remove()
        return list(observing.groups.values())

    @torch.inference_mode()
    def output(self, batch: int) -> Tensor:
        """Hidden states [T, E] of a batch after the next layer."""
        hidden = self._through_layer(batch)
        return hidden.total() if isinstance(hidden, ResidualStream) else hidden

    def advance(self) -> tuple[Tensor, Tensor]:
        """Go through the next layer, as it is now. The largest magnitudes of its keys and of its values, of each head: [G] float32."""
        keys, values = self._cache.layers[self._next]
        largest_keys, largest_values = [], []
        for i, batch in enumerate(self._batches):
            self._states[i] = self._through_layer(i)
            largest_keys.append(_absmax(keys, batch.slots))
            largest_values.append(_absmax(values, batch.slots))
        self._next += 1
        return torch.stack(largest_keys).amax(0), torch.stack(largest_values).amax(0)

    @torch.inference_mode()
    def _through_layer(self, batch: int) -> Hidden:
        cache = self._cache.layers[self._next]
        hidden: Hidden = self.layers[self._next](self._states[batch], *self._others[batch][:-1], cache)
        return hidden

    def observe_head(self, linears: list[str], with_hessian: bool) -> Observed:
        """What comes to the head, after the last layer."""
        group = None
        for state, batch in zip(self._states, self._batches, strict=True):
            x = self._run_ends(_Ends(state), batch)  # [T, E]
            group = group or Observed(linears, None, x, with_hessian)
            group.add(x, -(-NUM_SAMPLES // len(self._batches)))
        assert group is not None
        return group

    @torch.inference_mode()
    def _run_ends(self, ends: "_Ends", batch: Batch) -> Tensor:
        """The model with nothing between what comes before the layers and what comes after them."""
        setattr(self._parent, self._name, nn.ModuleList([ends] * len(self.layers)))
        try:
            hidden: Tensor = self._model(batch, self._cache)
        finally:
            setattr(self._parent, self._name, self.layers)
        return hidden


def _absmax(cache: PagedVectors, slots: Tensor) -> Tensor:
    """[G] float32 of what an unquantised cache holds in these slots; 0 where vectors have no channels."""
    vectors = cache.tensors[0].flatten(0, 1)[slots]  # [T, G, D]
    return functional.pad(vectors.float().abs(), (0, 1)).amax((0, 2))


class _Ends(nn.Module):
    """Stands for every layer: remembers what the first one gets, and gives `state` where there is one."""

    def __init__(self, state: Hidden | None) -> None:
        super().__init__()
        self.state = state
        self.others: tuple[Any, ...] = ()

    def forward(self, hidden: Hidden, *others: Any) -> Hidden:
        if self.state is None:
            self.state = hidden
        self.others = self.others or others
        return self.state


class _Observing:
    """Hooks that put linear layers with the same input tensor into one group, which is called by its first layer."""

    def __init__(self, samples_per_batch: int, with_hessian: bool) -> None:
        self.groups: dict[str, Observed] = {}
        self._num_samples = samples_per_batch
        self._with_hessian = with_hessian
        # By tensor: the group's first layer, or the norm that made it. The tensors stay alive meanwhile.
        self._leaders: dict[int, tuple[str, Tensor]] = {}
        self._norms: dict[int, tuple[str, Tensor]] = {}

    def forget(self) -> None:
        self._leaders.clear()
        self._norms.clear()

    def output_of(self, name: str) -> Callable[..., None]:
        def remember(module: nn.Module, inputs: Any, output: Rows | tuple[Rows, Tensor]) -> None:
            normed = output[0] if isinstance(output, tuple) else output
            if isinstance(normed, Tensor):  # and not codes, which nobody reads who is observed
                self._norms[id(normed)] = name, normed

        return remember

    def input_of(self, name: str) -> Callable[..., None]:
        def observe(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            (x,) = inputs
            if id(x) not in self._leaders:
                self._leaders[id(x)] = name, x
                if name not in self.groups:
                    norm, _ = self._norms.get(id(x), (None, x))
                    self.groups[name] = Observed([], norm, x, self._with_hessian)
                self.groups[name].linears += [name] * (name not in self.groups[name].linears)
                self.groups[name].add(x, self._num_samples)
            group = self.groups[self._leaders[id(x)][0]]
            group.linears += [name] * (name not in group.linears)

        return observe


def find_layers(model: CausalLM) -> tuple[nn.Module, str]:
    """The module that has the list of layers, and the list's name in it: the first that is as long as the config says."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            parent, _, name = path.rpartition(".")
            return model.get_submodule(parent), name
    raise AssertionError("every architecture has a list of layers")
