"""Tasks give the same results with an exported model as with its source model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.pooling import EmbedConfig
from conf.schema import RunConfig, Task
from conf.tasks import BenchConfig, EvaluateConfig, PredictConfig
from kernels import build
from models.tokenizers import load_tokenizer
from models.tokenizers.pairs import has_answers
from pipelines.loading.load_engine import load_engine
from pipelines.tasks.bench import run_bench
from pipelines.tasks.chat import Conversation, LocalModel
from pipelines.tasks.embed import run_embed
from pipelines.tasks.evaluate import run_evaluate
from pipelines.tasks.predict import run_predict
from pipelines.tasks.score import run_score
from tests.helpers.builders import generate, run_config
from tests.helpers.exports import Exports
from tests.helpers.hybrid_families import HYBRID
from tests.helpers.server import served
from tests.helpers.small_tokenizers import byte_level, save
from tests.helpers.speculative_jobs import NGRAM, ROWS, job, metrics, rows_file

pytestmark = pytest.mark.long
TEXTS = ["Once upon a time, there was a little girl.", "今天天气很好", "don't"]


@pytest.fixture(scope="module", params=["llama", "lfm2", "qwen3_5_text", "kimi_linear", "bamba"])
def folders(
    chatty: Path, exports: Exports, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return a model and its export: without recurrent layers, and with recurrent layers of each kind."""
    if request.param != "llama":
        row, tokenizer, chatty = HYBRID[request.param], byte_level(), tmp_path_factory.mktemp(request.param)
        tokenizer.add_tokens(["yes", "no"])
        row.write(chatty, **row.variants[0], vocab_size=tokenizer.get_vocab_size(), eos_token_id=1)
        save(tokenizer, chatty)
    return {"model": chatty, "exported": exports.of(run_config(chatty))}


def of(folder: Path, task: Task, data: Path | None = None, **settings: Any) -> RunConfig:
    run = run_config(folder)
    predict = PredictConfig(data=str(data), batch_size=3) if data else PredictConfig()
    return replace(run, task=task, model=replace(run.model, tokenizer=""), predict=predict, **settings)


def texts_file(folder: Path) -> Path:
    return rows_file(folder, [{"prompt": text} for text in TEXTS])


def test_predict(folders: dict[str, Path], tmp_path: Path) -> None:
    """Rows of many settings in one run: beams, drawn samples, penalties, a prediction; with drafts."""
    data = rows_file(tmp_path, ROWS)
    for name, folder in folders.items():
        run_predict(job(folder, data, **NGRAM), tmp_path / name, dump)
    for file in ("predictions.jsonl", "text_generation_result.txt"):
        assert (tmp_path / "exported" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()
    actual, expected = metrics(tmp_path / "exported"), metrics(tmp_path / "model")
    assert actual["num_drafted_tokens"] == expected["num_drafted_tokens"] > 0
    assert actual["num_accepted_tokens"] == expected["num_accepted_tokens"]


def test_evaluate(folders: dict[str, Path], tmp_path: Path) -> None:
    data = texts_file(tmp_path)
    for name, folder in folders.items():
        run_evaluate(of(folder, Task.evaluate, evaluate=EvaluateConfig(data=str(data))), tmp_path / name, dump)
    actual, expected = metrics(tmp_path / "exported"), metrics(tmp_path / "model")
    assert actual["num_scored_tokens"] > 0
    names = ("num_scored_tokens", "nll_per_token", "perplexity")
    assert [actual[name] for name in names] == [expected[name] for name in names]


def test_embed(folders: dict[str, Path], tmp_path: Path) -> None:
    data = texts_file(tmp_path)
    for name, folder in folders.items():
        run_embed(of(folder, Task.embed, data, embed=EmbedConfig()), tmp_path / name, dump)
    actual, expected = (np.load(tmp_path / name / "embeddings.npy") for name in ("exported", "model"))
    assert actual.shape[0] == len(TEXTS)
    assert np.abs(actual).max() > 0
    assert (actual == expected).all()


def test_score(folders: dict[str, Path], tmp_path: Path) -> None:
    """By the tokens yes and no, which the tokenizer of the model without recurrent layers lacks."""
    data = texts_file(tmp_path)
    for name, folder in folders.items():
        if has_answers(load_tokenizer(folder)):
            run_score(of(folder, Task.score, data), tmp_path / name, dump)
        else:
            with pytest.raises(UserError, match="the tokens yes and no, which this tokenizer does not have"):
                run_score(of(folder, Task.score, data), tmp_path / name, dump)
            return
    actual, expected = ((tmp_path / name / "scores.jsonl").read_text() for name in ("exported", "model"))
    assert actual == expected
    scores = [json.loads(line)["scores"][0] for line in actual.splitlines()]
    assert len({*scores}) == len(TEXTS)


def test_chat(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Three turns, each with the whole conversation before it."""
    answers = []
    for folder in folders.values():
        decode = DecodeConfig(max_new_tokens=8, ignore_eos=True)
        conversation = Conversation(LocalModel(of(folder, Task.chat, decode=decode)), system="Be brief.")
        for text in TEXTS:
            conversation.say(text)
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert len(answers[0]) > len(TEXTS)


def test_bench(folders: dict[str, Path], tmp_path: Path) -> None:
    sizes = BenchConfig(prompt_tokens=9, new_tokens=4, repeats=1)
    for name, folder in folders.items():
        run_bench(of(folder, Task.bench, bench=sizes), tmp_path / name, dump)
    actual, expected = metrics(tmp_path / "exported"), metrics(tmp_path / "model")
    assert actual.keys() == expected.keys()
    assert actual["decode_tokens_per_s"] > 0


def test_serve(folders: dict[str, Path], tmp_path: Path) -> None:
    asked = {"model": "chatty", "prompt": TEXTS[0], "max_tokens": 12, "temperature": 0.7, "seed": 3}
    settings = f"model.path={folders['exported']}", "serve.model_name=chatty", "model.dtype=float32"
    with served(tmp_path / "run", *settings) as (_, url):
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
    engine = load_engine(of(folders["model"], Task.predict), 1)
    assert engine.tokenizer is not None
    decode = DecodeConfig(max_new_tokens=12, temperature=0.7, seed=3)
    (expected,) = generate(engine, [engine.tokenizer.encode(TEXTS[0], True)], decode)
    assert answer["choices"][0]["text"] == expected.completions[0].text


def test_generation_settings_are_the_checkpoints(chatty: Path, exports: Exports, tmp_path: Path) -> None:
    model = Path(shutil.copytree(chatty, tmp_path / "model"))
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 5, "eos_token_id": [1, 7]}
    (model / "generation_config.json").write_text(json.dumps(settings))
    config = load_engine(run_config(exports.of(run_config(model))), 1).config
    assert {name: config.decode_defaults[name] for name in ("temperature", "top_k")} == {
        "temperature": 0.7,
        "top_k": 5,
    }
    assert {1, 7} <= set(config.eos_token_ids)


def test_the_prefix_cache(folders: dict[str, Path]) -> None:
    prompt, decode = [*range(20, 120)], DecodeConfig(max_new_tokens=6, ignore_eos=True, logprobs=2)
    results = []
    for folder in folders.values():
        engine = load_engine(run_config(folder), 1)
        results.append([generate(engine, [prompt], decode)[0] for _ in range(3)])
    assert [output.num_cached_tokens for output in results[1]] == [output.num_cached_tokens for output in results[0]]
    assert results[1][-1].num_cached_tokens > 0  # a recurrent state is saved where the second prompt knows the blocks
    assert [output.completions for output in results[1]] == [output.completions for output in results[0]]


@pytest.mark.skipif(build.library() is None, reason="C++ kernels alone are recorded")
def test_steps_are_recorded(folders: dict[str, Path]) -> None:
    """Repeated steps are replayed, with the tokens of eager steps."""
    decode = DecodeConfig(max_new_tokens=20, ignore_eos=True, logprobs=2)
    answers = []
    for folder in folders.values():
        engine = load_engine(run_config(folder), 1)
        answers.append(generate(engine, [[3, 4, 5]], decode)[0].completions)
        assert engine.executor.decode_steps.can_record
        assert engine.executor.decode_steps.shapes
    assert answers[1] == answers[0]
