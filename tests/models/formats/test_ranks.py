"""Checkpoints sharded for tensor-parallel and pipeline ranks compared with the whole weights, which transformers
wrote."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM

from conf.errors import UserError
from tests.helpers.builders import SMALL, write_llama
from tests.helpers.cases import each
from tests.helpers.rank_files import Ranks, assert_one_tensor_at_a_time, assert_same_model, cut, parameters, slice_of

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
QUERY, OUTPUT = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo")


def write_ranks(folder: Path, ranks: Ranks, whole_folder: Path) -> Path:
    for i, tensors in enumerate(ranks):
        (folder / f"rank_{i}").mkdir(parents=True)
        save_file(tensors, folder / f"rank_{i}" / "model.safetensors")
    shutil.copy(whole_folder / "config.json", folder)
    return folder


@pytest.fixture
def whole_folder(tmp_path: Path) -> Path:
    write_llama(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.mark.long
@each("num_stages", [1, 2])
@each("num_ranks", [1, 2])
@each("tied", [False, True])
def test_rank_folders(num_ranks: int, num_stages: int, tied: bool, tmp_path: Path) -> None:
    write_llama(tmp_path / "whole", tie_word_embeddings=tied)
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    folder = write_ranks(tmp_path / "ranks", cut(tensors, num_ranks, num_stages), tmp_path / "whole")
    assert_same_model(folder, tmp_path / "whole")


def test_key_value_heads_that_ranks_share(whole_folder: Path, tmp_path: Path) -> None:
    """Four ranks and two key/value heads: ranks 0 and 1 hold the first."""
    tensors = load_file(whole_folder / "model.safetensors")
    ranks = cut(tensors, 4)
    for name in (name for name in tensors if "k_proj" in name or "v_proj" in name):
        for rank in range(4):
            ranks[rank][name] = tensors[name].chunk(2)[rank // 2].clone()
    assert_same_model(write_ranks(tmp_path / "ranks", ranks, whole_folder), whole_folder)


def test_data_parallel_copies(whole_folder: Path, tmp_path: Path) -> None:
    ranks = cut(load_file(whole_folder / "model.safetensors"), 2)
    assert_same_model(write_ranks(tmp_path / "ranks", ranks + ranks, whole_folder), whole_folder)


def test_an_embedding_cut_along_its_channels(whole_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(whole_folder / "model.safetensors")
    ranks = cut(tensors, 2)
    for rank in range(2):
        ranks[rank]["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].chunk(2, 1)[rank].clone()
    assert_same_model(write_ranks(tmp_path / "ranks", ranks, whole_folder), whole_folder)


def sharded_state_rank(tensors: dict[str, Tensor], rank: int, num_ranks: int) -> dict[str, Tensor]:
    """Return the state of vLLM's modules of a Llama with two key/value heads. Of tensors that share memory, only the
    first name is kept."""

    def piece(name: str) -> Tensor:
        num_pieces = min(num_ranks, 2) if "k_proj" in name or "v_proj" in name else num_ranks
        return slice_of(name, tensors[name], rank * num_pieces // num_ranks, num_pieces)

    held = {name: piece(name) for name in tensors if not any(f".{part}." in name for part in sum(FUSED.values(), ()))}
    for layer in range(2):
        for module, parts in FUSED.items():
            prefix = f"model.layers.{layer}.{'self_attn' if module == 'qkv_proj' else 'mlp'}"
            held[f"{prefix}.{module}.weight"] = torch.cat([piece(f"{prefix}.{part}.weight") for part in parts])
    if "lm_head.weight" not in held:
        held["lm_head.weight"] = held.pop("model.embed_tokens.weight")
    return held


def write_sharded_state(folder: Path, whole_folder: Path, num_ranks: int) -> Path:
    folder.mkdir()
    tensors = load_file(whole_folder / "model.safetensors")
    for rank in range(num_ranks):
        held = sharded_state_rank(tensors, rank, num_ranks)
        for part in range(2):
            content = {name: held[name] for name in sorted(held)[part::2]}
            save_file(content, folder / f"model-rank-{rank}-part-{part}.safetensors")
    shutil.copy(whole_folder / "config.json", folder)
    return folder


@pytest.mark.long
def test_peak_memory(tmp_path: Path) -> None:
    assert_one_tensor_at_a_time(tmp_path, lambda file, held: save_file(held, file.with_suffix(".safetensors")))


@each("num_ranks", [1, 2, 4])
@each("tied", [False, True])
def test_sharded_state_of_vllm(num_ranks: int, tied: bool, tmp_path: Path) -> None:
    write_llama(tmp_path / "whole", tie_word_embeddings=tied)
    folder = write_sharded_state(tmp_path / "ranks", tmp_path / "whole", num_ranks)
    assert_same_model(folder, tmp_path / "whole")


def test_biases_of_fused_matrices(tmp_path: Path) -> None:
    """attention_bias: the biases of queries, keys and values are sharded, o_proj's bias is not."""
    write_llama(tmp_path / "whole", attention_bias=True)
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    ranks = cut(tensors, 2)
    for tensors_of_rank in ranks:
        for layer in range(2):
            prefix = f"model.layers.{layer}.self_attn"
            parts = [f"{prefix}.{part}.bias" for part in FUSED["qkv_proj"]]
            tensors_of_rank[f"{prefix}.qkv_proj.bias"] = torch.cat([tensors_of_rank.pop(part) for part in parts])
            tensors_of_rank[f"{prefix}.o_proj.bias"] = tensors[f"{prefix}.o_proj.bias"].clone()
    assert_same_model(write_ranks(tmp_path / "ranks", ranks, tmp_path / "whole"), tmp_path / "whole")


def halve_query_rows(ranks: Ranks) -> None:
    ranks[1][QUERY] = ranks[1][QUERY][:16].clone()


def cut_norm(ranks: Ranks) -> None:
    for tensors in ranks:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()


def cut_output_rows(ranks: Ranks) -> None:
    """Cut the output rows, as an optimizer's parallelism does."""
    for tensors in ranks:
        tensors[OUTPUT] = torch.ones(32, 64)


def cut_both(ranks: Ranks) -> None:
    for tensors in ranks:
        tensors[QUERY] = torch.ones(32, 32)


def too_few(ranks: Ranks) -> None:
    for tensors in ranks:
        tensors[QUERY] = torch.ones(16, 64)


def other_dtype(ranks: Ranks) -> None:
    ranks[1][QUERY] = ranks[1][QUERY].bfloat16()


def optimizer_slices(ranks: Ranks) -> None:
    """Two pieces of 32 rows would fill the matrix, but there are four different pieces."""
    ranks += [dict(tensors) for tensors in ranks]
    ranks[3][QUERY] = torch.ones(32, 64)


def missing(ranks: Ranks) -> None:
    for tensors in ranks:
        del tensors[QUERY]


def unexpected(ranks: Ranks) -> None:
    ranks[0]["model.layers.7.odd"] = torch.ones(3)


def odd_fused(ranks: Ranks) -> None:
    ranks[0]["model.layers.0.self_attn.qkv_proj.weight"] = torch.ones(31, 64)


def fused_twice(ranks: Ranks) -> None:
    ranks[0]["model.layers.0.mlp.gate_up_proj.weight"] = torch.ones(88, 64)


@each(
    "damage, message",
    [
        (
            halve_query_rows,
            r"rank_1/model\.safetensors: .*q_proj\.weight is \[16, 64\], one of 2 slices, expected \[64, 64\]",
        ),
        (cut_norm, r"rank_0/model\.safetensors: model\.norm\.weight is \[32\], one of 2 slices, expected \[64\]"),
        (cut_output_rows, r"o_proj\.weight is \[32, 64\], one of 2 slices, expected \[64, 64\]"),
        (cut_both, r"q_proj\.weight is \[32, 32\], one of 2 slices, expected \[64, 64\]"),
        (too_few, r"q_proj\.weight is \[16, 64\], one of 2 slices, expected \[64, 64\]"),
        (other_dtype, r"slices of model\.layers\.0\.self_attn\.q_proj\.weight are torch\.float32 and torch\.bfloat16"),
        (optimizer_slices, r"q_proj\.weight has 4 slices, 2 are expected.*optimizer parallelism are not supported"),
        (
            missing,
            r"ranks does not hold the model that its config describes: missing: model\.layers\.0\.self_attn\.q_proj",
        ),
        (unexpected, r"unexpected: model\.layers\.7\.odd"),
        (odd_fused, r"qkv_proj\.weight is \[31, 64\], which cannot be divided into .*q_proj\.weight, .* of 2 ranks"),
        (fused_twice, r"rank_0/model\.safetensors has .*mlp\.gate_proj\.weight twice"),
    ],
)
def test_ranks_that_do_not_fit(
    damage: Callable[[Ranks], None], message: str, whole_folder: Path, tmp_path: Path
) -> None:
    ranks = cut(load_file(whole_folder / "model.safetensors"), 2)
    damage(ranks)
    with pytest.raises(UserError, match=message):
        parameters(write_ranks(tmp_path / "ranks", ranks, whole_folder))


@each("lost", [0, 1])
def test_a_missing_rank(lost: int, whole_folder: Path, tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "ranks", cut(load_file(whole_folder / "model.safetensors"), 4), whole_folder)
    shutil.rmtree(folder / f"rank_{lost}")
    with pytest.raises(UserError, match=rf"rank_{lost}/\*\.safetensors is missing \(found: [01], 2, 3\)"):
        parameters(folder)


def test_the_last_rank_is_missing(whole_folder: Path, tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "ranks", cut(load_file(whole_folder / "model.safetensors"), 4), whole_folder)
    shutil.rmtree(folder / "rank_3")
    with pytest.raises(UserError, match=r"one of 3 slices, expected .* and \d+ more$"):
        parameters(folder)


def test_a_missing_part(whole_folder: Path, tmp_path: Path) -> None:
    folder = write_sharded_state(tmp_path / "ranks", whole_folder, 2)
    (folder / "model-rank-1-part-0.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-rank-1-part-0\.safetensors is missing \(found: 1\)"):
        parameters(folder)


def test_the_same_tensor_in_two_parts(whole_folder: Path, tmp_path: Path) -> None:
    folder = write_sharded_state(tmp_path / "ranks", whole_folder, 2)
    shutil.copy(folder / "model-rank-0-part-0.safetensors", folder / "model-rank-0-part-2.safetensors")
    with pytest.raises(
        UserError, match=r"part-2\.safetensors and model-rank-0-part-0.* of the same rank both hold lm_head"
    ):
        parameters(folder)


def test_fused_matrices_of_the_model_itself_are_not_joined(tmp_path: Path) -> None:
    """Phi-3 has qkv_proj. Its pieces may be sliced part by part or straight through, and the files do not tell
    which."""
    config = Phi3Config(**{**SMALL, "pad_token_id": 0})
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    folder = write_ranks(tmp_path / "ranks", cut(tensors, 2), tmp_path / "whole")
    with pytest.raises(UserError, match=r"qkv_proj\.weight is \[64, 64\], one of 2 slices, expected \[128, 64\]"):
        parameters(folder)


def test_whole_weights_go_first(whole_folder: Path) -> None:
    (whole_folder / "rank_0").mkdir()
    (whole_folder / "rank_0" / "model.safetensors").write_bytes(b"damaged")
    assert parameters(whole_folder).keys() == load_file(whole_folder / "model.safetensors").keys()
