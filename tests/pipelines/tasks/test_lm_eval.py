"""lm_eval over our engine gives the results of its own `--model hf`, which runs transformers."""

import csv
import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from tests.helpers.builders import REPOSITORY
from tests.helpers.cases import each
from tests.helpers.command import refusal, run

pytest.importorskip("lm_eval", reason="needs the extra test-clients")
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from pipelines.tasks.lm_eval import QuintetLM, decode_of  # noqa: E402

pytestmark = pytest.mark.long

TINY = REPOSITORY / "models" / "tiny"
BABYLLAMA = REPOSITORY.parent / "shared" / "data" / "models" / "babyllama_tok105"  # a BOS before every text, 256 tokens
CHINESE = ("我喜欢", "北京。")  # babyllama lacks such characters
PAIRS = [
    ("Once upon a time", ", there was a little girl"),
    ("Once upon a time ", "there was"),  # the space belongs to the continuation
    ("", "One sunny day"),
    ("a " * 300, "b"),  # longer than either model accepts
    ("A lion is", " x"),
]
TEXTS = ["Tom went to the park. " * 40, "x"]
ASKED = [
    ("Once upon a time", {"until": ["\n", "girl"], "max_gen_toks": 20}),
    ("One sunny day,", {"until": ".", "max_gen_toks": 20, "do_sample": False, "temperature": 0.0}),
    ("a " * 300, {"until": [], "max_gen_toks": 5}),
]


@pytest.fixture(scope="module", params=[TINY, BABYLLAMA], ids=["tiny", "babyllama"])
def models(request: pytest.FixtureRequest) -> tuple[QuintetLM, HFLM]:
    if not request.param.exists():
        pytest.skip(f"needs {request.param.name} of ../shared")
    ours = QuintetLM.create_from_arg_obj({"pretrained": request.param, "model.dtype": "float32"}, {"device": "cpu"})
    theirs = HFLM(pretrained=str(request.param), dtype="float32", device="cpu", batch_size=1)
    return ours, theirs


def instances(kind: str, arguments: list[Any]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=arguments_of_one, idx=i)
        for i, arguments_of_one in enumerate(arguments)
    ]


def test_log_likelihoods_are_transformers(models: tuple[QuintetLM, HFLM]) -> None:
    pairs = [*PAIRS, *([CHINESE] if models[0].tokenizer.source == TINY else [])]
    ours, theirs = (model.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True) for model in models)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    # float32 logits of magnitude 10 have steps of 1e-6, and sums in another order need some more
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], rel=1e-6, abs=1e-5)


def test_rolling_log_likelihoods_are_transformers(models: tuple[QuintetLM, HFLM]) -> None:
    arguments = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    ours, theirs = (model.loglikelihood_rolling(arguments, disable_tqdm=True) for model in models)
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_greedy_texts_are_transformers(models: tuple[QuintetLM, HFLM]) -> None:
    ours, theirs = (model.generate_until(instances("generate_until", ASKED)) for model in models)
    assert ours == theirs
    model = models[0]
    (said,) = model.generate_until(
        instances("generate_until", [("Once upon a time", {"until": [], "max_gen_toks": 4})])
    )
    ((_, greedy),) = model.loglikelihood(instances("loglikelihood", [("Once upon a time", said)]), disable_tqdm=True)
    assert greedy


def test_conversations_are_transformers() -> None:
    ours = QuintetLM.create_from_arg_string(f"pretrained={TINY},model.dtype=float32", {"device": "cpu"})
    theirs = HFLM(pretrained=str(TINY), dtype="float32", device="cpu", batch_size=1)
    history = [{"role": "user", "content": "What is 3 + 4?"}]
    text = ours.apply_chat_template(history)
    assert text == theirs.apply_chat_template(history)
    assert ours.tok_encode(text) == theirs.tok_encode(text)


@each(
    ("arguments", "message"),
    [
        (
            "model=tiny,dtype=float32",
            r"model_args has dtype=float32, which does not exist: give one of model, parallel",
        ),
        ("model=tiny,batch_size=0", r"batch_size=0 is not allowed: give a number above 0"),
        ("model=tiny,quant=int5", r"int5"),
        ("model=tiny,model.tokenizer=null", r"lm_eval asks by text, but there is no tokenizer"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        QuintetLM.create_from_arg_string(arguments, {"device": "cpu"})
    assert "\n" not in str(error.value)


@each(
    ("pair", "message"),
    [
        (("a", ""), "a continuation has no tokens"),
        (("a", "b " * 2000), r"a continuation has \d+ tokens, more than the model"),
    ],
)
def test_continuations_that_cannot_be_scored_are_refused(
    models: tuple[QuintetLM, HFLM], pair: tuple[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        models[0].loglikelihood(instances("loglikelihood", [pair]), disable_tqdm=True)


def test_unknown_settings_of_a_task_are_refused() -> None:
    with pytest.raises(UserError, match="generation_kwargs has num_beams=4, which lm_eval with quintet does not take"):
        decode_of({"until": [], "num_beams": 4})


def write_task(folder: Path) -> None:
    """Write a task of four multiple-choice questions, as a user's own YAML file."""
    starts = ["Tom went to the", "Rosa came to the", "Ella ate the", "One day the"]
    rows = [{"question": start, "choices": [" park", " soup"], "answer": i % 2} for i, start in enumerate(starts)]
    (folder / "pick.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "pick",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "pick.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / "pick.yaml").write_text(json.dumps(task))  # JSON is YAML


def write_tasks(folder: Path) -> list[str]:
    """Write a task of each kind of question, from the bundled model's stories and sums. Returns their names."""
    write_task(folder)
    settings = json.loads((folder / "pick.yaml").read_text())
    stories = [{"text": text} for text in TEXTS[:1] + ["Once upon a time there was a little girl. " * 3]]
    sums = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in ((3, 4), (2, 5), (1, 1))]
    kinds: dict[str, tuple[list[dict[str, str]], dict[str, Any]]] = {
        "stories": (
            stories,
            {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
            | {
                "metric_list": [
                    {"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")
                ]
            },
        ),
        "sums": (
            sums,
            {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
            | {"generation_kwargs": {"until": ["."], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}]},
        ),
    }
    kept = ("dataset_path", "test_split")
    for name, (rows, task_settings) in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"task": name, "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}}
        (folder / f"{name}.yaml").write_text(json.dumps({key: settings[key] for key in kept} | data | task_settings))
    return ["pick", *kinds]


def test_tasks_have_transformers_numbers(
    models: tuple[QuintetLM, HFLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    names, tasks = write_tasks(tmp_path), TaskManager(include_path=str(tmp_path), include_defaults=False)
    ours, theirs = (
        simple_evaluate(model=model, tasks=names, task_manager=tasks, bootstrap_iters=0)["results"] for model in models
    )
    assert ours.keys() == {*names}
    for name in names:
        numbers = [key for key, value in theirs[name].items() if isinstance(value, float)]
        assert numbers, name
        assert [ours[name][key] for key in numbers] == pytest.approx([theirs[name][key] for key in numbers], rel=1e-6)


@pytest.mark.long
def test_a_sweep_shows_task_metrics_with_speed_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task(tmp_path)
    for name, value in {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    asked = [
        "evaluate.tasks=[pick]",
        f"evaluate.tasks_folder={tmp_path}",
        "bench.prompt_tokens=8",
        "bench.new_tokens=4",
    ]
    sweep = tmp_path / "sweep"
    done = run("-m", "device=cpu", "task=bench,evaluate", "quant=int8", *asked, f"hydra.sweep.dir={sweep}")
    assert done.returncode == 0, done.stderr
    with (sweep / "sweep.csv").open() as file:
        (job,) = csv.DictReader(file)
    command = [sys.executable, "-m", "pipelines.lm_eval", "--model", "quintet", "--model_args", "model=tiny,quant=int8"]
    command += ["--device", "cpu", "--include_path", str(tmp_path), "--tasks", "pick", "--output_path", str(tmp_path)]
    alone = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    (results,) = tmp_path.rglob("results_*.json")
    theirs = json.loads(results.read_text())["results"]["pick"]
    assert job["quant"] == "int8"
    assert float(job["tasks.pick.acc"]) == theirs["acc,none"]
    assert float(job["tasks.pick.acc_norm"]) == theirs["acc_norm,none"]
    assert all(float(job[name]) > 0 for name in ("decode_tokens_per_s", "weight_bytes"))
    assert "pick.acc" in (sweep / "sweep.md").read_text()
    against = next(file.parent for file in sweep.rglob("samples.jsonl"))
    evaluate = [
        "task=evaluate",
        "device=cpu",
        *asked[:2],
        f"evaluate.against={against}",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    done = run(*evaluate)
    assert done.returncode == 0, done.stderr
    accuracy = json.loads((tmp_path / "run" / "comparison.json").read_text())["metrics"]["tasks.pick.acc"]
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())["tasks"]["pick"]
    assert (accuracy["before"], accuracy["now"]) == (float(job["tasks.pick.acc"]), metrics["acc"])
    assert metrics["acc_stderr"] == pytest.approx(math.sqrt(metrics["acc"] * (1 - metrics["acc"]) / 3))  # of n - 1
    assert metrics["acc_ci95"][1] - metrics["acc"] == pytest.approx(1.96 * metrics["acc_stderr"], rel=1e-3)
    done = run(*evaluate, "evaluate.limit=3")
    assert "measured 4 documents, and this run 3: give that run's evaluate.tasks, evaluate.num_fewshot" in done.stderr


@each(
    ("override", "message"),
    [
        ("evaluate.limit=3", "evaluate.limit=3 needs evaluate.tasks: give evaluate.tasks=[NAME] too"),
        ("evaluate.tasks=[nothing]", "evaluate.tasks=nothing does not exist: give one that lm_eval has"),
    ],
)
def test_wrong_settings_are_one_line(
    override: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_its_own = partial(TaskManager, include_defaults=False)  # it would read thousands of files for them
    monkeypatch.setattr("pipelines.tasks.lm_eval.TaskManager", without_its_own)
    assert message in refusal(tmp_path / "run", "task=evaluate", "device=cpu", override)
