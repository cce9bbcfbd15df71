"""Qwen 1.5 MoE A2.7B and Qwen 2 57B A14B: Qwen 2 with mixtures of experts and a shared expert (arXiv 2407.10671).

T tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.sigmoid_gate import sigmoid_gate
from models.batch import Batch
from models.config import ConfigReader
from models.decoder import Attention, DecoderLayer, DecoderLM, WindowedConfig, read_decoder_config
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.moe import MixtureConfig, SparseMoeBlock, read_mixture
from models.layers.sliding_window import read_named_windows
from models.layout import ModelLayout


@dataclass(frozen=True)
class Qwen2MoeConfig(WindowedConfig):
    mixture: MixtureConfig
    shared_expert_intermediate_size: int
    qkv_bias: bool

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return self.mixture.sparse_layers[: self.num_hidden_layers]


def read_config(config: ConfigReader) -> Qwen2MoeConfig:
    """Read config.json. Raises UserError also for windows without `layer_types`.

    Implementations of this model disagree on the layers that have windows.
    """
    shape = read_decoder_config(config)
    return Qwen2MoeConfig(
        **vars(shape),
        mixture=read_mixture(config, shape.num_hidden_layers),
        shared_expert_intermediate_size=config.count("shared_expert_intermediate_size"),
        qkv_bias=config.get("qkv_bias", bool, True),
        windows=read_named_windows(config, shape.num_hidden_layers),
    )


class SharedExpertMoeBlock(SparseMoeBlock):
    def __init__(self, hidden_size: int, mixture: MixtureConfig, shared_expert_intermediate_size: int) -> None:
        super().__init__(hidden_size, mixture)
        self.shared_expert = MLP(hidden_size, shared_expert_intermediate_size)
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False, is_quantizable=False)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        gate: Tensor = self.shared_expert_gate(x, batch)  # [T, 1]
        return super().forward(x, batch) + sigmoid_gate(self.shared_expert(x, batch), gate)


class Qwen2Moe(DecoderLM):
    layout = ModelLayout(replicated=("gate", "shared_expert_gate"))

    def __init__(self, c: Qwen2MoeConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(
                    c,
                    Attention(c, window, qkv_bias=c.qkv_bias),
                    SharedExpertMoeBlock(c.hidden_size, c.mixture, c.shared_expert_intermediate_size)
                    if sparse
                    else MLP(c.hidden_size, c.intermediate_size),
                )
                # a planner's model has only the first layers
                for sparse, window in zip(c.layer_kinds, c.windows, strict=False)
            ),
        )
