"""GPT-Neo (EleutherAI): GPT-2 with windows in some layers, and attention logits that are not scaled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from conf.errors import UserError
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import NoPEAttention
from models.families.gpt2 import GPTLM, GPTConfig
from models.layers.linear import Linear
from models.layers.mlp import GELUS
from models.layers.module import Module
from models.layout import HEADS

KINDS = {"global", "local"}


@dataclass(frozen=True)
class GPTNeoConfig(GPTConfig):
    windows: tuple[int | None, ...]
    """The window of each layer. None: full attention."""

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, has_windows=any(self.windows))


def read_config(config: ConfigReader) -> GPTNeoConfig:
    """Read config.json, with defaults as in transformers. Raises UserError for mistyped or unsupported values."""
    for key in ("classifier_dropout", "embed_dropout", "resid_dropout"):  # settings of other heads and of training
        config.raw(key)
    hidden_size, heads = config.count("hidden_size"), config.count("num_heads")
    config.check_multiple("hidden_size", hidden_size, "num_heads", heads)
    layers, length = config.num_layers("num_layers"), config.count("window_size", 256)
    return GPTNeoConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size", 4 * hidden_size),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        max_position_embeddings=config.count("max_position_embeddings", 2048),
        rms_norm_eps=config.positive("layer_norm_epsilon", 1e-5),
        activation_function=config.expect("activation_function", tuple(GELUS), "gelu_new"),
        windows=tuple(length if kind == "local" else None for kind in _read_kinds(config, layers)),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
    )


def _read_kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Read the kind of each layer from `attention_types`: lists of kinds, each with the number of its repetitions."""
    types = config.raw("attention_types")
    types = [[["global", "local"], 12]] if types is None else types
    kinds: list[str] = []
    try:
        for names, count in types:
            if not 0 < count <= num_layers or not KINDS.issuperset(names):
                raise ValueError
            kinds += [*names] * count
    except (TypeError, ValueError) as error:
        raise UserError(
            f"config.json: attention_types={str(types):.80} is not a list of [['global', 'local'], count]"
        ) from error
    repeated = config.raw("attention_layers")
    if len(kinds) != num_layers or repeated not in (None, kinds):
        raise UserError(
            f"config.json: attention_types={str(types):.80} and attention_layers={str(repeated):.80} must give "
            f"num_layers={num_layers} layers alike"
        )
    return kinds


class SelfAttention(NoPEAttention):
    output_name = "out_proj"

    def __init__(self, c: GPTNeoConfig, window: int | None) -> None:
        super().__init__(c, window, o_bias=True)
        self.scale = 1.0


class Attention(Module):
    """The checkpoint's name of attention has two parts."""

    def __init__(self, c: GPTNeoConfig, window: int | None) -> None:
        super().__init__()
        self.attention = SelfAttention(c, window)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return self.attention.readers

    def forward(self, x: Activations, angles: None, batch: Batch, cache: LayerCache) -> Tensor:
        return self.attention(x, angles, batch, cache)  # type: ignore[arg-type]


class GPTNeo(GPTLM):
    layout = replace(GPTLM.layout, attention="attn.attention", row_parallel=("out_proj", "c_proj"), units=HEADS)

    def __init__(self, c: GPTNeoConfig) -> None:
        super().__init__(c, (Attention(c, window) for window in c.windows))
