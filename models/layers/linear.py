"""Linear layers, and merged linear layers that read the same input.

R rows, I input channels, O output channels, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.linear import PackedWeight, gpu_weight, matmul_swiglu, matmul_together
from kernels.lora import lora_add
from kernels.quantize_rows import ActivationFormat, Activations, QuantizedActivations
from kernels.swiglu import swiglu, swiglu_quantize
from models.batch import Batch
from models.layers.dense import DenseMethod, StoredFloats
from models.layers.embedding import Embedding
from models.layers.linear_method import LinearMethod, are_alike, share_input_scale, take
from models.layers.lora_target import LoRATarget
from models.layers.matrix_layer import MatrixLayer
from models.layers.tensor_parallel import RowParallelGather, RowParallelReduce
from models.sharding import Shard


@dataclass(frozen=True)
class Tie:
    """A head's reference to the embedding whose matrix it uses. The head does not register the embedding."""

    embedding: Embedding


class Linear(LoRATarget, MatrixLayer):
    """y = x W^T + bias. The layer's `method` holds the weight W [O, I] and multiplies by it."""

    bias: nn.Parameter | None
    """[O]"""
    row_parallel: RowParallelGather | RowParallelReduce | None = None
    """The communication before and after the product of a row-parallel layer. None: the layer is not row-parallel."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        *,
        is_transposed: bool = False,
        is_quantizable: bool = True,
        is_packable: bool = True,
        embedding: Embedding | None = None,
    ) -> None:
        """Create the layer with an unset weight.

        is_transposed: checkpoints hold the weight as [I, O].
        is_quantizable: quantisation may replace the weight by codes.
        is_packable: the weight may be packed for the kernels; false if other code reads `weight`.
        embedding [O, I]: the layer is tied to it, and uses its method. It holds no weight itself.
        """
        super().__init__((outputs, inputs))
        self.is_transposed, self.is_quantizable, self.is_packable = is_transposed, is_quantizable, is_packable
        self._tie = None if embedding is None else Tie(embedding)
        if embedding is None:
            stored = StoredFloats(self.shape, is_transposed)
            parameter = nn.Parameter(torch.empty(stored.tensors()["weight"]))
            self.method = DenseMethod(stored, is_transposed, parameter)
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)

    @property
    def tied_embedding(self) -> Embedding | None:
        """The embedding that holds the weight of this layer. None: the layer holds its own weight."""
        return None if self._tie is None else self._tie.embedding

    @property
    def method(self) -> LinearMethod:
        """The linear method, which is the embedding's in a tied layer."""
        return self._method if self._tie is None else self._tie.embedding.method

    @method.setter
    def method(self, method: LinearMethod) -> None:
        if self._tie is None:
            self._method = method
            self._register()
        else:
            self._tie.embedding.method = method

    def untie(self, method: LinearMethod) -> None:
        """Give a tied layer its own weight. The embedding keeps its matrix."""
        self._tie = None
        self.method = method

    @property
    def output_axis(self) -> int:
        """The axis of `weight` for the outputs."""
        return int(self.is_transposed)

    def shard(self, outputs: tuple[range, ...]) -> dict[str, Shard]:
        """Keep a rank's outputs, before loading.

        Return the shards of the checkpoint's tensors by their names in the layer.
        """
        shards: dict[str, Shard] = {}
        if self._tie is None:  # else the embedding is sharded, into the same ranges
            self.method, shards = self._method.shard(outputs)
        self.keep(outputs)
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.new_empty(self.shape[0]))
            shards["bias"] = Shard(0, outputs)
        return shards

    def shard_inputs(self, ranges: Sequence[range], rank: int) -> dict[str, Shard] | None:
        """Keep the inputs `ranges[rank]`, before loading. Return the shards as `shard` does.

        None: `LinearMethod.shard_inputs` does not allow it, and nothing changes.
        """
        shared = self.method.shard_inputs(ranges, rank)
        if shared is None:
            return None
        self.method, shards = shared
        self.keep_inputs(ranges[rank])
        return shards

    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Restore the bias, and the weight of a layer that is not tied, as `LinearMethod.restore` does."""
        if self.bias is not None:
            self.bias = nn.Parameter(take(tensors, "bias", self.shape[:1], dtype), requires_grad=False)
        if self._tie is None:
            super().restore(tensors, dtype)

    def forward(self, x: Activations, batch: Batch | None) -> Tensor:
        """Return [R, O] of x [R, I].

        The rows are the tokens or the output rows of `batch`; None: they belong to no batch.
        """
        if self.row_parallel is None:
            return self.adapted(self.method.apply(x, self.bias), x, batch)
        assert isinstance(x, Tensor)  # `shared_activations` gives floats to a row-parallel layer
        x = self.row_parallel.gather_inputs(x)
        bias = self.bias if self.row_parallel.adds_bias else None
        return self.row_parallel.combine_outputs(self.adapted(self.method.apply(x, bias), x, batch))

    def adapted(self, y: Tensor, x: Activations, batch: Batch | None) -> Tensor:
        """Add each row's adapter to y in place, and return y. y [R, O] are the layer's outputs for x [R, I]."""
        if self.adapters is not None and batch is not None:
            assert isinstance(x, Tensor)  # `shared_activations` gives floats to a layer with adapters
            slots = batch.adapter_slots_of(x.shape[0])
            if slots is not None:
                lora_add(y, x, self.adapters, slots)
        return y


class MergedLinear:
    """Linear layers that read the same input, computed in one call if their methods allow it.

    It is not a module: the module that holds it owns the layers. Merged on a CPU, they return the same bits as separate
    layers. On a GPU their outputs are views of one product, with non-contiguous rows, and the product may sum in
    another order.
    """

    def __init__(self, owner: nn.Module, parts: Mapping[str, Linear]) -> None:
        """Register the layers in `owner`, in this order. `parts`: at most three, by their names in the checkpoint."""
        for name, layer in parts.items():
            owner.add_module(name, layer)
        self.layers = tuple(parts.values())
        self._weights: list[PackedWeight] = []  # on a CPU
        self._biases: list[Tensor | None] = []
        self._joined: LinearMethod | None = None  # on a GPU
        self._joined_bias: Tensor | None = None
        self._outputs: list[slice] = []

    @property
    def is_merged(self) -> bool:
        return bool(self._weights) or self._joined is not None

    def merge(self) -> None:
        """Prepare the single call, after all weights are loaded.

        On a GPU the weights are joined, and each layer keeps a view.
        """
        methods = [layer.method for layer in self.layers]
        if len(methods) < 2 or not are_alike(methods) or not share_input_scale(methods):
            return
        for method in methods:  # one tensor object, so that all methods expect one activation format
            method.input_scale = methods[0].input_scale
        parts = [method.gpu_weight for method in methods]
        if any(part is None for part in parts):
            weights = (method.weight for method in methods)
            self._weights = [weight for weight in weights if isinstance(weight, PackedWeight)]
            self._biases = [layer.bias for layer in self.layers]
            return
        has_bias = {layer.bias is not None for layer in self.layers}
        joined = gpu_weight.join([part for part in parts if part is not None]) if len(has_bias) == 1 else None
        if joined is None:
            return
        self._joined = methods[0].with_weight(joined)
        biases = [layer.bias.detach() for layer in self.layers if layer.bias is not None]
        self._joined_bias = torch.cat(biases) if biases else None
        start = 0
        for layer in self.layers:
            outputs = slice(start, start + layer.shape[0])
            layer.method = self._joined.slice_outputs(outputs)
            if self._joined_bias is not None:
                layer.bias = nn.Parameter(self._joined_bias[outputs], requires_grad=False)
            self._outputs.append(outputs)
            start = outputs.stop
        torch.cuda.empty_cache()  # else small weights fragment the freed memory

    def __call__(self, x: Activations, batch: Batch | None) -> Sequence[Tensor]:
        """Return the outputs [R, O] of each layer for x [R, I]. `batch`: as for `Linear`."""
        if self._joined is not None:
            joined_outputs = self._joined.apply(x, self._joined_bias)  # [R, outputs of all]
            outputs: Sequence[Tensor] = [joined_outputs[:, outputs] for outputs in self._outputs]
        elif self._weights:
            outputs = matmul_together(self.layers[0].method.quantized(x), self._weights, self._biases)
        else:
            return [layer(x, batch) for layer in self.layers]
        return [layer.adapted(y, x, batch) for layer, y in zip(self.layers, outputs, strict=True)]

    def swiglu(self, x: Activations, batch: Batch | None, readers: Sequence[Linear] = ()) -> Activations:
        """Return silu(gate) * up, [R, O], from the outputs gate and up of two layers for x [R, I].

        `readers`: as for `swiglu_for`.
        """
        if self._weights and not self._has_adapters(batch):
            (gate_weight, up_weight), biases = self._weights, self._biases
            return matmul_swiglu(self.layers[0].method.quantized(x), gate_weight, up_weight, *biases)
        gate, up = self(x, batch)
        return swiglu_for(readers, gate, up)

    def _has_adapters(self, batch: Batch | None) -> bool:
        is_adapted = batch is not None and batch.shape.num_adapted > 0
        return is_adapted and any(layer.adapters is not None for layer in self.layers)


def shared_activations(num_rows: int, readers: Sequence[Linear]) -> ActivationFormat | None:
    """Return the activation format that all these layers expect for `num_rows` rows. None: floats.

    Adapters read floats, so a layer with adapters quantises its input itself, to the same codes. So does a row-parallel
    layer, because the scale of a row depends on its whole input.
    """
    if any(reader.adapters is not None or reader.row_parallel is not None for reader in readers):
        return None
    formats = {reader.method.activations(num_rows) for reader in readers}
    return formats.pop() if len(formats) == 1 else None


def swiglu_for(readers: Sequence[Linear], gate: Tensor, up: Tensor) -> Activations:
    """Return silu(gate) * up, [R, O], in the activation format of `readers`, the only layers that read it."""
    format = shared_activations(gate.shape[0], readers)
    if format is None:
        return swiglu(gate, up)
    codes, scales = swiglu_quantize(gate, up, *format)
    return QuantizedActivations(codes, scales, gate.dtype, format.group_size)


def make_head(embedding: Embedding, tied: bool, bias: bool = False) -> Linear:
    """Return the layer from hidden states [R, E] to logits [R, V], with the embedding's weight or its own."""
    vocab_size, channels = embedding.shape
    return Linear(channels, vocab_size, bias, embedding=embedding if tied else None)


def tied_embedding(head: nn.Module) -> Embedding | None:
    """Return the embedding to which a head is tied. None: the head has its own weight."""
    return head.tied_embedding if isinstance(head, Linear) else None
