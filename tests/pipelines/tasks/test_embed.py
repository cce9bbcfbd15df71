"""`task=embed`: transformers' vectors by the model cards' recipes, the files of a job, and refused requests."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch.nn.functional import normalize
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaModel

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.pooling import EmbedConfig, PoolingMode
from conf.quantization import Activations, QuantConfig, QuantMethod, QuantScheme
from conf.schema import RunConfig, Task
from conf.tasks import CheckpointFormat, PredictConfig
from models.formats.manifest import verify_manifest
from pipelines.loading.load_engine import load_engine
from pipelines.tasks.embed import run_embed
from tests.helpers.adapters import ALL_LINEAR, write_adapter
from tests.helpers.builders import all_logits, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.conversion import SHARDED, convert
from tests.helpers.embedding_models import QUERY, write_e5_mistral, write_modules, write_qwen3_embedding
from tests.helpers.gguf_files import write_twin
from tests.helpers.quantized_models import make, quantize_run
from tests.helpers.small_tokenizers import byte_level, save
from tests.helpers.soft_prefixes import engine_with, write_paddle

TEXTS = [
    "Once upon a time",
    "a",
    "",
    "She said: hello, world! It was a good day for the dog. ",
    "don't stop 12345",
    "The end</s>",
]
TOLERANCE = 1e-5  # float32 sums in another order; a normalised vector's numbers are at most 1


def embed_run(folder: Path, data: Path, embed: dict[str, Any] | None = None, **decode: Any) -> RunConfig:
    run = run_config(folder)
    return replace(
        run,
        task=Task.embed,
        model=replace(run.model, tokenizer=""),
        predict=PredictConfig(data=str(data), batch_size=3),
        embed=EmbedConfig(**(embed or {})),
        decode=DecodeConfig(**decode),
    )


def results(folder: Path) -> tuple[NDArray[np.float32], list[dict[str, Any]]]:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return np.load(folder / "embeddings.npy"), rows


def embedded(folder: Path, tmp_path: Path, rows: list[Any], **embed: Any) -> NDArray[np.float32]:
    tmp_path.mkdir(exist_ok=True)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row if isinstance(row, dict) else {"prompt": row}) + "\n" for row in rows))
    run_embed(embed_run(folder, data, embed), tmp_path / "out", dump)
    vectors, read = results(tmp_path / "out")
    assert [row["error"] for row in read] == [None] * len(rows)
    return vectors


@torch.inference_mode()
def hidden_states(reference: Any, ids: list[int]) -> torch.Tensor:
    output: torch.Tensor = reference(torch.tensor([ids])).last_hidden_state[0]
    return output


@each("instruction", [None, "query", "passage: "])
def test_qwen3_embedding(tmp_path: Path, instruction: str | None) -> None:
    reference = write_qwen3_embedding(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    before = {None: "", "query": QUERY}.get(instruction, instruction)
    vectors = embedded(tmp_path, tmp_path, TEXTS, instruction=instruction)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(TEXTS), 64)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = tokenizer(f"{before}{text}").input_ids
        assert ids[-1] == tokenizer.eos_token_id
        expected = normalize(hidden_states(reference, ids)[-1], dim=0)
        np.testing.assert_allclose(vector, expected, atol=TOLERANCE, rtol=0)


@each("eos_in_tokenizer_json", [True, False])
def test_e5_mistral(tmp_path: Path, eos_in_tokenizer_json: bool) -> None:
    reference = write_e5_mistral(tmp_path, eos_in_tokenizer_json=eos_in_tokenizer_json)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text, vector in zip(TEXTS, embedded(tmp_path, tmp_path, TEXTS, instruction="Query: "), strict=True):
        ids = [0, *tokenizer(f"Query: {text}", add_special_tokens=False).input_ids, 1]  # <s> and </s>
        expected = normalize(hidden_states(reference, ids)[-1], dim=0)
        np.testing.assert_allclose(vector, expected, atol=TOLERANCE, rtol=0)


@each("model", ["qwen3", "e5", "e5 whose eos is a setting"])
def test_texts_are_cut_to_max_seq_length(tmp_path: Path, model: str) -> None:
    """As transformers truncates for sentence-transformers: special tokens stay. Rows and metrics report it."""
    write = (
        write_qwen3_embedding if model == "qwen3" else partial(write_e5_mistral, eos_in_tokenizer_json=model == "e5")
    )
    reference, most, texts = write(tmp_path), 9, [*TEXTS, "a " * 500]
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most, "do_lower_case": False}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    end = [1] if model.endswith("setting") else []  # transformers leaves it out
    full_ids = [[*tokenizer(f"Query: {text}").input_ids, *end] for text in texts]
    cut = [
        [*tokenizer(f"Query: {text}", truncation=True, max_length=most - len(end)).input_ids, *end] for text in texts
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    run_embed(embed_run(tmp_path, data, {"instruction": "Query: "}), tmp_path / "out", dump)
    vectors, rows = results(tmp_path / "out")
    for ids, vector in zip(cut, vectors, strict=True):
        expected = normalize(hidden_states(reference, ids)[-1], dim=0)
        np.testing.assert_allclose(vector, expected, atol=TOLERANCE, rtol=0)
    assert [row["num_prompt_tokens"] for row in rows] == [*map(len, cut)]
    lost = [row.get("num_truncated_tokens", 0) for row in rows]
    assert lost == [len(ids) - len(kept) for ids, kept in zip(full_ids, cut, strict=True)]
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["num_truncated_rows"] == sum(map(bool, lost)) > 0


def test_no_eos_follows_where_no_special_token_is_wanted(tmp_path: Path) -> None:
    reference = write_e5_mistral(tmp_path, eos_in_tokenizer_json=False)
    run = embed_run(tmp_path, tmp_path / "rows.txt", {"normalize": False})
    (tmp_path / "rows.txt").write_text("Once upon\n")
    run_embed(replace(run, predict=replace(run.predict, add_special_tokens=False)), tmp_path / "out", dump)
    ids = byte_level().encode("Once upon", add_special_tokens=False).ids
    (vector,), (row,) = results(tmp_path / "out")
    assert row["num_prompt_tokens"] == len(ids)
    np.testing.assert_allclose(vector, hidden_states(reference, ids)[-1], atol=TOLERANCE, rtol=TOLERANCE)


def write_pooled_llama(folder: Path, pooling: str | None, **config: Any) -> Any:
    tokenizer = byte_level()
    reference = write_llama(folder, vocab_size=tokenizer.get_vocab_size(), **config)
    save(tokenizer, folder)
    if pooling:
        write_modules(folder, pooling)
    return reference.model


POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda hidden: hidden.double().mean(0),
    "last": lambda hidden: hidden[-1],
    "cls": lambda hidden: hidden[0],
}


@pytest.mark.long
@each(
    ("stored", "asked", "pooled"),
    [("mean", "auto", "mean"), ("cls", "auto", "cls"), (None, "auto", "last"), ("cls", "mean", "mean"), ("mean", "last", "last")],
)  # fmt: skip
@each("normalized", [None, True])
def test_poolings_of_a_llama(
    tmp_path: Path, stored: str | None, asked: str, pooled: str, normalized: bool | None
) -> None:
    reference = write_pooled_llama(tmp_path, stored)
    rows = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [9], list(range(3, 103)))]
    vectors = embedded(tmp_path, tmp_path, rows, pooling=PoolingMode[asked], normalize=normalized)
    for row, vector in zip(rows, vectors, strict=True):
        expected = POOLED[pooled](hidden_states(reference, row["prompt_token_ids"]))
        expected = normalize(expected, dim=0) if normalized else expected
        np.testing.assert_allclose(vector, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_conversation_ends_as_it_ends(tmp_path: Path) -> None:
    reference = write_pooled_llama(tmp_path, None)
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (vector,) = embedded(tmp_path, tmp_path, [{"messages": messages}])
    ids = byte_level().encode("[user] hi[assistant] hello", add_special_tokens=False).ids
    np.testing.assert_allclose(vector, hidden_states(reference, ids)[-1], atol=TOLERANCE, rtol=TOLERANCE)


@each(
    "quant",
    [
        QuantConfig(scheme=QuantScheme.int8),
        QuantConfig(scheme=QuantScheme.a8w8, activations=Activations.dynamic),
        QuantConfig(scheme=QuantScheme.int4, group_size=32, overrides={"lm_head": "int8"}),
    ],
)
def test_a_quantised_model_gives_the_hidden_states_that_it_predicts_from(tmp_path: Path, quant: QuantConfig) -> None:
    write_pooled_llama(tmp_path, None, intermediate_size=96)
    prompts = [[5, 6, 7], [9], list(range(3, 103))]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts))
    run = replace(embed_run(tmp_path, data), quant=quant)
    run_embed(run, tmp_path / "out", dump)
    engine = load_engine(run, 3)
    for ids, vector in zip(prompts, results(tmp_path / "out")[0], strict=True):
        # Without the C++ kernels torch's sums may have another order.
        np.testing.assert_allclose(vector, engine.hidden_states([ids], [1])[0], atol=1e-6, rtol=1e-6)


@pytest.mark.long
def test_a_quantised_checkpoint_whose_head_is_coded(tmp_path: Path) -> None:
    """Its file stores the head in several tensors, none of which is loaded."""
    write_pooled_llama(tmp_path / "float", None, intermediate_size=96)
    quant = QuantConfig(scheme=QuantScheme.int4, group_size=32, overrides={"lm_head": "int8"})
    make(quantize_run(tmp_path / "float", quant, tmp_path / "coded", None, tokenizer=""), tmp_path / "report")
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    for name in ("float", "coded"):
        run = embed_run(tmp_path / name, data)
        run_embed(replace(run, quant=quant if name == "float" else QuantConfig()), tmp_path / f"{name} out", dump)
    (float_vectors, _), (stored, _) = results(tmp_path / "float out"), results(tmp_path / "coded out")
    np.testing.assert_allclose(stored, float_vectors, atol=1e-6, rtol=1e-6)


@pytest.mark.long
def test_converted_and_quantised_models_pool_as_their_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "source"
    write_pooled_llama(source, "mean")
    write_modules(source, "mean", "Normalize")
    (source / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "q: "}}))
    (tmp_path / ".sharded.partial" / "1_Pooling").mkdir(parents=True)  # of a run that was killed
    folders = [convert(source, tmp_path / "hf"), convert(source, tmp_path / "sharded", format=SHARDED, tp=2)]
    make(
        quantize_run(source, QuantConfig(scheme=QuantScheme.int8), tmp_path / "int8", None, tokenizer=""),
        tmp_path / "report",
    )
    wanted = embedded(source, tmp_path / "first", TEXTS, instruction="query")
    for folder in (*folders, tmp_path / "int8"):
        verify_manifest(folder)
        vectors = embedded(folder, tmp_path / folder.name / "work", TEXTS, instruction="query")
        if folder in folders:
            np.testing.assert_array_equal(vectors, wanted)
        np.testing.assert_allclose(vectors, wanted, atol=0.05)  # of length 1, in 8 bits
    assert "GGUF" not in caplog.text
    convert(source, tmp_path / "gguf", format=CheckpointFormat.gguf)
    assert "GGUF has no place for modules.json: give embed.pooling and embed.normalize" in caplog.text


def test_a_gguf_file(tmp_path: Path) -> None:
    reference = write_llama(tmp_path / "hf")
    file = write_twin(tmp_path / "hf", tmp_path / "model.gguf")
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    run = embed_run(tmp_path / "hf", data)
    run_embed(replace(run, model=replace(run.model, path=str(file), tokenizer=None)), tmp_path / "out", dump)
    expected = hidden_states(reference.model, [5, 6, 7])[-1]
    np.testing.assert_allclose(results(tmp_path / "out")[0][0], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_prefix_stands_before_the_prompt(tmp_path: Path) -> None:
    reference = write_llama(tmp_path / "model")
    write_paddle(tmp_path / "pre_caches.npy", 7)
    prompt = [5, 6, 7, 8]
    data = tmp_path / "rows.jsonl"
    rows = [
        {"prompt_token_ids": prompt},
        {"prompt_token_ids": prompt, "prefix": "p"},
        {"prompt_token_ids": prompt, "prefix": "q"},
        {"prompt_token_ids": prompt, "prefix": ""},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = embed_run(tmp_path / "model", data)
    prefixes = {"p": str(tmp_path / "pre_caches.npy")}
    run_embed(replace(run, model=replace(run.model, tokenizer=None, prefixes=prefixes)), tmp_path / "out", dump)
    vectors, read = results(tmp_path / "out")
    engine = engine_with(tmp_path / "model", {"p": tmp_path / "pre_caches.npy"})
    for vector, prefix in zip(vectors[:2], (None, "p"), strict=True):
        logits = torch.from_numpy(vector) @ reference.lm_head.weight.detach().T
        expected = all_logits(engine, prompt, prefix)[-1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)  # of order 10, summed in another order
    assert not np.allclose(*vectors[:2])
    for row, name in zip(read[2:], ("q", ""), strict=True):
        assert f"prefix '{name}' does not exist: there are p" in row["error"]


def test_rows_have_adapters_of_their_own(tmp_path: Path) -> None:
    """PEFT's unmerged hidden states; the run's adapter applies to rows that name none."""
    base, folders = tmp_path / "model", {"low": tmp_path / "low", "high": tmp_path / "high"}
    write_llama(base)
    write_adapter(folders["low"], base, LlamaForCausalLM, r=4, target_modules=ALL_LINEAR)
    only = {"target_modules": ["v_proj"], "task_type": "FEATURE_EXTRACTION"}  # names without their first part
    write_adapter(folders["high"], base, LlamaModel, seed=2, r=9, **only)
    prompt = [5, 6, 7, 8, 30, 31, 2, 2, 9]
    row: dict[str, Any] = {"prompt_token_ids": prompt}
    data = tmp_path / "rows.jsonl"
    rows = [row, row | {"adapter": "low"}, row | {"adapter": "high"}, row | {"adapter": "lo"}, row | {"adapter": None}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = embed_run(tmp_path / "model", data)
    model = replace(run.model, tokenizer=None, adapters={name: str(folder) for name, folder in folders.items()})
    run_embed(replace(run, model=model), tmp_path / "out", dump)
    vectors, read = results(tmp_path / "out")
    kinds = (None, LlamaModel), ("low", LlamaForCausalLM), ("high", LlamaModel)
    for (name, kind), vector in zip(kinds, vectors, strict=False):
        reference = kind.from_pretrained(base)
        reference = reference if name is None else PeftModel.from_pretrained(reference, folders[name])
        with torch.inference_mode():
            expected = reference.eval()(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
        np.testing.assert_allclose(vector, expected, atol=1e-4, rtol=0)  # adapted sums are of order 10
    assert np.abs(vectors[1] - vectors[0]).max() > 0.1 < np.abs(vectors[2] - vectors[0]).max()
    assert "adapter 'lo' does not exist: there are low, high" in read[3]["error"]
    np.testing.assert_array_equal(vectors[4], vectors[0])
    chosen = replace(run, model=model, predict=replace(run.predict, adapter="low"))
    run_embed(chosen, tmp_path / "chosen", dump)
    low, _ = results(tmp_path / "chosen")
    np.testing.assert_array_equal(low[[0, 1, 2, 4]], vectors[[1, 1, 2, 1]])


def test_a_bad_row_is_an_error_and_its_vector_is_nan(tmp_path: Path) -> None:
    write_pooled_llama(tmp_path, None)
    rows = [
        {"prompt": "one", "id": "a"}, {"promt": "two"}, {"prompt": "x " * 200}, {"messages": [{"role": "user"}]},
        {"prompt_token_ids": []}, {"query": "a", "document": "b"}, {"prompt": "six", "decode": {"temperature": 1}},
        {"prompt": "seven", "decode": {"prefix_cache": False}},
    ]  # fmt: skip
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_embed(embed_run(tmp_path, data), tmp_path / "out", dump)
    vectors, read = results(tmp_path / "out")
    errors = [row["error"] for row in read]
    assert [error is None for error in errors] == [True] + [False] * 6 + [True]
    assert np.isnan(vectors).all(-1).tolist() == [False] + [True] * 6 + [False]
    assert np.isfinite(vectors[[0, 7]]).all()
    assert read[0]["id"] == "a"
    assert "the row has none of prompt, messages" in errors[1]
    assert "more than the model takes (max_position_embeddings=128): shorten it to at most 128" in errors[2]
    assert "the prompt has no tokens" in errors[4]
    assert "query and document are scored by task=score: give a prompt" in errors[5]
    assert "decode.temperature=1 is not used where nothing is generated" in errors[6]
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["num_prompts"], metrics["num_errors"], metrics["num_values"]) == (8, 6, 64)
    assert metrics["unused_fields"] == ["promt"]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "embeddings.npy", "rows.jsonl", "metrics.json", "config.yaml", "environment.json",
    }  # fmt: skip


def test_an_instruction_stands_before_prompts_alone(tmp_path: Path) -> None:
    write_qwen3_embedding(tmp_path)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt_token_ids": [5, 6]}\n')
    with pytest.raises(
        UserError, match="none of the 1 rows has a vector; the first: embed.instruction stands before a"
    ):
        run_embed(embed_run(tmp_path, data, {"instruction": "query"}), tmp_path / "out", dump)


@each(
    ("files", "embed", "message"),
    [
        ({}, {"instruction": "qury"}, "embed.instruction=qury is the name of no prompt: the checkpoint has none; a text has"),
        ({"config_sentence_transformers.json": {"prompts": {"query": "q: "}}}, {"instruction": "qury"}, "there are query"),
        ({"config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": "q"}}, {}, "default_prompt_name='q' is not a name"),
        ({"config_sentence_transformers.json": {"prompts": [1]}}, {}, "prompts are not texts by name"),
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, {}, "pooling_mode_max_tokens is not supported: only"),
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}}, {}, "is not supported"),
        ({"1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}}, {}, "include_prompt=false"),
        ({"1_Pooling/config.json": {}}, {}, "the pooling none is not supported"),
        ({"modules.json": {}}, {}, "is not a list of objects"),
        ({"sentence_bert_config.json": {"max_seq_length": 0}}, {}, "max_seq_length=0 is not a number of tokens above 0"),
        ({"modules.json": [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "../x"}]}, {}, "is not a folder next to it"),
        ({"modules.json": [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "1_Pool"}]}, {}, "'1_Pool' is not a folder next to it"),
        ({"modules.json": [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": ".."}]}, {}, "path='..' is not a folder next to it"),
        ({"modules.json": [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "x" * 999}]}, {}, "x\\.\\.\\. is not a folder"),
        ({"modules.json": [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "config.json"}]}, {}, "is missing, but modules.json"),
        ({"config_sentence_transformers.json": {"default_prompt_name": []}}, {}, "default_prompt_name=\\[\\] is not a name in prompts"),
        ({"1_Pooling/config.json": {"pooling_mode": ["mean", "max"]}}, {}, "the pooling \\['mean', 'max'\\] is not supported"),
        ({"1_Pooling/config.json": {"pooling_mode": "mean", "pooling_mode_cls_token": True}}, {}, "is not supported: only one"),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, {}, "do_lower_case=true is not supported"),
        ({"modules.json": [{"type": "a.Transformer"}, {"type": "a.Pooling"}, {"type": "a.Dense"}]}, {}, "Pooling, Dense: only"),
    ],
)  # fmt: skip
def test_files_that_are_not_supported_are_refused_by_name(
    tmp_path: Path, files: dict[str, Any], embed: dict[str, Any], message: str
) -> None:
    write_pooled_llama(tmp_path, "mean")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    data = tmp_path / "rows.txt"
    data.write_text("one\n")
    with pytest.raises(UserError, match=message):
        run_embed(embed_run(tmp_path, data, embed), tmp_path / "out", dump)
    assert not (tmp_path / "out").exists()


def test_settings_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    write_pooled_llama(tmp_path, None)
    data = tmp_path / "rows.txt"
    data.write_text("one\n")
    with pytest.raises(UserError, match="decode.max_new_tokens=5 is not used where nothing is generated: leave it out"):
        run_embed(embed_run(tmp_path, data, max_new_tokens=5), tmp_path / "out", dump)
    run = replace(embed_run(tmp_path, data), quant=QuantConfig(scheme=QuantScheme.int4, method=QuantMethod.gptq))
    with pytest.raises(
        UserError, match="quant=int4 needs calibration, and calibration needs a head .*: give a scheme without"
    ):
        run_embed(run, tmp_path / "out", dump)
