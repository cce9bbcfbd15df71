"""Quantised GGUF files compared with llama.cpp's own quantiser: its bytes, and the type of each tensor."""

import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.formats import open_checkpoint
from models.formats.gguf.file_types import FILE_TYPES, tensor_types
from models.formats.gguf.quantize import quantize_rows
from models.formats.gguf.writer import write_gguf
from tests.helpers.builders import complete, engine_of
from tests.helpers.oracle import write_model

DIGESTS = {  # sha256 of ggml_quantize_chunk's output for `rows()` (libggml-base of llama-cpp-python 0.3.36)
    "Q4_0": "d7d0d0d14c55cbf9c13e85f886003248b2694cf4370b9bdcad7e43f69c77e8db",
    "Q4_1": "7d6302dadc558e5d96c4ab2f4c9b54ad210dd9dcc66122baefbcac2aa84edcb1",
    "Q5_0": "8bf78468e28b51798ef8848d9921629e749996168f1eed5c4d3f7656f529597c",
    "Q5_1": "316d66ec6998ace04076a1c8b3fd18f8c83ab415c604b0cc63389dba3361ce1e",
    "Q8_0": "7b2abc7746d4dcd037d382a603f22c40ae83f9772c8dcf26b2b2fb93c00d02e2",
    "Q3_K": "5fc922847f5b27fb2e8d876bcfa85430f3b309f4f7d77146924158647cd8c7d9",  # libggml 0.20.2
    "Q4_K": "5bc8fef62c6bf37bb4ceaf1fb994063e695ab1117118b99c8846e6c8633b9872",
    "Q5_K": "ea2106a7f31cd9bfca007b30e545fdbda02e6225fdb65ccce31e66d443a3453e",
    "Q6_K": "0bcf698c93adf82216acf205ff3b32655772afc93240a8712029badb29ebbbdb",
}
WEIGHTED_DIGESTS = {  # of the same with the importance of `importance()`
    "Q4_0": "86c1994602a83f2204de99ac186b4a200f33a1af2b912b261570879f6ac2e149",
    "Q4_1": "b7fc9eabd5d36511eaa1d5281849510c86735278da28ffe20a258296bf63bd01",
    "Q5_0": "9bcdbea2daeb82db1fe05afcd321a720ef02a14433f0f815a45378c96d30455a",
    "Q5_1": "88561f6cbb7045ca9acaa0b6ad0f5082330d4c850a26f536b5653d8346236dde",
    "Q8_0": DIGESTS["Q8_0"],
    "Q3_K": "8886eaa206214c4966ae65917e211aa2b1cf99266314a57843f3359ee22ceea7",  # libggml 0.20.2
    "Q4_K": "c7937bb9ae52b71c6797c2522df3752da5e82e5def334703fa34f372d605b45f",
    "Q5_K": "42fff4435c0e9ec85593a87eec5258dddb505d7ccb951de60ad2c4bfad04c7e9",
    "Q6_K": "24ab3e11909f8734ea06cf9e03315abeaf6a6e908d527da4ad7feec4df5792a0",
}
LETTERS = {
    "o": "Q4_0",
    "j": "Q5_1",
    "p": "Q5_0",
    "8": "Q8_0",
    "3": "Q3_K",
    "4": "Q4_K",
    "5": "Q5_K",
    "6": "Q6_K",
    "f": "F32",
    "h": "F16",
}
SQUARE = (256, 256)
ATTENTION = {f"attn_{part}": SQUARE for part in ("q", "v", "output")} | {"attn_k": (128, 256)}
MLP = {f"ffn_{part}": SQUARE for part in ("gate", "up", "down")}
EXPERTS = {f"{name}_exps": (8, *shape) for name, shape in MLP.items()} | {"ffn_gate_inp": (8, 256)}
OF_80 = "6" * 10 + "446" * 20 + "6" * 10  # the first and last eighth, and each third layer between them


def rows() -> np.ndarray:
    """Return 24 rows of 768 values, made without a library's generator: even, heavy-tailed, equal, of one sign, tiny,
    and mixed groups."""
    n = np.arange(24 * 768, dtype=np.uint32)
    for _ in range(2):
        n = (n ^ n >> np.uint32(16)) * np.uint32(0x45D9F3B)
    x = (((n ^ n >> np.uint32(16)) >> np.uint32(8)).astype(np.float64) / 2**24 - 0.5).reshape(24, 768)
    x[8:16] **= 3
    x[16], x[17], x[18] = 0, 0.5, -0.25
    x[19], x[20] = np.abs(x[19]), -np.abs(x[20])
    x[21] *= 1e-6
    x[22, :64] = 0
    x[22, 64:96] *= 1e-4
    x[22, 256:512] *= 1e-3
    x[23, ::32] *= 1000
    return x.astype(np.float32)


def importance() -> np.ndarray:
    """Return weights of 768 columns: heavy-tailed, one very large, and zeros in a group and in a super-block."""
    squares = rows()[9] ** 2
    squares[:40], squares[256:512], squares[600] = 0, 0, 1e4
    return squares


def test_bytes_are_llama_cpps() -> None:
    for digests, weights in ((DIGESTS, None), (WEIGHTED_DIGESTS, importance())):
        for name, digest in digests.items():
            blocks = quantize_rows(rows(), gguf.GGMLQuantizationType[name], weights)
            assert hashlib.sha256(blocks.tobytes()).hexdigest() == digest, name
            first = quantize_rows(rows()[:1], gguf.GGMLQuantizationType[name], weights)
            assert first.tobytes() == blocks[0].tobytes(), (
                name
            )  # the order of sums does not depend on the number of rows


def test_types_are_llama_quantizes() -> None:
    """Types by kind of tensor, one letter per layer, as llama-quantize wrote them. All other matrices have the first
    type. The row of q3_k_m is from llama-quantize's source."""
    untied = {"token_embd.weight": (96, 256), "output.weight": (96, 256)}
    fused = {"attn_qkv": (384, 256), "attn_output": SQUARE, "ffn_up": (512, 256), "ffn_down": SQUARE}
    latent = {"attn_kv_b": SQUARE, "attn_output": (256, 160), "ffn_down": SQUARE}
    short = {"attn_v": (96, 96), "ffn_down": (96, 88)}
    values_80 = OF_80.replace("4", "5")
    of_8_experts = "attn_k=888 attn_v=888 ffn_gate_inp=fff"
    same = ATTENTION | {"attn_k": SQUARE}
    for architecture, num_layers, layer, whole_names, dtype, expected in (
        ("llama", 9, ATTENTION | MLP, {"token_embd.weight": (96, 256)}, "q4_k_m", "4 token_embd=6 attn_v=644644666 ffn_down=644644666"),
        ("llama", 9, ATTENTION | MLP, {"token_embd.weight": (96, 256)}, "q5_k_m", "5 token_embd=6 attn_v=655655666 ffn_down=655655666"),
        ("llama", 9, ATTENTION | MLP, {"token_embd.weight": (96, 256)}, "q6_k", "6"),
        ("llama", 9, ATTENTION | MLP, {"token_embd.weight": (96, 256)}, "q4_0", "o token_embd=6"),
        ("llama", 9, ATTENTION | MLP, untied, "q8_0", "8"),
        ("llama", 80, ATTENTION | MLP, untied, "q4_k_m", f"4 output=6 attn_v={values_80} ffn_down={OF_80}"),
        ("llama", 80, same | MLP, untied, "q4_k_m", f"4 output=6 attn_v={OF_80} ffn_down={OF_80}"),
        ("qwen2", 80, same | MLP, untied, "q4_k_m", f"4 output=6 attn_v={values_80} ffn_down={OF_80}"),
        ("llama", 3, ATTENTION | EXPERTS, untied, "q5_1", f"j output=6 {of_8_experts}"),
        ("llama", 3, ATTENTION | EXPERTS, untied, "q4_k_m", f"4 output=6 {of_8_experts} attn_output=555 ffn_down_exps=446"),
        ("chatglm", 13, fused, untied, "q4_k_m", "4 output=6 attn_qkv=6446446446466 ffn_down=6446446446466"),
        ("deepseek2", 9, latent, untied, "q4_k_m", "4 output=6 attn_kv_b=644644666 attn_output=ppppppppp ffn_down=644644666"),
        ("llama", 3, short, {"output.weight": (96, 96)}, "q4_k_m", "4 output=8 attn_v=pp8 ffn_down=hhh"),
        ("llama", 3, short | {"ffn_up": (96, 96)}, {}, "q3_k_m", "3 attn_v=jjp ffn_down=hhh ffn_up=ooo"),
        ("llama", 33, ATTENTION | MLP, untied, "q3_k_m", f"3 output=6 attn_v=55{'4' * 31} attn_output={'4' * 33} ffn_down=55{'4' * 31}"),
        ("llama", 80, ATTENTION | MLP, untied, "q3_k_m", f"3 output=6 attn_v={'5' * 80} attn_output={'4' * 80} ffn_down=55555{'4' * 75}"),
        ("llama", 3, ATTENTION | EXPERTS, untied, "q3_k_m", f"3 output=6 {of_8_experts} attn_output=555 ffn_down_exps=444"),
    ):  # fmt: skip
        shapes = {f"blk.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in layer.items()}
        types = tensor_types(dtype, shapes | whole_names | {"blk.0.attn_norm.weight": (256,)}, architecture)
        assert types.pop("blk.0.attn_norm.weight") is gguf.GGMLQuantizationType.F32
        first, *changed = expected.split()
        letters = {name.removesuffix(".weight"): [types[name]] for name in whole_names}
        letters |= {name: [types[f"blk.{i}.{name}.weight"] for i in range(num_layers)] for name in layer}
        wanted = {name: first * len(text) for name, text in letters.items()} | dict(text.split("=") for text in changed)
        for name, text in letters.items():
            assert [kind.name for kind in text] == [LETTERS[letter] for letter in wanted[name]], (
                architecture,
                dtype,
                name,
            )
    down = {f"blk.{i}.ffn_down.weight": SQUARE for i in range(17)}
    for dtype, first, rest in (("q4_0", "Q4_1", "Q4_0"), ("q5_0", "Q5_1", "Q5_0"), ("q4_1", "Q4_1", "Q4_1")):
        chosen = tensor_types(dtype, down, "llama", has_importance=True).values()
        assert [kind.name for kind in chosen] == [first] * 2 + [rest] * 15


def test_types_of_layers_with_one_part() -> None:
    """The types of Nemotron-H by llama_model_quantize, which counts matrices instead of layers."""
    parts = {"-": "ffn_down.weight", "*": "attn_v.weight", "M": "ssm_norm.weight"}
    shapes = {f"blk.{i}.{parts[letter]}": SQUARE for i, letter in enumerate("M-*M" * 4 + "--M*" * 2)}
    shapes |= {"blk.0.ssm_a": (8, 1), "blk.0.ssm_d": (8, 1), "blk.0.ffn_gate_inp_shexp.weight": (1, 256)}
    for dtype, down_types, value_types in (("q4_k_m", "66644644", "446446"), ("q3_k_m", "54444444", "554444")):
        types = tensor_types(dtype, shapes, "nemotron_h")
        for part, letters in (("ffn_down", down_types), ("attn_v", value_types)):
            assert [kind.name for name, kind in types.items() if part in name] == [LETTERS[x] for x in letters]
        others = {kind.name for name, kind in types.items() if "ssm" in name or "shexp" in name}
        assert others == {"F32"}


def test_files_of_every_type(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each tensor equals the package's dequantisation, and more bits are closer to the floats. Rows of 88 values are
    float16."""
    write_model(
        tmp_path / "hf", LlamaForCausalLM, hidden_size=256, intermediate_size=88, num_attention_heads=4, head_dim=64
    )
    checkpoint, file = open_checkpoint(tmp_path / "hf", False), tmp_path / "x.gguf"
    floats = {name: tensor for opened in checkpoint.open_weights({}) for name, tensor in opened.read(opened.shapes)}
    name = "model.layers.1.mlp.gate_proj.weight"
    errors = {}
    for dtype in ("q4_0", "q3_k_m", "q4_1", "q4_k_m", "q5_0", "q5_1", "q5_k_m", "q6_k", "q8_0"):
        write_gguf(checkpoint, file, dtype)
        reader = gguf.GGUFReader(file)
        assert reader.fields["general.file_type"].contents() == FILE_TYPES[dtype][1]
        assert reader.fields["general.quantization_version"].contents() == 2
        stored = {tensor.name: tensor for tensor in reader.tensors}
        assert stored["blk.1.ffn_down.weight"].tensor_type is gguf.GGMLQuantizationType.F16
        (opened,) = open_checkpoint(file, False).open_weights({})
        dequantised = next(iter(opened.read([name])))[1]
        gate = stored["blk.1.ffn_gate.weight"]
        np.testing.assert_array_equal(dequantised.numpy(), gguf.quants.dequantize(gate.data, gate.tensor_type))
        errors[dtype] = (dequantised - floats[name]).norm().item()
    by_bits = [errors[dtype] for dtype in ("q3_k_m", "q4_0", "q4_k_m", "q5_0", "q5_k_m", "q6_k", "q8_0")]
    assert by_bits == sorted(by_bits, reverse=True)
    assert caplog.messages[0] == (
        "q4_0: the rows of 2 tensors are not a multiple of the block size, so their type is F16 (the first is blk.0.ffn_down.weight)"
    )
    tokens = [
        complete(engine, [[5, 6, 7]], DecodeConfig(max_new_tokens=8))[0].token_ids
        for engine in (engine_of(file, block_activations="none"), engine_of(tmp_path / "hf"))
    ]
    assert tokens[0] == tokens[1]  # of q8_0, whose error is far below the distance of the logits


def test_values_beyond_a_scale_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "hf", LlamaForCausalLM, hidden_size=256, intermediate_size=256)
    for value, named in ((1e9, "1e+09"), (torch.nan, "nan")):
        model.model.layers[1].mlp.up_proj.weight.data[0, 0] = value
        model.save_pretrained(tmp_path / "hf")
        for dtype in ("q4_0", "q5_1", "q8_0", "q3_k_m", "q4_k_m", "q6_k"):
            with pytest.raises(
                UserError, match=rf"blk.1.ffn_up.weight holds {named.replace('+', '.')}, which Q\d_\w cannot"
            ):
                write_gguf(open_checkpoint(tmp_path / "hf", False), tmp_path / "x.gguf", dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]  # no partial file
