"""vLLM's offline API gives the results of our other APIs, and a vLLM script runs with its import line changed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.compose import compose_run_config
from conf.errors import UserError
from conf.quantization import QuantConfig, QuantizedFormat, QuantScheme
from conf.schema import ParallelMode, RunConfig
from conf.speculation import Speculate
from pipelines import LLM, SamplingParams, pipeline
from pipelines.python.sampling_params import OF_ITSELF
from pipelines.python.vllm_arguments import OWN, run_settings
from tests.helpers.builders import REPOSITORY
from tests.helpers.cases import each
from tests.helpers.quantized_models import make, quantize_run, random_rows, write_rows
from tests.helpers.vllm_names import ARGUMENTS, EARLIER_ARGUMENTS, EARLIER_FIELDS, FIELDS
from tests.helpers.vllm_tokens import PYTHON as VLLM

TINY = REPOSITORY / "models" / "tiny"
PROMPTS = ["Once upon a time", "我喜欢北京，", "One sunny day, Lily went to the"]
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=128, enforce_eager=True, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=1, stop=["."])
    tokens = {"prompt_token_ids": [0, 43, 874]}
    said = llm.generate([*json.loads(sys.argv[2]), tokens], params)
    said += llm.chat([{"role": "user", "content": "What is 3 + 4?"}], SamplingParams(temperature=0, max_tokens=8))
    for output in said:
        (completion,) = output.outputs
        of_prompt = [step and {id: each.rank for id, each in step.items()} for step in output.prompt_logprobs or []]
        steps = [{id: [each.rank, each.decoded_token] for id, each in step.items()} for step in completion.logprobs or []]
        print(json.dumps({
            "id": output.request_id.partition("-")[0], "prompt": output.prompt, "prompt_token_ids": output.prompt_token_ids,
            "text": completion.text, "token_ids": list(completion.token_ids), "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason, "finished": output.finished, "index": completion.index,
            "cumulative": completion.cumulative_logprob, "steps": steps, "of_prompt": of_prompt,
        }))
"""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", max_model_len=128, overrides=["device=cpu"])


def said_by(python: str | Path, script: Path) -> list[dict[str, Any]]:
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(script.parent), "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    if python == VLLM:
        del environment["PYTHONPATH"]
    else:  # kernels are compiled already
        environment |= {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME") if name in os.environ}
    command = [python, script, TINY, json.dumps(PROMPTS)]
    done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"id"')]


@pytest.mark.long
@pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed")
def test_a_script_of_vllm_runs_with_its_import_changed(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.py", tmp_path / "ours.py"
    theirs.write_text(SCRIPT)
    ours.write_text(SCRIPT.replace("from vllm import", "from pipelines import"))
    expected, actual = said_by(VLLM, theirs), said_by(sys.executable, ours)
    assert len(actual) == len(PROMPTS) + 2
    for mine, other in zip(actual, expected, strict=True):
        # sums of at most 12 float32 logarithms
        assert mine.pop("cumulative") == pytest.approx(other.pop("cumulative"), abs=1e-3)
        assert mine == other


def test_texts_match_the_pipeline(llm: LLM) -> None:
    pipe = pipeline("text_generation", model="tiny", dtype="float32", device="cpu")
    expected = [result["text_generation_text"][0] for result in pipe(PROMPTS, max_new_tokens=12)]
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert [f"{output.prompt}{output.outputs[0].text}" for output in outputs] == expected


def test_prompts_of_token_ids(llm: LLM) -> None:
    settings = SamplingParams(temperature=0, max_tokens=12)
    texts = llm.generate(PROMPTS, settings)
    of_ids = llm.generate([{"prompt_token_ids": output.prompt_token_ids} for output in texts], settings)
    assert [output.prompt_token_ids for output in of_ids] == [output.prompt_token_ids for output in texts]
    assert [output.outputs[0].token_ids for output in of_ids] == [output.outputs[0].token_ids for output in texts]
    assert [output.prompt for output in of_ids] == [None] * len(PROMPTS)


@pytest.mark.long
def test_a_script_of_vllm_runs(llm: LLM, tmp_path: Path) -> None:
    """Run in a separate folder; test_a_script_of_vllm_runs_with_its_import_changed has vLLM installed."""
    script = tmp_path / "ours.py"
    script.write_text(SCRIPT.replace("from vllm import", "from pipelines import"))
    said = said_by(sys.executable, script)
    settings = SamplingParams(temperature=0, max_tokens=12, stop=["."])
    expected = llm.generate([*PROMPTS, {"prompt_token_ids": [0, 43, 874]}], settings)
    expected += llm.chat([{"role": "user", "content": "What is 3 + 4?"}], SamplingParams(temperature=0, max_tokens=8))
    assert [line["text"] for line in said] == [line.outputs[0].text for line in expected]
    assert [line["prompt_token_ids"] for line in said] == [line.prompt_token_ids for line in expected]


def test_each_prompt_may_have_its_own_settings(llm: LLM) -> None:
    outputs = llm.generate(
        PROMPTS[:2], [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5, n=2, ignore_eos=True)]
    )
    assert [[len(completion.token_ids) for completion in output.outputs] for output in outputs] == [[3], [5, 5]]
    assert [completion.index for completion in outputs[1].outputs] == [0, 1]


@pytest.mark.long
def test_a_script_is_reproducible_and_its_calls_differ() -> None:
    def script() -> list[list[int]]:
        llm = LLM("tiny", seed=3, overrides=["device=cpu"])
        return [llm.generate(PROMPTS[0])[0].outputs[0].token_ids for _ in range(2)]

    first, second = script()
    assert first != second
    assert script() == [first, second]


def test_log_probabilities_add_up(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2))
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    chosen = [step[id] for step, id in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(token.logprob for token in chosen))
    assert "".join(token.decoded_token or "" for token in chosen) == completion.text
    assert [token.rank for token in chosen] == [1] * 6
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_structured_outputs_hold(llm: LLM) -> None:
    settings = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, max_tokens=8)
    assert llm.generate("Is it?", settings)[0].outputs[0].text in ("yes", "no")


def test_chat_answers_each_conversation(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": f"What is {a} + 4?"}] for a in (3, 5)]
    settings = SamplingParams(temperature=0, max_tokens=8)
    both = llm.chat(conversations, settings)
    assert [output.outputs[0].text for output in both] == [
        llm.chat(one, settings)[0].outputs[0].text for one in conversations
    ]


def test_an_output_has_vllms_fields(llm: LLM) -> None:
    (output,) = llm.generate("Once", SamplingParams(max_tokens=2))
    names = {
        "request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished", "metrics", "lora_request",
        "encoder_prompt", "encoder_prompt_token_ids", "num_cached_tokens", "kv_transfer_params",
    }  # fmt: skip
    assert vars(output).keys() == names
    assert (output.metrics, output.encoder_prompt, output.finished) == (None, None, True)


def test_embed_gives_the_embedding_pipelines_vectors() -> None:
    llm = LLM("tiny", runner="pooling", overrides=["device=cpu"])
    expected = pipeline("embedding", model="tiny", device="cpu")(PROMPTS)
    assert [output.outputs.embedding for output in llm.embed(PROMPTS)] == expected.tolist()
    assert llm.embed("x")[0].outputs.hidden_size == expected.shape[1]
    with pytest.raises(UserError, match="generate and chat need a model that was loaded for them"):
        llm.generate("x")


@each(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 is not allowed: give a number above 0"),
        (
            {"revision": "v1"},
            "model.revision=v1 is not used by .*tiny, which is on disk: leave it out, or give a hub id",
        ),
        (
            {"overrides": ["predict.truncate=left", "predict.max_prompt_tokens=3"]},
            r"predict.truncate is not used by LLM: give SamplingParams\(truncate_prompt_tokens=N\)",
        ),
        ({"hf_token": "hf_abc"}, "^hf_token is not taken: leave it out; the hub's client reads HF_TOKEN"),
        ({"speculative_config": "ngram"}, "speculative_config is of type str: give a dictionary"),
        ({"speculative_config": {"method": ["ngram"]}}, r"speculative_config: method \['ngram'\] is not here"),
        ({"revision": "v1", "tokenizer_revision": "v2"}, "tokenizer_revision='v2' contradicts revision='v1'"),
        (
            {"hf_overrides": {"rope_theta": 1}},
            "hf_overrides=.* is not taken: leave it out; .* config.json: change it in a",
        ),
        (
            {"distributed_executor_backend": "ray"},
            "='ray' is not taken: leave it out; ranks are processes of this machine",
        ),
        ({"task": "embed", "runner": "generate"}, "task=embed contradicts runner=generate"),
        ({"quantization": "awq"}, "quantization='awq' contradicts the checkpoint .*tiny, which is not quantised"),
        ({"kv_cache_dtype": "fp7"}, "kv_cache_dtype='fp7' is not allowed: give one of auto, fp8"),
        (
            {"speculative_config": {"method": "eagle"}},
            "speculative_config: method 'eagle' is not here: give one of ngram",
        ),
        (
            {"speculative_config": {"method": "ngram", "suffix": 1}},
            "suffix is not taken with ngram: there are num_spec",
        ),
        (
            {"max_model_length": 5},
            "argument max_model_length does not exist: there are model, .*: did you mean max_model_len",
        ),
        ({"runner": "draft"}, "runner=draft is not allowed: give auto, generate or pooling"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        LLM("tiny", **arguments)
    assert "\n" not in str(error.value)


@each(
    ("prompts", "settings", "message"),
    [
        ("x", {"best_of": 3}, "SamplingParams: best_of=3 is not taken: leave it out; give n"),
        ("x", {"best_off": 3}, "SamplingParams has no best_off here: there are n, presence_penalty"),
        (
            "x",
            {"detokenize": False, "stop": ["a"]},
            "stop is found in texts, which detokenize=False leaves out: give stop_t",
        ),
        ("x", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 is not allowed: give a number above 0, or -1"),
        ("x", {"temperature": -1}, "decode.temperature=-1 is not allowed"),
        (
            "x",
            {"structured_outputs": {"xml": "<a>"}},
            "structured_outputs=.* is not allowed: give a dictionary with one of json",
        ),
        ([3.5], {}, "prompt 0 is 3.5: give a text, a list of token ids"),
        (["x", ""], {"max_tokens": 500}, "prompt 0: .*model.max_length=128"),
        ([{"prompt": "x", "multi_modal_data": {}}], {}, "prompt 0 is .*multi_modal_data"),
    ],
)
def test_wrong_calls_are_one_line(llm: LLM, prompts: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        llm.generate(prompts, SamplingParams(**settings))
    assert "\n" not in str(error.value)


def test_vllms_own_values_may_be_said(llm: LLM) -> None:
    """Default values of arguments and fields that support no other value."""
    said = {"tokenizer_mode": "auto", "enable_chunked_prefill": True, "cpu_offload_gb": 0, "trust_remote_code": True}
    other = LLM("tiny", dtype=torch.float32, max_model_len=128, overrides=["device=cpu"], **said)
    settings = {"temperature": 0, "max_tokens": 5}
    plain, full = (
        SamplingParams(**settings),
        SamplingParams(**settings, detokenize=True, spaces_between_special_tokens=True, thinking_token_budget=-1),
    )
    actual, expected = (engine.generate("Once", params) for engine, params in ((other, full), (llm, plain)))
    assert [output.outputs[0].text for output in actual] == [output.outputs[0].text for output in expected]
    assert SamplingParams(thinking_token_budget=3).decode().thinking.max_tokens == 3


def test_every_argument_of_vllm_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong value becomes a setting, which has its own checks, or one line has the name and the reason."""
    assert len(ARGUMENTS) > 250
    for name in sorted({*ARGUMENTS, *EARLIER_ARGUMENTS} - {*OWN}):
        caplog.clear()
        value = {"method": 1.5} if name == "speculative_config" else 1.5
        with collected() as errors:
            settings, texts = run_settings({name: value})
            assert settings or texts or name in caplog.text
        for error in errors:
            assert name in error
            assert "\n" not in error
            assert "does not exist" not in error


def test_every_field_of_vllms_sampling_params_is_answered() -> None:
    for name in [*FIELDS, *EARLIER_FIELDS]:
        for value in ("nonsense", 1.5, [1.5], {"a": 1}):
            with collected() as errors:
                decode = SamplingParams(**{name: value}).decode()
                assert name in OF_ITSELF or decode != SamplingParams().decode()
            for error in errors:
                assert f"SamplingParams has no {name} " not in error
                assert "\n" not in error


@contextmanager
def collected() -> Iterator[list[str]]:
    """Return the UserError that the block raises, if any."""
    errors: list[str] = []
    try:
        yield errors
    except UserError as error:
        errors.append(str(error))


def test_arguments_of_vllm_are_settings_of_ours() -> None:
    def composed(**arguments: Any) -> RunConfig:
        overrides, texts = run_settings(arguments)
        return compose_run_config(overrides, texts)

    run = composed(
        tensor_parallel_size=2, pipeline_parallel_size=4, max_loras=3, load_format="pt", kv_cache_memory_bytes=999
    )
    assert (run.parallel.mode, run.parallel.tp, run.parallel.pp) == (ParallelMode.tp_pp, 2, 4)
    assert (run.model.max_adapters, run.model.allow_pickle, run.device.kv_cache_memory) == (3, True, "999")
    run = composed(revision="1.10", tokenizer_revision="1.10", skip_tokenizer_init=True, enable_prefix_caching=False)
    assert (run.model.revision, run.model.tokenizer, run.decode.prefix_cache) == ("1.10", None, False)
    run = composed(speculative_config={"model": "/a, b", "num_speculative_tokens": 3}, pipeline_parallel_size=1)
    assert (run.decode.speculate, run.decode.speculation.num_tokens) == (Speculate.model, 3)
    assert run.decode.speculation.model_path == "/a, b"
    run = composed(speculative_config={"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": None})
    assert (run.decode.speculate, run.decode.speculation.max_ngram) == (Speculate.ngram, 3)
    assert composed(speculative_config=None, max_model_len=None, enforce_eager=False) == composed()


@pytest.mark.long
def test_an_engine_of_two_ranks_that_drafts(llm: LLM) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    other = LLM(
        "tiny",
        dtype="float",
        max_model_len=128,
        tensor_parallel_size=2,
        speculative_config=drafts,
        overrides=["device=cpu"],
    )
    settings = SamplingParams(temperature=0, max_tokens=30)
    actual, expected = (
        [output.outputs[0].token_ids for output in run.generate(PROMPTS, settings)] for run in (other, llm)
    )
    assert actual == expected
    assert other.engine.speculator.counts.num_drafted_tokens > 0


def test_fields_of_vllm_change_prompts_and_texts(llm: LLM) -> None:
    settings = {"temperature": 0, "max_tokens": 6, "logprobs": 1}
    full, cut = (
        llm.generate(PROMPTS[2], SamplingParams(**settings, **options))[0]
        for options in ({}, {"truncate_prompt_tokens": 3})
    )
    assert cut.prompt_token_ids == full.prompt_token_ids[-3:]
    (bare,) = llm.generate(PROMPTS[2], SamplingParams(**settings, detokenize=False, skip_reading_prefix_cache=True))
    assert bare.outputs[0].token_ids == full.outputs[0].token_ids
    assert (bare.outputs[0].text, bare.num_cached_tokens) == ("", 0)
    assert all(entry.decoded_token is None for step in bare.outputs[0].logprobs or [] for entry in step.values())
    (long,) = llm.generate([[5] * 500], SamplingParams(**settings, truncate_prompt_tokens=-1))
    assert (len(long.prompt_token_ids), len(long.outputs[0].token_ids)) == (122, 6)


def test_sampling_params_need_one_for_each_prompt(llm: LLM) -> None:
    with pytest.raises(UserError, match="there are 2 sampling_params for 3 prompts: give one, or one for each"):
        llm.generate(PROMPTS, [SamplingParams()] * 2)
    with pytest.raises(UserError, match='embed needs a model that was loaded for it: give runner="pooling"'):
        llm.embed("x")


@pytest.mark.long
def test_scripts_of_vllms_first_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Remote code is never executed, and memory settings are for GPUs; a quantisation may be named if the checkpoint
    has it; prompts may be token ids."""
    data = write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))
    quant = QuantConfig(QuantScheme.int4, group_size=64, skip=["lm_head"])
    make(quantize_run(TINY, quant, tmp_path / "awq", data, format=QuantizedFormat.awq), tmp_path / "run")
    said = {"trust_remote_code": True, "gpu_memory_utilization": 0.5, "swap_space": 4, "max_model_len": 128}
    llm = LLM(tmp_path / "awq", quantization="AWQ", dtype=torch.float32, overrides=["device=cpu"], **said)
    assert "no code of a checkpoint is ever run" in caplog.text
    assert torch.cuda.is_available() or "gpu_memory_utilization=0.5 is not used without a GPU" in caplog.text
    settings, ids = SamplingParams(temperature=0, max_tokens=5), [[0, 43, 874], [5, 6]]
    by_name = llm.generate(prompt_token_ids=ids, sampling_params=settings, use_tqdm=False)
    plain = llm.generate(ids, settings, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in by_name] == [output.outputs[0].token_ids for output in plain]
    with pytest.raises(UserError, match="give one of them"):
        llm.generate("a", settings, ids)
    with pytest.raises(UserError, match="quantization='gptq' contradicts the checkpoint .*, which has awq"):
        LLM(tmp_path / "awq", quantization="gptq")
