"""Scripts from the documentation of MindFormers and of vLLM run with another import line."""

import ast
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from conf.errors import UserError
from conf.quantization import QuantConfig, QuantizedFormat, QuantScheme
from pipelines import mindformers, pipeline
from pipelines.mindformers import AutoModel, AutoTokenizer, build_context
from tests.helpers.builders import REPOSITORY
from tests.helpers.cases import each
from tests.helpers.mindspore_files import ckpt, renamed
from tests.helpers.modelscope_cache import use_modelscope
from tests.helpers.quantized_models import make, quantize_run, random_rows, write_rows

TINY = REPOSITORY / "models" / "tiny"
PROMPTS = ["I love Beijing, because", "LLaMA is a", "Once upon a time"]
MINDFORMERS = f"""
from mindformers import build_context
from mindformers import AutoModel, AutoTokenizer, pipeline, TextStreamer

inputs = {PROMPTS}
build_context({{'context': {{'mode': 0}}, 'run_mode': 'predict', 'parallel': {{}}, 'parallel_config': {{}}}})
tokenizer = AutoTokenizer.from_pretrained('llama2_7b')
model = AutoModel.from_pretrained('llama2_7b', checkpoint_name_or_path="path/to/llama2_7b.ckpt", use_past=True)
"""
WHOLE = """
text_generation_pipeline = pipeline(task="text_generation", model=model, tokenizer=tokenizer)
outputs = text_generation_pipeline(inputs, max_length=512, do_sample=False, top_k=3, top_p=1)
for output in outputs:
    print(output)
"""
STREAMED = """
streamer = TextStreamer(tokenizer)
text_generation_pipeline = pipeline(task="text_generation", model=model, tokenizer=tokenizer, streamer=streamer)
_ = text_generation_pipeline(inputs, max_length=512, do_sample=False, top_k=3, top_p=1)
"""
VLLM = """
from vllm import LLM, SamplingParams
import os
import torch
os.environ['VLLM_USE_MODELSCOPE'] = 'True'

prompts = ["Once upon a time", "I love Beijing, because"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model="{}", {}trust_remote_code=True)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {{prompt!r}}, Generated text: {{generated_text!r}}")
"""


def run(script: str, theirs: str, ours: str) -> None:
    exec(
        compile(script.replace(f"from {theirs} import", f"from {ours} import"), theirs, "exec"),
        {"__name__": "__main__"},
    )


@pytest.fixture
def ckpt_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of a script, with the bundled model as path/to/llama2_7b.ckpt."""
    folder = tmp_path / "path" / "to"
    folder.mkdir(parents=True)
    tensors = load_file(TINY / "model.safetensors")
    (folder / "llama2_7b.ckpt").write_bytes(ckpt(renamed(tensors)))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.usefixtures("ckpt_folder")
def test_the_scripts_of_mindformers(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    ours = "pipelines.mindformers"
    run(MINDFORMERS + WHOLE, "mindformers", ours)
    said = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    pipe = pipeline("text_generation", model="tiny")
    assert said == pipe(PROMPTS, max_length=512, do_sample=False, top_k=3, top_p=1)
    assert not [message for message in caplog.messages if "change" in message]
    run(MINDFORMERS + STREAMED, "mindformers", ours)
    assert capsys.readouterr().out == "".join(f"{result['text_generation_text'][0]}\n" for result in said)


def test_build_context_maps_to_overrides(ckpt_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = {"device_target": "CPU", "mode": 1, "max_device_memory": "58GB"}
    sizes = {"model_parallel": 2, "pipeline_stage": 3, "data_parallel": 1, "micro_batch_num": 1}
    build_context({"context": context, "use_parallel": True, "parallel": {"device_num": 6}, "parallel_config": sizes})
    assert mindformers._context == ["device=cpu", "parallel=tp_pp", "parallel.tp=2", "parallel.pp=3"]
    for key in ("context.mode", "context.max_device_memory", "parallel_config.micro_batch_num"):
        assert key in caplog.text
    build_context({"context": {"device_target": "CPU"}, "parallel_config": {"data_parallel": 8}})
    assert mindformers._context == ["device=cpu"]
    assert "parallel_config: data_parallel is used with use_parallel=True alone" in caplog.text
    options = {
        "seq_length": 64,
        "batch_size": 2,
        "compute_dtype": "float32",
        "max_decode_length": 20,
        "do_sample": False,
    }
    model = AutoModel.from_pretrained("llama2_7b", checkpoint_name_or_path=ckpt_folder, **options)
    pipe = mindformers.pipeline("text_generation", model, AutoTokenizer.from_pretrained(str(TINY)))
    assert (pipe.run.model.max_length, pipe.engine.config.max_num_requests, str(pipe.engine.dtype)) == (
        64,
        2,
        "torch.float32",
    )
    assert pipe("Once") == mindformers.pipeline(
        "text_generation", str(TINY), seq_length=64, dtype="float32", overrides=["quant.kv_cache=none"]
    )("Once", max_length=20, do_sample=False)
    build_context({})


@each(
    ("config", "message"),
    [
        ("x", "build_context takes a dictionary, not a str"),
        ({"run_mode": "train"}, "run_mode='train' is not here: models are run, and not trained"),
        ({"context": {"device_target": "TPU"}}, "device_target='TPU' does not exist: there are CPU"),
        ({"context": "x"}, "context of build_context is of type str: give a dictionary"),
        ({"use_parallel": "Flase"}, "use_parallel='Flase' is not allowed: give True or False"),
        (
            {"use_parallel": True, "parallel_config": {"data_parallel": 8}},
            "=8 are engines of their own: give 1, or run.py",
        ),
        ({"use_parallel": True, "parallel_config": {"model_parallel": 0}}, "model_parallel=0 is not allowed"),
        ({"use_parallel": True, "parallel": {"device_num": 8}}, "device_num=8 contradicts .*, which has 1 ranks"),
    ],
)
def test_contexts_that_are_not_there(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_context(config)


def test_unsupported_arguments_of_mindformers_are_one_line(ckpt_folder: Path) -> None:
    (ckpt_folder / "other.ckpt").touch()
    model, tokenizer = AutoModel.from_pretrained, AutoTokenizer.from_pretrained
    for call, message in (
        (
            lambda: model("llama2_7b", num_layers=1),
            "num_layers=1 is not taken: config and tokenizer are the checkpoint's",
        ),
        (lambda: tokenizer("llama2_7b", bos_token="x"), "bos_token='x' is not taken"),
        (
            lambda: model("x", ckpt_folder / "llama2_7b.ckpt"),
            r"llama2_7b.ckpt: .* also has other.ckpt: give a fol",
        ),
        (lambda: model("x", "no.ckpt"), "checkpoint_name_or_path=no.ckpt: there is no such file"),
        (
            lambda: mindformers.pipeline("text_generation"),
            "pipeline needs a task and a model: give task='text_generation'",
        ),
        (
            lambda: mindformers.pipeline("text_generation", model("tiny"), backend="tf"),
            "backend='tf' is not here: leave it",
        ),
        (
            lambda: mindformers.pipeline("fill_mask", model("tiny")),
            "task 'fill_mask' does not exist: there are text_gen",
        ),
        (
            lambda: mindformers.pipeline("text_generation", model("llama2_7c", TINY)),
            "llama2_7c does not exist: .* llama2_7b",
        ),
        (
            lambda: mindformers.TextStreamer(None, clean_up=True),
            "clean_up=True is not taken by a streamer: give skip_spec",
        ),
    ):
        with pytest.raises(UserError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)
    with pytest.raises(
        AttributeError, match="chat: a model or tokenizer of pipelines.mindformers is opened by pipeline"
    ):
        _ = model("tiny").chat
    assert mindformers.TextStreamer(tokenizer("tiny"), skip_prompt=True, skip_special_tokens=True).skip_prompt


@pytest.mark.long
def test_the_scripts_of_vllm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Models come from ModelScope's cache, one of them quantised; remote code is reported, and not run."""
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "")  # the scripts set it
    use_modelscope(tmp_path / "hub", monkeypatch)
    shutil.copytree(TINY, tmp_path / "hub" / "qwen--Qwen-1_8B" / "snapshots" / "master")
    data = write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))
    quant = QuantConfig(QuantScheme.int4, group_size=64, skip=["lm_head"])
    awq = tmp_path / "hub" / "ticoAg" / "Qwen-1_8B-Chat-Int4-awq"
    make(quantize_run(TINY, quant, awq, data, format=QuantizedFormat.awq), tmp_path / "run")
    capsys.readouterr()
    with caplog.at_level(logging.WARNING):
        run(VLLM.format("qwen/Qwen-1_8B", ""), "vllm", "pipelines")
        run(
            VLLM.format("ticoAg/Qwen-1_8B-Chat-Int4-awq", 'quantization="AWQ", dtype=torch.float16, '),
            "vllm",
            "pipelines",
        )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Prompt: ")]
    assert len(lines) == 4
    assert all(line.startswith(("Prompt: 'Once upon a time', Generated", "Prompt: 'I love Beijing")) for line in lines)
    assert caplog.text.count("no code of a checkpoint is ever run") == 2
