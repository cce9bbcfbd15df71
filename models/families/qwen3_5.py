"""Qwen3.5 and Qwen3.6: Qwen3-Next's layers with separate input projections, dense or with mixtures of experts.

E hidden channels.
"""

from collections.abc import Sequence

from kernels.quantize_rows import Activations
from models.batch import Batch
from models.config import ConfigReader
from models.families.qwen3_next import HybridLM, make_layers, make_mixtures
from models.families.qwen3_next_config import HybridConfig, HybridMoeConfig, read_hybrid, read_mixtures
from models.layers.gated_delta import DeltaHeads, DeltaInputs, GatedDeltaNet, head_ranges, qkv_ranges
from models.layers.linear import Linear, MergedLinear
from models.layers.mlp import MLP
from models.sharding import Shard


def read_config(config: ConfigReader) -> HybridConfig:
    """Read config.json. Raises UserError as `read_hybrid` does."""
    config.raw("mlp_only_layers")  # without effect on a dense model
    return read_hybrid(config)


def read_moe_config(config: ConfigReader) -> HybridMoeConfig:
    """Read config.json. All layers are mixtures. Raises UserError as `read_hybrid` does."""
    config.expect("norm_topk_prob", (True, None), None)
    config.expect("mlp_only_layers", ([], None), None)
    config.expect("decoder_sparse_step", (1, None), None)
    return read_mixtures(config)


class DeltaNet(GatedDeltaNet):
    def register_projections(self, hidden_size: int, heads: DeltaHeads) -> None:
        sizes = {"in_proj_qkv": 2 * heads.key_size + heads.value_size, "in_proj_z": heads.value_size}
        wide = {name: Linear(hidden_size, size, bias=False) for name, size in sizes.items()}
        self.qkvz = MergedLinear(self, wide)
        gates = ("in_proj_b", "in_proj_a")
        narrow = {name: Linear(hidden_size, heads.num_value_heads, False, is_quantizable=False) for name in gates}
        self.gates = MergedLinear(self, narrow)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return *self.qkvz.layers, *self.gates.layers

    def fuse(self) -> None:
        self.qkvz.merge()
        self.gates.merge()

    def project(self, x: Activations, batch: Batch) -> DeltaInputs:
        return DeltaInputs(*self.qkvz(x, batch), *self.gates(x, batch))

    def shard_projections(self, keys: Sequence[int], values: range) -> dict[str, Shard]:
        rows = {
            "in_proj_qkv": qkv_ranges(self.heads, keys, values),
            "in_proj_z": head_ranges(values, self.heads.value_channels),
            "in_proj_b": (values,),
            "in_proj_a": (values,),
        }
        return {
            f"{name}.{tensor}": shard
            for (name, ranges), layer in zip(rows.items(), self.readers, strict=True)
            for tensor, shard in layer.shard(ranges).items()
        }


class Qwen35(HybridLM):
    def __init__(self, c: HybridConfig) -> None:
        super().__init__(
            c, make_layers(c, DeltaNet, (MLP(c.hidden_size, c.intermediate_size) for _ in c.recurrent_layers))
        )


class Qwen35Moe(HybridLM):
    def __init__(self, c: HybridMoeConfig) -> None:
        super().__init__(c, make_layers(c, DeltaNet, make_mixtures(c)))
