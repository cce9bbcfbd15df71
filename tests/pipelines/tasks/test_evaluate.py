"""Perplexity, divergence and accuracy compared with transformers, float64 and known answers."""

import gzip
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaForCausalLM

from conf.compose import compose_run_config, dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import CalibrateConfig, QuantConfig, QuantizeConfig, QuantizedFormat, QuantScheme
from conf.schema import RunConfig, Task
from conf.tasks import EvaluateConfig, PredictConfig
from models.tiny.corpus import questions as tiny_corpus_questions
from pipelines.engine.operations import Logits
from pipelines.jobs.scoring import Window, score, sliding_windows
from pipelines.loading.quantize.layers import calibration_batches
from pipelines.tasks.evaluate import run_evaluate
from pipelines.tasks.evaluate_data import ask, is_right, read_questions, read_texts
from tests.helpers.builders import REPOSITORY, SHARED, engine_of, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.command import run as command

TEXTS = [
    "Once upon a time, there was a little girl. She said: hello, world! " * 4,
    "今天天气很好，我们一起去公园玩。小明说：“你好！”" * 3,
    "don't",
]


@pytest.fixture(scope="module")
def chatty_other(chatty: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the same vocabulary and tokenizer, and other random weights."""
    folder = tmp_path_factory.mktemp("other")
    model = LlamaForCausalLM.from_pretrained(chatty)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((chatty / file).read_bytes())
    return folder


def job(folder: Path, decode: DecodeConfig | None = None, **evaluate: Any) -> RunConfig:
    run = replace(run_config(folder), predict=PredictConfig())
    model = replace(run.model, tokenizer="")
    return replace(
        run, task=Task.evaluate, model=model, evaluate=EvaluateConfig(**evaluate), decode=decode or DecodeConfig()
    )


def measure(run: RunConfig, out: Path) -> dict[str, Any]:
    run_evaluate(run, out, dump)
    assert {file.name for file in out.iterdir()} == {"config.yaml", "environment.json", "metrics.json", "samples.jsonl"}
    metrics: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return metrics


def write_texts(folder: Path, texts: list[str]) -> str:
    path = folder / "texts.jsonl"
    names = itertools.cycle(["text", "prompt"])
    rows = [json.dumps({name: text}, ensure_ascii=False) for name, text in zip(names, texts, strict=False)]
    path.write_text("\n".join(rows), encoding="utf-8")
    return str(path)


def scored_logits(
    folder: Path, token_ids: list[int], window: int, stride: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return float64 logits and targets of transformers' recipe, from its own model, loss mask and shift."""
    model, previous_end = LlamaForCausalLM.from_pretrained(folder).double().eval(), 0
    for begin in range(0, len(token_ids), stride):
        end = min(begin + window, len(token_ids))
        ids = torch.tensor([token_ids[begin:end]])
        labels = ids.clone()
        labels[:, : -(end - previous_end)] = -100
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        wanted = labels[0, 1:] != -100
        yield logits[wanted], labels[0, 1:][wanted]
        previous_end = end
        if end == len(token_ids):
            return


def expected_scores(folder: Path, other: Path, texts: list[list[int]], window: int, stride: int) -> dict[str, float]:
    nll = agreed = 0.0
    kl: list[float] = []
    for ids in texts:
        pairs = zip(scored_logits(folder, ids, window, stride), scored_logits(other, ids, window, stride), strict=True)
        for (logits, targets), (others, _) in pairs:
            task_metrics, reference = (
                torch.distributions.Categorical(logits=logits),
                torch.distributions.Categorical(logits=others),
            )
            nll -= float(task_metrics.log_prob(targets).sum())
            kl += torch.distributions.kl_divergence(reference, task_metrics).tolist()
            agreed += float((logits.argmax(-1) == others.argmax(-1)).sum())
    count = len(kl)
    return {
        "nll_per_token": nll / count,
        "perplexity": math.exp(nll / count),
        "kl_mean": sum(kl) / count,
        "kl_p99": float(np.percentile(kl, 99)),
        "top1_agreement": agreed / count,
        "num_scored_tokens": count,
    }


@pytest.mark.long
@each(
    ("window", "stride", "num_batched"),
    [(128, 128, 2048), (50, 50, 2048), (50, 20, 120), (33, 1, 512), (2, 1, 64), (128, 127, 128), (7, 3, 7)],
)
def test_equals_transformers_for_every_window_and_stride(
    chatty: Path, chatty_other: Path, tmp_path: Path, window: int, stride: int, num_batched: int
) -> None:
    texts = TEXTS if stride > 1 else [TEXTS[1]]
    run = job(chatty, data=write_texts(tmp_path, texts), window=window, stride=stride, reference=str(chatty_other))
    run = replace(run, device=replace(run.device, max_batched_tokens=num_batched))
    metrics = measure(run, tmp_path / "out")
    tokenizer = engine_of(chatty, tokenizer="").tokenizer
    assert tokenizer is not None
    token_ids = [tokenizer.encode(text, True) for text in texts]
    expected = expected_scores(chatty, chatty_other, token_ids, window, stride)
    assert expected["kl_mean"] > 0.01
    for name in ("num_scored_tokens", "top1_agreement"):
        assert metrics[name] == expected[name]
    # The model itself is float32: logits of order 10 are exact to 1e-5, and their mean is more exact.
    for name in ("nll_per_token", "perplexity", "kl_mean", "kl_p99"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5)


def test_every_token_but_the_first_of_a_text_is_scored_once_where_windows_overlap() -> None:
    for length, window, stride in itertools.product((2, 9, 10, 11, 40), (2, 5, 10), (1, 2, 4)):
        if stride < window:
            ids = list(range(length))
            windows = sliding_windows(ids, window, stride)
            assert [id for w in windows for id in w.token_ids[-w.num_scored :]] == ids[1:]
            assert max(len(w.token_ids) for w in windows) == min(window, length)
    # side by side they leave their first tokens out
    windows = sliding_windows(list(range(11)), 5, 5)
    assert [(w.token_ids, w.num_scored) for w in windows] == [([0, 1, 2, 3, 4], 4), ([5, 6, 7, 8, 9], 4)]


def test_a_model_is_its_own_best_reference(chatty: Path, tmp_path: Path) -> None:
    run = job(chatty, data=write_texts(tmp_path, TEXTS), window=40, stride=15, reference=str(chatty))
    metrics = measure(run, tmp_path / "out")
    assert (metrics["kl_mean"], metrics["kl_p99"], metrics["top1_agreement"]) == (0.0, 0.0, 1.0)
    assert metrics["accuracy"] is None
    size = (chatty / "model.safetensors").stat().st_size
    # packed weights have outputs rounded up to a multiple of 16
    assert size * 0.9 < metrics["weight_bytes"] < size * 1.05
    assert metrics["peak_memory_bytes"] > metrics["weight_bytes"]


@pytest.mark.long
def test_a_model_that_is_calibrated_now_has_a_reference_too(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of calibration do not apply to the reference."""
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    run = job(chatty, data=write_texts(tmp_path, TEXTS), reference=str(chatty))
    calibrate = CalibrateConfig(num_samples=2, sequence_length=16)
    quant = QuantConfig(QuantScheme.int8, auto_clip=True)
    run = replace(run, quant=quant, calibrate=calibrate, quantize=QuantizeConfig(format=QuantizedFormat.vllm_cpu))
    metrics = measure(run, tmp_path / "out")
    assert 0 < metrics["kl_mean"] < 0.01  # 8-bit codes; other random weights differ more


def test_a_text_file_is_one_text_to_the_last_character(chatty: Path, tmp_path: Path) -> None:
    text = "one\r\n\n  two\n好 "
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [read.text for read in read_texts(tmp_path / "a.txt")] == [text]
    one = measure(job(chatty, data=str(tmp_path / "a.txt")), tmp_path / "one")
    same = measure(job(chatty, data=write_texts(tmp_path, [text])), tmp_path / "same")
    assert one["nll_per_token"] == same["nll_per_token"]
    saved = OmegaConf.load(tmp_path / "one" / "config.yaml").evaluate
    assert (saved.window, saved.stride) == (128, 128)  # the context, which is shorter than 512


def test_scores_take_memory_for_a_few_rows_of_logits_and_blocks_of_a_prefix_cache(
    chatty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(chatty)
    rows: list[int] = []
    compute = Logits.compute
    monkeypatch.setattr(
        Logits, "compute", lambda self, executor: (rows.append(len(self.hidden)), compute(self, executor))[1]
    )
    windows = sliding_windows([i % 300 for i in range(2000)], 100, 100)
    steps: list[int] = []
    result = score(engine, windows, on_step=steps.append)
    assert max(rows) <= 256
    assert sum(rows) == steps[-1] == result.num_tokens == 1980
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_blocks
    monkeypatch.undo()  # it also takes blocks of a prefix cache without harm
    engine = engine_of(
        chatty, batch_size=1, kv_cache_memory="65536"
    )  # 8 blocks of 16 tokens, all of which a window needs
    request = [engine.request(0, list(range(2, 100)), DecodeConfig(max_new_tokens=4))]
    before = [output.completions[0].token_ids for output in engine.generate(request)]
    windows = sliding_windows(list(range(2, 130)), 128, 128)
    alone = score(engine_of(chatty), windows).nll
    assert score(engine, windows).nll == alone
    assert [output.completions[0].token_ids for output in engine.generate(request)] == before
    for check in lambda ids: score(engine, [Window(ids, 2)]), lambda ids: calibration_batches(engine, [ids]):
        with pytest.raises(UserError, match=r"token id of .* 10000 is not in the vocabulary"):  # of another tokenizer
            check([2, 3, 10_000])


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real models of ../shared")
def test_golden_nll_of_a_real_model() -> None:
    """golden.json: BOS and text in 64 non-overlapping windows of 256."""
    folder = SHARED / "data" / "models" / "babyllama_tok105"
    engine = engine_of(folder, tokenizer="")
    assert engine.tokenizer is not None
    text = (SHARED / "data" / "text" / "tiny_stories_944k.txt").read_text(encoding="utf-8")[:20_000]
    windows = sliding_windows(engine.tokenizer.encode(text, True), 256, 256)[:64]
    golden = json.loads((folder / "golden.json").read_text())["nll"]["nll_per_token"]
    assert score(engine, windows).nll_per_token == pytest.approx(golden, abs=1e-6)  # float32 on both sides


@each(
    ("continuation", "answer", "right"),
    [
        ("7", "7", True),
        (" 7\n", "7 ", True),
        ("\n\n7\nQ: and then?", "7", True),
        ("a\nb\nc", "a\nb", True),
        ("7 apples", "7", False),
        ("17", "7", False),
        ("", "7", False),
        ("a", "a\nb", False),
        ("Seven", "seven", False),
    ],
)
def test_an_answer_is_right_if_it_begins_the_continuation(continuation: str, answer: str, right: bool) -> None:
    assert is_right(continuation, answer) is right


def tiny_questions(path: Path, count: int) -> Path:
    rounds = (rounds[0] for rounds in tiny_corpus_questions(2024, held_out=True))
    rows = [
        {"messages": [{"role": "user", "content": q.prompt}], "answer": q.answer}
        for q in itertools.islice(rounds, count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_accuracy_is_the_share_of_known_answers(tmp_path: Path) -> None:
    """`tiny` answers these held-out questions. Every fourth one gets a wrong key, and one text prompt is right by its
    first line."""
    path = tiny_questions(tmp_path / "q.jsonl", 19)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows[::4]:
        row["answer"] += " or so"
    template = "<|im_start|>user\nSay this again: red car<|im_end|>\n<|im_start|>assistant\n"
    rows.append({"prompt": template, "answer": " red car"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = job(REPOSITORY / "models" / "tiny", questions=str(path), decode=DecodeConfig(max_new_tokens=40))
    metrics = measure(run, tmp_path / "out")
    assert (metrics["accuracy"], metrics["num_questions"]) == (15 / 20, 20)
    assert (metrics["perplexity"], metrics["kl_mean"], metrics["num_scored_tokens"]) == (None, None, 0)
    engine = engine_of(REPOSITORY / "models" / "tiny", batch_size=4, tokenizer="")
    expected = [i % 4 != 0 for i in range(19)] + [True]
    assert [answer.is_right for answer in ask(engine, read_questions(path), run.decode)] == expected


BAD_RUNS: list[tuple[dict[str, Any], str]] = [
    (
        {},
        r"there is nothing to evaluate: give evaluate.data=FILE, evaluate.questions=FILE.jsonl or evaluate.tasks=\[NAME\]",
    ),
    ({"data": "nowhere.txt"}, "evaluate.data=nowhere.txt is not a file that ends in .txt or .jsonl"),
    ({"questions": "nowhere.jsonl"}, "evaluate.questions=nowhere.jsonl is not a file that ends in .jsonl"),
    ({"data": b"\xff\xfeh\x00i\x00"}, r"evaluate.data=.* is not UTF-8 \(byte 0 is 0xff\): convert it first"),
    ({"data": b""}, "evaluate.data=.* is too short: it is 1 token, of which the first is not scored: give at least 2"),
    (
        {"data": b"text", "window": 129},
        r"evaluate.window=129 is more than the model takes \(max_position_embeddings=128\)",
    ),
    ({"data": b"text", "stride": 129}, "evaluate.stride=129 is more than the window, 128 tokens"),
    ({"data": b"text", "reference": "/nowhere"}, "evaluate.reference=/nowhere cannot be loaded: there is no folder"),
]


@each(("evaluate", "message"), BAD_RUNS)
def test_data_that_cannot_be_measured_is_one_error_and_writes_nothing(
    chatty: Path, tmp_path: Path, evaluate: dict[str, Any], message: str
) -> None:
    if isinstance(content := evaluate.get("data"), bytes):
        (tmp_path / "a.txt").write_bytes(content)
        evaluate = {**evaluate, "data": str(tmp_path / "a.txt")}
    with pytest.raises(UserError, match=message):
        run_evaluate(job(chatty, **evaluate), tmp_path / "out", dump)
    assert not (tmp_path / "out").exists()


@each(
    ("key", "row", "message"),
    [
        ("data", "", "evaluate.data=.* has no prompts"),
        ("data", "[1]", "row 0 of evaluate.data=.* is not a JSON object but list"),
        ("data", "{", "row 0 of evaluate.data=.* is not a JSON object: Expecting"),
        ("data", '{"id": 1}', 'row 0 of evaluate.data=.* needs a text as either "text" or "prompt"'),
        ("data", '{"text": "a", "prompt": "b"}', "row 0 of evaluate.data=.* needs a text as either"),
        ("data", '{"text": 3}', "row 0 of evaluate.data=.* needs a text as either"),
        (
            "data",
            '{"text": "a b"}\n{"text": "\\ud800"}',
            "row 1 of evaluate.data=.*: the text has half a surrogate pair",
        ),
        ("data", '{"text": "a b"}\n{"text": ""}', "row 1 of evaluate.data=.* is too short: it is 1 token"),
        (
            "questions",
            '{"prompt": "x"}',
            'row 0 of evaluate.questions=.* needs its "answer", a text that is not empty, but has null',
        ),
        ("questions", '{"prompt": "x", "answer": 4}', 'row 0 .* needs its "answer", .* but has 4'),
        ("questions", '{"prompt": "x", "answer": " "}', 'row 0 .* needs its "answer", .* but has " "'),
        ("questions", '{"answer": "x"}', "row 0 .* cannot be asked: the row has none of prompt, messages"),
        ("questions", '{"prompt": "x", "answer": "y", "decode": {"n": 2}}', "row 0 .* has decode settings of its own"),
        ("questions", '{"prompt": "' + "x " * 200 + '", "answer": "y"}', "row 0 .* cannot be asked: the prompt has"),
    ],
)
def test_a_row_without_a_text_or_that_is_not_a_question_is_named(
    chatty: Path, tmp_path: Path, key: str, row: str, message: str
) -> None:
    (tmp_path / "a.jsonl").write_text(row)
    with pytest.raises(UserError, match=message):
        run_evaluate(job(chatty, **{key: str(tmp_path / "a.jsonl")}), tmp_path / "out", dump)


def test_texts_and_questions_are_read_from_every_form_and_unused_fields_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "A.TXT.gz").write_bytes(gzip.compress(b"one\n two\n"))
    (tmp_path / "a.csv").write_text('text,id\n"a, b",1\nc,2\n')
    (tmp_path / "q.csv").write_text("prompt,answer\n1+1,2\n")
    assert [text.text for name in ("A.TXT.gz", "a.csv") for text in read_texts(tmp_path / name)] == [
        "one\n two\n",
        "a, b",
        "c",
    ]
    (question,) = read_questions(tmp_path / "q.csv")
    assert (question.row.prompt, question.answer) == ("1+1", "2")
    with pytest.raises(UserError, match=r"evaluate.questions=.* its name does not end in .jsonl, .csv, .json or .gz"):
        read_questions(tmp_path / "A.TXT.gz")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "title": "b"}\n{"text": "a", "source": 1}')
    read_texts(tmp_path / "a.jsonl")
    assert "has fields that are not used: source, title" in caplog.text


@each(
    ("decode", "asks", "message"),
    [
        (
            DecodeConfig(temperature=0.8),
            True,
            "decode.temperature=0.8 is not used by task=evaluate, whose tokens are greedy",
        ),
        (DecodeConfig(num_beams=2), True, "decode.num_beams=2 is not used by task=evaluate"),
        (DecodeConfig(logprobs=1), True, "decode.logprobs=1 is not used by task=evaluate"),
        (DecodeConfig(max_new_tokens=5), False, "decode.max_new_tokens=5 is not used without evaluate.questions"),
    ],
)
def test_ways_to_choose_tokens_that_are_not_taken(
    chatty: Path, tmp_path: Path, decode: DecodeConfig, asks: bool, message: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a b", "answer": "c"}')
    run = job(chatty, decode, **{"questions" if asks else "data": str(tmp_path / "a.jsonl")})
    with pytest.raises(UserError, match=message):
        run_evaluate(run, tmp_path / "out", dump)


def test_models_that_cannot_be_measured_are_refused(chatty: Path, chatty_other: Path, tmp_path: Path) -> None:
    """Without a tokenizer, with prompts that see themselves whole, with steps that are too small, or with a reference
    that has other tokens."""
    (tmp_path / "a.txt").write_text("Once upon a time, " * 20)
    run = job(chatty, data=str(tmp_path / "a.txt"))
    with pytest.raises(UserError, match="a window of 128 tokens is more than device.max_batched_tokens, or than"):
        run_evaluate(
            replace(run, device=replace(run.device, max_batched_tokens=100)),
            tmp_path / "out",
            dump,
        )
    with pytest.raises(UserError, match="there is no tokenizer: give model.tokenizer=PATH"):
        run_evaluate(replace(run, model=replace(run.model, tokenizer=None)), tmp_path / "out", dump)
    model = replace(run.model, path=str(REPOSITORY / "tests" / "goldens" / "chatglm"), tokenizer=str(chatty))
    with pytest.raises(UserError, match="whose tokens are predicted from those before them, but this one's prompts"):
        run_evaluate(replace(run, model=model), tmp_path / "out", dump)
    write_llama(tmp_path / "small")
    run = job(chatty, data=str(tmp_path / "a.txt"), reference=str(tmp_path / "small"))
    message = "evaluate.reference=.*small has a vocabulary of 96 tokens, but the model's 3"
    with pytest.raises(UserError, match=message):
        run_evaluate(run, tmp_path / "out", dump)
    vocabulary = json.loads((chatty / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary["model"]["merges"] = []
    other = tmp_path / "other"
    other.mkdir()
    for file in chatty_other.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    with pytest.raises(UserError, match="evaluate.reference=.*other has another tokenizer, which reads evaluate.data="):
        run_evaluate(replace(run, evaluate=replace(run.evaluate, reference=str(other))), tmp_path / "out", dump)


@pytest.mark.long
def test_paths_are_saved_so_that_the_run_can_be_made_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "q.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "float").mkdir()
    overrides = ["task=evaluate", "evaluate.data=a.txt", "evaluate.questions=q.jsonl", "evaluate.reference="]
    overrides[1:1] = ["evaluate.tasks=[arc_easy]", "evaluate.tasks_folder=float", "evaluate.against=float"]
    overrides[1:1] = ["evaluate.gate={perplexity_ratio: 1.02}", "evaluate.seed=3"]
    for model, saved_as in (("float", str(tmp_path / "float")), ("none", "none"), ("org/name", "org/name")):
        run = compose_run_config([*overrides[:-1], overrides[-1] + model])
        saved = OmegaConf.create(dump(run, tmp_path)).evaluate
        assert saved == {
            "data": str(tmp_path / "a.txt"), "window": None, "stride": None,
            "questions": str(tmp_path / "q.jsonl"), "reference": saved_as,
            "tasks": ["arc_easy"], "tasks_folder": str(tmp_path / "float"), "num_fewshot": None, "limit": None,
            "against": str(tmp_path / "float"), "gate": {"perplexity_ratio": 1.02}, "seed": 3,
        }  # fmt: skip


@pytest.mark.long
def test_the_command_runs_again_from_its_config_and_sweeps(chatty: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Once upon a time, there was a little girl. " * 9)
    (tmp_path / "q.jsonl").write_text('{"prompt": "Once", "answer": "upon"}\n')
    arguments = [
        "task=evaluate",
        "device=cpu",
        f"model.path={chatty}",
        "evaluate.data=a.txt",
        "evaluate.questions=q.jsonl",
    ]
    arguments += [f"evaluate.reference={chatty}", "decode.max_new_tokens=3", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    done = command("-m", *arguments, "evaluate.stride=16,32", "evaluate.window=32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "sweep" / "sweep.md").read_text()
    assert table.startswith(
        "| job | evaluate.stride | accuracy (%) | perplexity | KL divergence | weights (MB) | peak memory (MB) |"
    )
    first = json.loads((tmp_path / "sweep" / "0" / "metrics.json").read_text())
    again = command("--config-path", str(tmp_path / "sweep" / "0"), f"hydra.run.dir={tmp_path / 'again'}")
    assert again.returncode == 0, again.stderr
    assert "perplexity" in again.stdout
    repeated = json.loads((tmp_path / "again" / "metrics.json").read_text())
    assert repeated["nll_per_token"] == first["nll_per_token"]
