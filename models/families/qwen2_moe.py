"""Qwen 1.5 MoE A2.7B and Qwen 2 57B A14B: Qwen 2 with mixtures of experts and a shared expert (arXiv 2407.10671).

T tokens.
"""

from dataclasses import dataclass

from torch import Tensor

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
    def __init__(self, c: Qwen2MoeConfig) -> None:
        super().__init__(c.hidden_size, c.mixture)
        self.shared_expert = MLP(c.hidden_size, c.shared_expert_intermediate_size)
        self.shared_expert_gate = Linear(c.hidden_size, 1, bias=False, is_quantizable=False)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        shared: Tensor = self._shared_weight(x, batch) * self.shared_expert(x, batch)
        return super().forward(x, batch) + shared

    def _shared_weight(self, x: Tensor, batch: Batch | None) -> Tensor:
        """Return sigmoid(x . gate) [T, 1].

        torch's sigmoid is not used: on a CPU it computes the last of many numbers in another way. exp does not.
        """
        logit = self.shared_expert_gate(x, batch).float()
        return (1 / (1 + (-logit).exp())).to(x.dtype)


class Qwen2Moe(DecoderLM):
    layout = ModelLayout(replicated=("gate", "shared_expert_gate"))

    def __init__(self, c: Qwen2MoeConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(
                    c,
                    Attention(c, window, qkv_bias=c.qkv_bias),
                    SharedExpertMoeBlock(c) if sparse else MLP(c.hidden_size, c.intermediate_size),
                )
                # a planner's model has only the first layers
                for sparse, window in zip(c.layer_kinds, c.windows, strict=False)
            ),
        )
