"""PaddleNLP's layout compared with golden logits of the same weights in Hugging Face's layout."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conf.errors import UserError
from models.formats import open_checkpoint
from tests.helpers.builders import all_logits, engine_of
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS, TOLERANCE
from tests.helpers.huggingface_files import CONFIG, load, make_tensors, write_whole
from tests.helpers.paddle_files import fused, rank_of, save_pdparams, save_safetensors, write_paddle

# H D, G D and G D of its queries, keys and values; F and F of its gate and up projections
SECTIONS = {
    "chatglm2": {"query_key_value": (64, 32, 32), "dense_h_to_4h": (160, 160)},
    "qwen": {"c_attn": (64, 64, 64)},
}


def assert_golden(folder: Path, family: str) -> None:
    golden = load_file(GOLDENS / family / "golden.safetensors")
    logits = all_logits(engine_of(folder, allow_pickle=True), golden["input_ids"][0].tolist())
    torch.testing.assert_close(logits, golden["logits"][0], atol=TOLERANCE, rtol=0)


@each("family", ["llama3", "qwen2", "chatglm2", "chatglm3", "bloom", "qwen", "qwen2_moe", "mixtral"])
def test_whole_pickle(family: str, tmp_path: Path) -> None:
    arrays, _ = write_paddle(tmp_path, GOLDENS / family)
    save_pdparams(tmp_path / "model_state.pdparams", arrays)
    assert_golden(tmp_path, family)


@each("family", ["llama3", "qwen2", "chatglm2", "bloom"])
def test_whole_safetensors(family: str, tmp_path: Path) -> None:
    arrays, _ = write_paddle(tmp_path, GOLDENS / family)
    save_safetensors(tmp_path / "model.safetensors", arrays)
    assert_golden(tmp_path, family)


@each("kind", ["pdparams", "safetensors"])
def test_shards(kind: str, tmp_path: Path) -> None:
    arrays, _ = write_paddle(tmp_path, GOLDENS / "llama3")
    stem, save = ("model_state", save_pdparams) if kind == "pdparams" else ("model", save_safetensors)
    weight_map = {}
    for i in range(2):
        file = f"{stem}-{i + 1:05}-of-00002.{kind}"
        shard = dict([*arrays.items()][i::2])
        save(tmp_path / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    (tmp_path / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_golden(tmp_path, "llama3")


@each("num_ranks", [1, 2])
@each("family", ["llama3", "qwen2", "chatglm2", "bloom", "qwen"])
def test_ranks(family: str, num_ranks: int, tmp_path: Path) -> None:
    arrays, _ = write_paddle(tmp_path, GOLDENS / family)
    for rank in range(num_ranks):
        part = rank_of(arrays, rank, num_ranks, SECTIONS.get(family, {}))
        save_pdparams(tmp_path / f"model_state.tp{rank:02}.pdparams", part)
    assert_golden(tmp_path, family)


@each("num_ranks", [1, 2])
@each("family", ["llama3", "qwen2"])
def test_fused_matrices(family: str, num_ranks: int, tmp_path: Path) -> None:
    arrays, config = write_paddle(tmp_path, GOLDENS / family, fuse_attention_qkv=True, fuse_attention_ffn=True)
    arrays = fused(arrays, config["num_key_value_heads"])
    width = config["intermediate_size"]
    for rank in range(num_ranks):
        part = rank_of(arrays, rank, num_ranks, {"gate_up_fused_proj": (width, width)})
        save_pdparams(tmp_path / f"model_state.tp{rank:02}.pdparams", part)
    assert_golden(tmp_path, family)


def test_ranks_of_stages(tmp_path: Path) -> None:
    arrays, _ = write_paddle(tmp_path, GOLDENS / "llama3")
    first = {name: array for name, array in arrays.items() if "embed" in name or ".layers.0." in name}
    stages = first, {name: array for name, array in arrays.items() if name not in first}
    for stage, held in enumerate(stages):
        for rank in range(2):
            save_pdparams(tmp_path / f"model_state.tp{rank:02}_pp{stage:02}.pdparams", rank_of(held, rank, 2, {}))
    assert_golden(tmp_path, "llama3")
    (tmp_path / "model_state.tp00_pp01.pdparams").unlink()
    with pytest.raises(UserError, match=r"the file of rank 0 is missing \(found: 1\)"):
        load(tmp_path, allow_pickle=True)


@each("other", ["model_state.tp01_pp00.pdparams", "model.tp01.safetensors"])
def test_two_files_of_one_rank(other: str, tmp_path: Path) -> None:
    write_paddle(tmp_path, GOLDENS / "llama3")
    for name in ("model_state.tp00.pdparams", "model_state.tp01.pdparams", other):
        save_pdparams(tmp_path / name, {})
    names = " and ".join(sorted((other, "model_state.tp01.pdparams")))
    with pytest.raises(UserError, match=f"{names} are of the same rank: keep one of them"):
        open_checkpoint(tmp_path, True)


@each("kind", ["pdparams", "safetensors"])
def test_bfloat16_is_stored_as_uint16(kind: str, tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in make_tensors().items()}
    write_whole(tmp_path, {name: tensor.float() for name, tensor in tensors.items()})
    arrays, _ = write_paddle(tmp_path / "paddle", tmp_path, dtype="bfloat16")
    bits = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in arrays.items()}
    save = save_pdparams if kind == "pdparams" else save_safetensors
    save(tmp_path / "paddle" / f"model{'_state' * (kind == 'pdparams')}.{kind}", bits)
    loaded = load(tmp_path / "paddle", allow_pickle=True)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_a_model_config_of_older_versions(tmp_path: Path) -> None:
    """A nested GPT config. test_paddle_gpt.py compares the model with its code's formulas."""
    arrays, config = write_paddle(tmp_path, GOLDENS / "llama3")
    save_pdparams(tmp_path / "model_state.pdparams", arrays)
    (tmp_path / "config.json").unlink()
    nested = {"init_args": [config | {"init_class": "LlamaModel"}], "init_class": "LlamaForCausalLM"}
    (tmp_path / "model_config.json").write_text(json.dumps(nested))
    assert_golden(tmp_path, "llama3")


def test_pickles_are_refused_with_the_remedy(tmp_path: Path) -> None:
    arrays, _ = write_paddle(tmp_path, GOLDENS / "llama3")
    save_pdparams(tmp_path / "model_state.pdparams", arrays)
    with pytest.raises(UserError, match=r"\(model_state\.pdparams\), which can hold code: .*model\.allow_pickle=true"):
        load(tmp_path)


def test_every_setting_of_training_is_known(tmp_path: Path) -> None:
    """No setting stays unread, and linear scaling is converted to Hugging Face's."""
    write_paddle(tmp_path, GOLDENS / "llama3", seq_length=2048, rope_scaling_type="linear", rope_scaling_factor=2.0)
    config = open_paddle_config(tmp_path)
    assert config["rope_scaling"] == {"type": "linear", "factor": 2.0}
    assert not {"seq_length", "tensor_parallel_degree", "rope_scaling_type", "alibi"} & config.keys()


def test_the_length_of_training_is_not_that_of_chatglm2(tmp_path: Path) -> None:
    write_paddle(tmp_path, GOLDENS / "chatglm2", max_sequence_length=32768, seq_length=2048)
    assert open_paddle_config(tmp_path)["seq_length"] == 32768


def open_paddle_config(folder: Path) -> dict[str, object]:
    save_pdparams(folder / "model_state.pdparams", {})
    return open_checkpoint(folder, True).config.values


@each(
    "changes, message",
    [
        ({"alibi": True}, "alibi=True is not supported: only False"),
        ({"rope_scaling_type": "dynamic_ntk"}, "rope_scaling_type='dynamic_ntk' is not supported: only None, 'linear'"),
        ({"model_type": "yuan"}, "PaddleNLP's model_type='yuan' is not supported: only bloom, chatglm_v2, ernie, gpt"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ],
)
def test_settings_that_compute_something_else(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    write_paddle(tmp_path, GOLDENS / "llama3", **changes)
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        open_paddle_config(tmp_path)


@each(
    "model_type, name",
    [
        ("chatglm", "chatglm.transformer.word_embeddings.weight"),
        ("deepseek_v2", "deepseek_v2.layers.0.self_attn.q_proj.weight"),
        ("ernie4_5_moe", "ernie.layers.0.self_attn.qkv_proj.weight"),
        ("opt", "opt.decoder.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_safetensors_of_other_families_are_one_line(model_type: str, name: str, tmp_path: Path) -> None:
    """The error is not a list of tensors that are missing in Hugging Face's layout."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "paddlenlp_version": "3.0.0"}))
    save_safetensors(tmp_path / "model.safetensors", {name: np.zeros((2, 2), np.float32)})
    line = f"PaddleNLP's model_type='{model_type}' is not supported: only bloom, .*: give the model in Hugging Face"
    with pytest.raises(UserError, match=line):
        open_checkpoint(tmp_path, False)


def test_a_config_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has PaddleNLP's weights, but neither config\.json nor model_config\.json"):
        open_paddle_config(tmp_path)


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    arrays, _ = write_paddle(tmp_path, GOLDENS / "llama3")
    arrays["llama.extra.weight"] = arrays.pop("llama.norm.weight")
    save_pdparams(tmp_path / "model_state.pdparams", arrays)
    with pytest.raises(UserError, match=r"missing: model\.norm\.weight; unexpected: model\.extra\.weight"):
        load(tmp_path, allow_pickle=True)


def test_fused_rows_that_are_not_heads(tmp_path: Path) -> None:
    arrays, config = write_paddle(tmp_path, GOLDENS / "llama3")
    arrays = fused(arrays, config["num_key_value_heads"])
    name = "llama.layers.0.self_attn.qkv_proj.weight"
    save_pdparams(tmp_path / "model_state.pdparams", arrays | {name: arrays[name][:, :-1]})
    with pytest.raises(UserError, match="outputs, which cannot be divided into q_proj, k_proj, v_proj"):
        load(tmp_path, allow_pickle=True)


@each("shape", [(), (0, 64), (64,)])
def test_fused_tensors_of_another_rank(shape: tuple[int, ...], tmp_path: Path) -> None:
    arrays, config = write_paddle(tmp_path, GOLDENS / "llama3")
    arrays = fused(arrays, config["num_key_value_heads"])
    name = "llama.layers.0.self_attn.qkv_proj.weight"
    save_pdparams(tmp_path / "model_state.pdparams", arrays | {name: np.zeros(shape, np.float32)})
    with pytest.raises(UserError, match=r"cannot be divided into q_proj|wrong shape|slices"):
        load(tmp_path, allow_pickle=True)


def test_a_matrix_alone_and_fused(tmp_path: Path) -> None:
    arrays, config = write_paddle(tmp_path, GOLDENS / "llama3")
    save_pdparams(tmp_path / "model_state.pdparams", arrays | fused(arrays, config["num_key_value_heads"]))
    with pytest.raises(UserError, match=r"q_proj\.weight twice: under two names, or also in a fused tensor"):
        load(tmp_path, allow_pickle=True)


def test_hugging_face_folders_stay_what_they_are(tmp_path: Path) -> None:
    write_whole(tmp_path, make_tensors())
    assert open_checkpoint(tmp_path, False).config.values == CONFIG
