"""Meta's layout compared with the same weights in Hugging Face's layout, which transformers wrote and computes."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import Weights
from models.families.llama import LlamaConfig, read_config
from models.formats.meta import AT_ONCE, read_meta_config
from models.tokenizers import load_tokenizer
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import SHARED, all_logits, engine_of, run_config, weights_of
from tests.helpers.cases import each
from tests.helpers.huggingface_files import Recording, make_tensors, peak_of_loading
from tests.helpers.meta_files import PARAMS, tensors_of, write_meta

PROMPT = list(range(3, 43))


def load(folder: Path, **model: Any) -> Any:
    return load_engine(run_config(folder, **model), 3)


def parameters(folder: Path, **model: Any) -> dict[str, Tensor]:
    return weights_of(load(folder, **model).executor.model)


@each("num_shards", [1, 2])
@each("embedding", [0, 1])
@each("tied", [False, True])
def test_equals_the_other_layout(num_shards: int, embedding: int, tied: bool, tmp_path: Path) -> None:
    tensors = tensors_of(tmp_path / "hf", tie_word_embeddings=tied)
    meta = write_meta(tmp_path / "meta", tensors, num_shards, embedding)
    loaded = parameters(meta, allow_pickle=True)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name
    assert torch.equal(
        all_logits(load(meta, allow_pickle=True), PROMPT), all_logits(engine_of(tmp_path / "hf"), PROMPT)
    )


def test_bytes_of_progress_match_the_model(tmp_path: Path) -> None:
    tensors = tensors_of(tmp_path / "hf")
    calls: list[tuple[int, int]] = []
    meta = write_meta(tmp_path / "meta", tensors, 2)
    load_engine(run_config(meta, allow_pickle=True), 1, Recording(calls))
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert calls[-1] == (size, size)
    assert len(calls) == len(tensors)


@pytest.mark.long
def test_peak_memory_is_the_model_and_what_is_open(tmp_path: Path) -> None:
    """The parameters are the merged tensors themselves; about a layer of the shards is mapped."""
    for scale, name in ((1, "small"), (56, "large")):
        tensors, dim = make_tensors(scale), 32 * scale
        sizes = {"dim": dim, "multiple_of": 48 * scale, "ffn_dim_multiplier": 0.1}  # rounded up to multiple_of
        write_meta(tmp_path / name, tensors, 2, **sizes)
    sizes_of_all = sorted(tensor.nbytes for tensor in tensors.values())
    total, largest = sum(sizes_of_all), sizes_of_all[-1]
    peak = peak_of_loading(tmp_path / "small", tmp_path / "large")
    # As in test_checkpoint, plus the mapped bytes: at most the largest tensors, as many as are read at once. This model
    # has only two layers; a loader that keeps everything mapped needs two models.
    assert total * 0.9 < peak < total + 2 * largest + sum(sizes_of_all[-AT_ONCE:])


def read(folder: Path, **params: Any) -> LlamaConfig:
    write_meta(folder, {"model.embed_tokens.weight": torch.ones(96, 64), "lm_head.weight": torch.ones(96, 64)}, 1)
    (folder / "params.json").write_text(json.dumps({k: v for k, v in (PARAMS | params).items() if v is not None}))
    return read_config(read_meta_config(folder, allow_pickle=True))


def test_params_in_the_terms_of_config_json(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (
        96,
        64,
        224,
        2,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.rms_norm_eps, config.rotary.theta, config.rotary.type) == (1e-5, 500000.0, "default")
    assert read(tmp_path, n_kv_heads=None).num_key_value_heads == 4
    assert read(tmp_path, ffn_dim_multiplier=None).intermediate_size == 176  # 170, rounded up to a multiple of 8
    assert read(tmp_path, vocab_size=80).vocab_size == 80


@each(
    "dim, multiple_of, multiplier, expected",
    [
        (4096, 256, None, 11008),
        (5120, 256, None, 13824),
        (8192, 4096, 1.3, 28672),
        (4096, 1024, 1.3, 14336),
        (2048, 256, 1.5, 8192),
    ],
)
def test_sizes_of_published_models(
    dim: int, multiple_of: int, multiplier: float, expected: int, tmp_path: Path
) -> None:
    """intermediate_size of the config.json of Llama 1 and 2 (7, 13 and 70 billion parameters), Llama 3 8B and Llama 3.2
    1B."""
    config = read(tmp_path, dim=dim, n_heads=32, n_kv_heads=8, multiple_of=multiple_of, ffn_dim_multiplier=multiplier)
    assert config.intermediate_size == expected


@each(
    "params, context",
    [
        ({"rope_theta": None, "norm_eps": 1e-6}, 2048),
        ({"rope_theta": None}, 4096),
        ({"rope_theta": 1e6}, 16384),
        ({}, 8192),
        ({"use_scaled_rope": True}, 131072),
        ({"max_seq_len": 77}, 77),
    ],
)
def test_context(params: dict[str, Any], context: int, tmp_path: Path) -> None:
    assert read(tmp_path, **params).context_length == context


@each("dim, factor", [(4096, 8.0), (2048, 32.0)])
def test_scaled_rope(dim: int, factor: float, tmp_path: Path) -> None:
    """rope_scaling of the config.json of Llama 3.1 and 3.2 on the hub."""
    rotary = read(tmp_path, use_scaled_rope=True, dim=dim).rotary
    assert (rotary.type, rotary.factor, rotary.original_length) == ("llama3", factor, 8192)
    assert (rotary.low_freq_factor, rotary.high_freq_factor) == (1.0, 4.0)


@each(
    "params, message",
    [
        ({"dim": "64"}, r"params\.json: dim='64' is not of type int"),
        ({"n_layers": None}, r"params\.json: n_layers is missing"),
        ({"n_heads": 5}, r"params\.json: dim=64 cannot be divided into n_heads=5 heads of an even size"),
        ({"n_kv_heads": 3}, r"params\.json: n_heads=4 is not a multiple of n_kv_heads=3"),
        ({"ffn_dim_multiplier": 0}, r"params\.json: ffn_dim_multiplier=0.* is not a number from 1e-30"),
        ({"quantization_args": {"scheme": "int4"}}, "quantization_args=.* is not supported"),
        ({"moe_args": {"num_experts": 16}}, "moe_args=.* is not supported"),
        ({"vision_chunk_size": 448}, "vision_chunk_size=448 is not supported"),
    ],
)
def test_refused_params(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, **params)


def test_unknown_params_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(
        write_meta(tmp_path / "meta", tensors_of(tmp_path / "hf"), 1, sliding_window=16, max_batch_size=4),
        allow_pickle=True,
    )
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["sliding_window"]


@each(
    "params, message",
    [
        ({"n_layers": 3}, r"missing: model\.layers\.2\."),
        (
            {"n_kv_heads": 4},
            r"wrong shape: model\.layers\.0\.self_attn\.k_proj\.weight \[32, 64\], expected \[64, 64\]",
        ),
        ({"multiple_of": 256}, r"wrong shape: model\.layers\.0\.mlp\.\w+\.weight \[\d+, \d+\], expected"),
        ({"vocab_size": 95}, r"wrong shape: model\.embed_tokens\.weight \[96, 64\], expected \[95, 64\]"),
    ],
)
def test_params_that_contradict_the_tensors(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", tensors_of(tmp_path / "hf"), 2, **params)
    with pytest.raises(UserError, match=message):
        load(meta, allow_pickle=True)


@each("missing, listed", [("00", "consolidated.01"), ("01", "consolidated.00.pth, consol")])
def test_missing_shard(missing: str, listed: str, tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", tensors_of(tmp_path / "hf"), 4, n_kv_heads=4)
    (meta / f"consolidated.{missing}.pth").unlink()
    with pytest.raises(UserError, match=rf"consolidated\.{missing}\.pth is missing \(found: {listed}"):
        load(meta, allow_pickle=True)


def test_the_last_shard_is_missing(tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", tensors_of(tmp_path / "hf"), 2)
    (meta / "consolidated.01.pth").unlink()
    with pytest.raises(
        UserError, match=r"wrong shape: .*lm_head\.weight \[48, 64\], expected|q_proj\.weight \[32, 64\], expected"
    ):
        load(meta, allow_pickle=True)


def test_no_shards(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    with pytest.raises(UserError, match=r"consolidated\.00\.pth is missing \(found: none\)"):
        load(tmp_path, allow_pickle=True)


def test_truncated_shard(tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", tensors_of(tmp_path / "hf"), 2)
    file = meta / "consolidated.01.pth"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(UserError, match=r"consolidated\.01\.pth is truncated, too old, or holds more than tensors"):
        load(meta, allow_pickle=True)


def test_shards_of_two_models(tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", tensors_of(tmp_path / "hf"), 2)
    other = write_meta(tmp_path / "other", tensors_of(tmp_path / "hf2", vocab_size=64), 2)
    (other / "consolidated.01.pth").replace(meta / "consolidated.01.pth")
    with pytest.raises(
        UserError, match=r"01\.pth and consolidated\.00\.pth are not of the same model: they differ in output\."
    ):
        load(meta, allow_pickle=True)


def test_a_tensor_of_other_architectures_is_unexpected(tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", tensors_of(tmp_path / "hf"), 1)
    content = torch.load(meta / "consolidated.00.pth", weights_only=True)
    torch.save(content | {"layers.0.attention.wq.bias": torch.ones(64)}, meta / "consolidated.00.pth")
    with pytest.raises(UserError, match=r"unexpected: layers\.0\.attention\.wq\.bias$"):
        load(meta, allow_pickle=True)


@each("weights", list(Weights))
def test_pickles_are_refused_with_the_remedy(weights: Weights, tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", tensors_of(tmp_path / "hf"), 1)
    with pytest.raises(UserError, match=r"consolidated\.00\.pth.*model\.allow_pickle=true"):
        load(meta, weights=weights)


def test_code_in_a_shard_does_not_run(tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", tensors_of(tmp_path / "hf"), 1)
    file, result, trace = meta / "consolidated.00.pth", io.BytesIO(), tmp_path / "trace"
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(result, "w") as new:
        for name in old.namelist():
            code = f"cos\nmkdir\n(V{trace}\ntR.".encode()
            new.writestr(name, code if name.endswith("data.pkl") else old.read(name))
    file.write_bytes(result.getvalue())
    with pytest.raises(UserError, match="holds more than tensors"):
        load(meta, allow_pickle=True)
    assert not trace.exists()


def test_a_folder_in_both_layouts_is_hugging_faces(tmp_path: Path) -> None:
    tensors = tensors_of(tmp_path / "hf")
    write_meta(tmp_path / "hf", tensors, 1, n_layers=99)
    assert parameters(tmp_path / "hf").keys() == tensors.keys()


def test_llama_3_stops_where_metas_code_does(tmp_path: Path) -> None:
    for vocab_size, expected in ((96, None), (128256, [128001, 128008, 128009])):
        write_meta(tmp_path, {"model.embed_tokens.weight": torch.ones(vocab_size, 64)}, 1)
        assert read_meta_config(tmp_path, allow_pickle=True).raw("eos_token_id") == expected


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real tokenizers of ../shared")
@each("name, bos, eos, special", [("llama2", 1, 2, {}), ("llama3", 128000, 128001, {"<|eot_id|>": 128009})])
def test_bare_tokenizer(name: str, bos: int, eos: int, special: dict[str, int], tmp_path: Path) -> None:
    """Compared with ids of sentencepiece and tiktoken themselves."""
    source = SHARED / "data" / "tokenizers" / name
    (tmp_path / "tokenizer.model").symlink_to(source / "tokenizer.model")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    cases = json.loads((source / "vectors.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) > 40
    for case in cases:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"], add_special_tokens=True) == [bos, *case["ids"]]
        assert tokenizer.decode(case["ids"], skip_special_tokens=True) == case["text"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (bos, eos)
    for text, token_id in special.items():
        assert tokenizer.encode(text, add_special_tokens=False) == [token_id]
