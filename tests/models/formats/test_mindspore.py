"""MindSpore checkpoints, written by the protobuf library, against the same weights in Hugging Face's layout."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from conf.errors import UserError
from models.formats import open_checkpoint
from models.formats.mindspore import our_name
from models.formats.mindspore_ckpt import CkptFile
from models.formats.mindspore_config import read_mindformers_config
from models.llama import LlamaConfig, read_config
from tests.builders import SMALL, write_llama
from tests.models.formats.test_ranks import assert_one_tensor_at_a_time, assert_same_model, cut, parameters

NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
WHOLE = {
    "model.embed_tokens.weight": "model.tok_embeddings.embedding_weight",
    "model.norm.weight": "model.norm_out.weight",
    "lm_head.weight": "lm_head.weight",
}
TYPES = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16", torch.int8: "Int8"}
MODEL_CONFIG = {
    "type": "LlamaConfig",
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 96,
    "intermediate_size": 88,
    "rms_norm_eps": 1e-6,
    "seq_length": 128,
    "eos_token_id": None,
    "compute_dtype": "float16",
    "use_past": True,
}


def messages(packed: bool) -> Any:
    """checkpoint.proto's Checkpoint."""
    file = descriptor_pb2.FileDescriptorProto(name=f"checkpoint{packed}.proto", package=f"p{packed}", syntax="proto2")
    kinds, labels = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.FieldDescriptorProto
    fields: dict[str, list[tuple[str, int, bool, str]]] = {
        "TensorProto": [
            ("dims", kinds.TYPE_INT64, True, ""),
            ("tensor_type", kinds.TYPE_STRING, False, ""),
            ("tensor_content", kinds.TYPE_BYTES, False, ""),
        ],
        "Value": [("tag", kinds.TYPE_STRING, False, ""), ("tensor", kinds.TYPE_MESSAGE, False, "TensorProto")],
        "Checkpoint": [("value", kinds.TYPE_MESSAGE, True, "Value")],
    }
    for name, members in fields.items():
        message = file.message_type.add(name=name)
        for number, (member, kind, repeated, type_name) in enumerate(members, 1):
            label = labels.LABEL_REPEATED if repeated else labels.LABEL_REQUIRED
            added = message.field.add(name=member, number=number, type=kind, label=label)
            if type_name:
                added.type_name = f".p{packed}.{type_name}"
            if kind == kinds.TYPE_INT64:
                added.options.packed = packed
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"p{packed}.Checkpoint"))


CHECKPOINT = {packed: messages(packed) for packed in (False, True)}


def ckpt(tensors: dict[str, Tensor], packed: bool = False, part: int = 2**29) -> bytes:
    """The file's bytes; tensors above `part` bytes in several Values, as MindSpore writes them."""
    checkpoint = CHECKPOINT[packed]()
    for tag, tensor in tensors.items():
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for start in range(0, len(content), part):
            value = checkpoint.value.add(tag=tag)
            value.tensor.dims.extend(tensor.shape)
            value.tensor.tensor_type = TYPES[tensor.dtype]
            value.tensor.tensor_content = content[start : start + part]
    return checkpoint.SerializeToString()


def mindformers_name(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, leaf = rest.rpartition(".")
    return f"model.layers.{layer}.{NAMES[module]}.{leaf}"


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {mindformers_name(name): tensor for name, tensor in tensors.items()}


def write_yaml(folder: Path, **config: Any) -> Path:
    content = {
        "run_mode": "predict",
        "model": {"model_config": MODEL_CONFIG | config, "arch": {"type": "LlamaForCausalLM"}},
    }
    (folder / "predict.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write_llama(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ms").mkdir()
    return tmp_path / "ms"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("part", [1001, 2**29])
def test_whole_file(packed: bool, part: int, whole: Path, folder: Path) -> None:
    (folder / "llama.ckpt").write_bytes(ckpt(renamed(load_file(whole / "model.safetensors")), packed, part))
    shutil.copy(whole / "config.json", folder)
    assert_same_model(folder, whole)


def test_several_files_and_yaml(whole: Path, folder: Path) -> None:
    tensors = list(renamed(load_file(whole / "model.safetensors")).items())
    for i in range(3):
        (folder / f"part_{i}.ckpt").write_bytes(ckpt(dict(tensors[i::3])))
    assert_same_model(write_yaml(folder), whole)


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks(num_ranks: int, num_stages: int, whole: Path, folder: Path) -> None:
    for i, tensors in enumerate(cut(load_file(whole / "model.safetensors"), num_ranks, num_stages)):
        (folder / f"rank_{i}").mkdir()
        (folder / f"rank_{i}" / f"llama_rank_{i}-3_2.ckpt").write_bytes(ckpt(renamed(tensors)))
    assert_same_model(write_yaml(folder), whole)


def test_peak_memory(tmp_path: Path) -> None:
    def write(file: Path, held: dict[str, Tensor]) -> None:
        file.with_suffix(".ckpt").write_bytes(ckpt(renamed(held)))

    # A piece is copied from the mapping, because its bytes are not aligned, and below 32 MB malloc keeps the holes of such copies;
    # and the packed weight is made beside the whole one. Seen: 179 to 191 MB for a model of 125 MB; a second model would be 250.
    assert_one_tensor_at_a_time(tmp_path, write, spare=6)


def test_biases_make_a_qwen2(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "whole").mkdir()
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SMALL)).save_pretrained(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensor.normal_()  # transformers begins with zeros
    save_file(tensors, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    (folder / "qwen2.ckpt").write_bytes(ckpt(renamed(tensors)))
    assert_same_model(write_yaml(folder, qkv_has_bias=True), tmp_path / "whole")


def test_training_states_are_left_out(whole: Path, folder: Path) -> None:
    weights = renamed(load_file(whole / "model.safetensors"))
    query = "model.layers.0.attention.wq.weight"
    states = [
        f"adam_m.{query}",
        f"adam_v.{query}",
        f"accu_grads.{query}",
        "global_step",
        "epoch_num",
        "step_num",
        "scale_sense",
    ]
    states += ["learning_rate", "beta1_power", "loss_scale", "model.layers.0.attention.paged_attention_mgr.key_cache"]
    states += ["current_iterator_step", "last_overflow_iterator_step", "moment1." + query]
    extra = {name: torch.ones(3, dtype=torch.int8) for name in states}
    (folder / "train.ckpt").write_bytes(ckpt(weights | extra))
    assert_same_model(write_yaml(folder), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_and_checksum(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randn(3, 5).to(dtype)
    (tmp_path / "a.ckpt").write_bytes(ckpt({"x": tensor}) + b"crc_num" + bytes(10))
    ((name, read),) = CkptFile(tmp_path / "a.ckpt", our_name).read(["x"])
    assert (name, read.dtype) == ("x", dtype)
    assert torch.equal(read, tensor)


def test_empty_dims_are_a_scalar(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(ckpt({"x": torch.tensor(2.5)}))
    ((_, read),) = CkptFile(tmp_path / "a.ckpt", our_name).read(["x"])
    assert (read.shape, read.item()) == ((), 2.5)


QUERY = "model.layers.0.attention.wq.weight"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ckpt({QUERY: torch.ones(2)}) + b"\x0a", r"it ends inside a number at byte \d+"),
        (ckpt({QUERY: torch.ones(2)})[:-1], r"the field at byte \d+ is \d+ bytes long, but what holds it ends after \d+"),
        (ckpt({QUERY: torch.ones(2)}) + b"\x12\x00", "field 2 of Checkpoint is unknown"),
        (b"\x0a\x00", "has no tag or no tensor"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "longer than 10 bytes"),
        (b"\x0d\x00\x00\x00\x00", "unknown wire type 5"),
        (ckpt({QUERY: torch.ones(2), "x": torch.ones(1), "\n": torch.ones(1)}), "is empty, longer than 512 bytes or not text"),
        (ckpt({"x" * 600: torch.ones(2)}), "longer than 512 bytes"),
        (ckpt({"x": torch.ones(1), "y": torch.ones(1)}) + ckpt({"x": torch.ones(1)}), "x is there twice"),
        (ckpt({"x": torch.ones(2)}) + ckpt({"x": torch.ones(3)}), "the parts of x differ in shape or type"),
        (ckpt({"x": torch.ones(2)}) + ckpt({"x": torch.ones(2)}), r"x \[2\] of Float32 takes 8 bytes, but 16 are there"),
        (ckpt({"x": torch.ones(2, dtype=torch.int8)}), "x is of type Int8: only Float32, Float16, BFloat16 are supported"),
        (ckpt({"x": torch.ones((1,) * 9)}), "x has more than 8 dimensions"),
        (ckpt({"model.layers.0.attention.w_qkv.weight": torch.ones(2)}), "w_qkv.weight is fused in one of two orders"),
        (ckpt({"model.layers.0.feed_forward.w_gate_hidden.weight": torch.ones(2)}), "fused in one of two orders"),
        (ckpt({"model.layers.0.feed_forward.ffn.w1.weight": torch.ones(2)}), "belongs to a mixture of experts"),
        (ckpt({"x": torch.ones(2)}).replace(b"\x08\x02", b"\x08\x00"), r"x \[0\] of Float32 takes 0 bytes, but 8"),
    ],
    ids=range(17),
)  # fmt: skip
def test_refused_files(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.ckpt is damaged or not a MindSpore checkpoint: .*{message}"):
        CkptFile(tmp_path / "a.ckpt", our_name)


def test_a_negative_dimension(tmp_path: Path) -> None:
    checkpoint = CHECKPOINT[False]()
    value = checkpoint.value.add(tag="x")
    value.tensor.dims.extend([-1, -2])
    value.tensor.tensor_type, value.tensor.tensor_content = "Float32", bytes(8)
    (tmp_path / "a.ckpt").write_bytes(checkpoint.SerializeToString())
    with pytest.raises(UserError, match="x has more than 8 dimensions, or a negative one"):
        CkptFile(tmp_path / "a.ckpt", our_name)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.ckpt cannot be read"):
        CkptFile(tmp_path / "a.ckpt", our_name)


def test_a_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(ckpt({"x": torch.ones(100)}))
    file = CkptFile(path, our_name)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match="became shorter"):
        list(file.read(["x"]))


SOUND = ckpt({mindformers_name(f"model.layers.0.{name}.weight"): torch.ones(3, 2) for name in NAMES})


# A file of 1 kB takes far less than these milliseconds; a reader that goes on where nothing is would not.
@settings(max_examples=1200, deadline=500, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=4),
    inserted=st.tuples(st.integers(0, len(SOUND)), st.binary(max_size=12)),
    end=st.one_of(st.none(), st.integers(0, len(SOUND))),
)
def test_damaged_bytes(
    changes: list[tuple[int, int]], inserted: tuple[int, bytes], end: int | None, tmp_path: Path
) -> None:
    """Every damaged file is refused by name or read whole, and no tensor is larger than the file."""
    content = bytearray(SOUND)
    for at, byte in changes:
        content[at] = byte
    content[inserted[0] : inserted[0]] = inserted[1]
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(content[:end])
    refusal = ""
    try:
        file = CkptFile(path, our_name)
        for name, tensor in file.read(file.shapes):
            assert tuple(tensor.shape) == file.shapes[name]
            assert tensor.nbytes <= len(content)
    except UserError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert len(refusal) < 2000


def read(folder: Path, **config: Any) -> LlamaConfig:
    return read_config(read_mindformers_config(write_yaml(folder, **config)))


def test_yaml_in_the_terms_of_config_json(tmp_path: Path) -> None:
    config = read(tmp_path, theta=500000, max_position_embedding=256)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (
        96,
        64,
        88,
        2,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps) == (4, 2, 1e-6)
    assert (config.context_length, config.rotary.theta, config.rotary.type) == (256, 500000.0, "default")
    assert read(tmp_path).context_length == 128
    assert read(tmp_path, n_kv_heads=None).num_key_value_heads == 4


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"hidden_size": 4096, "num_heads": 32, "multiple_of": 256}, 11008),  # configs/llama2/predict_llama2_7b.yaml
        ({"hidden_size": 5120, "num_heads": 40, "multiple_of": 256}, 13824),  # 13b
        ({"hidden_size": 8192, "num_heads": 64, "multiple_of": 256, "ffn_dim_multiplier": 1.3}, 28672),  # 70b
    ],
)
def test_feed_forward_sizes_of_published_models(sizes: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert read(tmp_path, intermediate_size=None, n_kv_heads=None, **sizes).intermediate_size == expected


def test_extended_contexts(tmp_path: Path) -> None:
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    llama3 = read(tmp_path, extend_method="LLAMA3", scaling_factor=factors, max_position_embedding=131072)
    assert (llama3.rotary.type, llama3.rotary.factor, llama3.context_length) == ("llama3", 8.0, 131072)
    linear = read(tmp_path, extend_method="PI", scaling_factor=2.0)
    assert (linear.rotary.type, linear.rotary.factor, linear.context_length) == ("linear", 2.0, 128)
    assert read(tmp_path, extend_method="NTK", scaling_factor=2.0).rotary.theta == 20000.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "ChatGLM2Config"}, r"predict\.yaml: type='ChatGLM2Config' is not supported: only 'LlamaConfig'"),
        ({"num_layers": "2"}, r"predict\.yaml: num_layers='2' is not of type int"),
        ({"hidden_size": -1}, r"hidden_size=-1 is not a number above 0"),
        ({"rms_norm_eps": "1e-6"}, r"rms_norm_eps='1e-6' is not of type float"),
        ({"qkv_concat": True}, "qkv_concat=True is not supported"),
        ({"extend_method": "YARN"}, "extend_method='YARN' is not supported"),
        ({"quant": "w8a8"}, "quant='w8a8' is not supported"),
        ({"moe_config": {"expert_num": 8}}, "moe_config=.* is not supported"),
    ],
    ids=str,
)
def test_refused_settings(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, **config)


# Nine levels of ten: a billion values.
BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
BOMB += "model: {model_config: {hidden_size: *a9}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", r"predict\.yaml cannot be read: while parsing"),
        ("\x00", r"predict\.yaml cannot be read: "),
        ("!!python/object/apply:os.getcwd []", r"predict\.yaml cannot be read: could not determine a constructor"),
        ("[" * 1500, r"predict\.yaml cannot be read: "),
        (BOMB, r"predict\.yaml: model\.model_config holds more than 1000 values"),
        ("model: {model_config: &a {hidden_size: *a}}", "model_config holds more than 1000 values"),
        ("model: 3", "but neither config.json nor one YAML of MindFormers with model.model_config$"),
    ],
    ids=["broken", "binary", "code", "deep", "bomb", "cycle", "other"],
)
def test_unreadable_yaml(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "predict.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_mindformers_config(tmp_path)


def test_experts_beside_the_model_are_refused(tmp_path: Path) -> None:
    content = {"moe_config": {"expert_num": 8}, "model": {"model_config": MODEL_CONFIG}}
    (tmp_path / "predict.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match="moe_config=.* is not supported"):
        read_mindformers_config(tmp_path)


def test_two_yaml_files(tmp_path: Path) -> None:
    shutil.copy(write_yaml(tmp_path) / "predict.yaml", tmp_path / "train.yaml")
    with pytest.raises(UserError, match=r"nor one YAML .* \(found: predict\.yaml, train\.yaml\)"):
        read_mindformers_config(tmp_path)


def test_settings_that_nobody_read_are_reported(whole: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "llama.ckpt").write_bytes(ckpt(renamed(load_file(whole / "model.safetensors"))))
    parameters(write_yaml(folder, sliding_window=16, top_k=3))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["sliding_window, top_k"]


def test_two_checkpoints_of_one_model(whole: Path, folder: Path) -> None:
    for step in (1, 2):
        content = ckpt(renamed(load_file(whole / "model.safetensors")))
        (folder / f"llama-{step}.ckpt").write_bytes(content)
    with pytest.raises(UserError, match=r"found twice: .*model\.embed_tokens\.weight"):
        parameters(write_yaml(folder))


def test_folders_that_are_no_ranks(whole: Path, folder: Path) -> None:
    (folder / "rank_00").mkdir()
    (folder / "rank_00" / "llama.ckpt").write_bytes(SOUND)
    shutil.copy(whole / "config.json", folder)
    with pytest.raises(UserError, match="has no weights"):
        parameters(folder)


def test_a_rank_is_missing(folder: Path) -> None:
    for rank in (0, 2):
        (folder / f"rank_{rank}").mkdir()
        (folder / f"rank_{rank}" / "llama.ckpt").write_bytes(SOUND)
    with pytest.raises(UserError, match=r"rank_1/\*\.ckpt is missing \(found: 0, 2\)"):
        parameters(write_yaml(folder))


def test_two_checkpoints_of_a_rank(whole: Path, folder: Path) -> None:
    (folder / "rank_0").mkdir()
    for step in (1, 2):
        (folder / "rank_0" / f"llama-{step}.ckpt").write_bytes(SOUND)
    with pytest.raises(UserError, match=r"rank_0 has 2 checkpoints \(llama-1\.ckpt, llama-2\.ckpt\): keep the one"):
        parameters(write_yaml(folder))
    (folder / "llama.ckpt").write_bytes(SOUND)
    with pytest.raises(UserError, match=r"has both llama\.ckpt and rank_0/\*\.ckpt"):
        parameters(folder)


def test_tensors_of_other_models_are_unexpected(whole: Path, folder: Path) -> None:
    tensors = renamed(load_file(whole / "model.safetensors")) | {"transformer.embedding.weight": torch.ones(3)}
    (folder / "llama.ckpt").write_bytes(ckpt(tensors))
    with pytest.raises(UserError, match=r"unexpected: transformer\.embedding\.weight$"):
        parameters(write_yaml(folder))


def test_told_by_content(whole: Path, folder: Path) -> None:
    """Other programs call archives of theirs .ckpt, and safetensors go first."""
    (folder / "other.ckpt").write_bytes(b"PK\x03\x04")
    shutil.copy(whole / "config.json", folder)
    with pytest.raises(UserError, match=r"has no weights: expected model\.safetensors"):
        parameters(folder)
    (whole / "llama.ckpt").write_bytes(SOUND)
    assert parameters(whole).keys() == load_file(whole / "model.safetensors").keys()
    assert open_checkpoint(whole, False).config.raw("model_type") == "llama"
