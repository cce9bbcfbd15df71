"""Composition: every option file is valid, typos fail, prompts can be typed as they are, saved configs run again."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.compose import CONF, compose_run_config, dump, options, quote_prompt, saved_config, to_run_config
from conf.errors import UserError
from conf.schema import DeviceType, DType, RunConfig, Task

GROUPS = ("task", "model", "parallel", "quant", "decode", "device", "experiment")
OPTIONS = [(group, option) for group in GROUPS for option in options(group)]


def test_defaults() -> None:
    run = compose_run_config([])
    assert (run.task, run.device.type, run.model.dtype) == (Task.predict, DeviceType.auto, DType.auto)
    assert Path(run.model.path) == CONF.parent / "models" / "tiny"
    assert run.decode.temperature == 0


def test_all_option_files_are_known() -> None:
    assert len(list(CONF.rglob("*.yaml"))) == len(OPTIONS) + 1
    assert len(OPTIONS) >= 16


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_says_when_to_choose_it(group: str, option: str) -> None:
    assert isinstance(compose_run_config([f"{group}={option}"]), RunConfig)
    lines = (CONF / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    comment = next(line for line in lines if not line.startswith("# @package"))
    assert comment.startswith("# ")
    assert len(comment) > 20


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decode.temprature=1", "temprature.* not in 'DecodeConfig'"),
        ("decode.top_k=many", "many"),
        ("model.dtype=float64", "float64.*auto, float32, bfloat16, float16"),
        ("quant=int3", "int3.*none"),
        ("modle=tiny", "modle"),
        ("decode.top_p=0", "decode.top_p=0.0 is not allowed"),
        ("quant.group_size=3", "group_size"),
        ("quant.kv_cache=int5", "int5.*none, int8, fp8, int4"),
        ("hydra.run.dri=/x", "hydra.run.dri"),
        ("+foo=1", "Key 'foo' not in 'RunConfig': there are task, model"),
        ("++decode.foo=1", "Key 'foo' not in 'DecodeConfig': there are max_new_tokens"),
        ("quant.smooth.foo=1", "Key 'foo' not in 'SmoothConfig': there are alpha, piecewise"),
        ("decode.max_new_tokens=???", r"decode.max_new_tokens=\?\?\? means that the value is missing: give one"),
        ("quant.skip=???", r"quant.skip=\?\?\? means that the value is missing"),
        ("predict.data='???'", r"a prompt of \?\?\? goes into a row of a .jsonl"),
    ],
)
def test_typos_fail_in_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        compose_run_config([override])
    assert "\n" not in str(raised.value)
    assert "use +" not in str(raised.value)  # Hydra's advice, which ends in the next error
    assert "search path" not in str(raised.value)


def test_experiment_wins_over_groups_and_the_command_line_over_it() -> None:
    run = compose_run_config(["experiment=short_stories", "decode.seed=9"])
    assert (run.decode.temperature, run.decode.top_p, run.decode.max_new_tokens, run.decode.seed) == (1.0, 0.95, 60, 9)


PROMPTS = [
    "I love Beijing, because",
    "[1, 2] {a: b} (c) = d",
    "it's \"quoted\" 'twice'",
    "ends with a quote'",
    "'",
    "back\\slash \\' and \\",
    "${model.path} costs $5",
    "  spaces around  ",
    "two\nlines\tand a tab",
    "今天天气很好，是吗？🙂",
    "",
    "-",
    "null and more",
    "1e5",
    "true",
    "a=b",
    "\\${x} and \\\\${y}",
    '"Hi," she said. "Bye"',
    "'a' and 'b'",
    "'\\'",
    "ends with a backslash\\\n",
    "\\\\",
    "#comment",
    "next\x85line \\\x85\x85 ${x}\x85",
    "lines\u2028and\u2029paragraphs\rand returns",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_is_taken_as_typed(prompt: str, tmp_path: Path) -> None:
    run = compose_run_config(quote_prompt([f"predict.data={prompt}", "decode=sampling"]))
    assert run.predict.data == prompt
    saved = OmegaConf.create(dump(run, tmp_path))
    del saved["defaults"], saved["hydra"]
    assert to_run_config(saved) == run


def test_a_saved_config_runs_again_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "conf"):
        (tmp_path / name).mkdir()
    (tmp_path / "rows.jsonl").touch()
    overrides = ["model.path=model", "predict.data=rows.jsonl", "predict.chat_template=chat.jinja"]
    saved = OmegaConf.create(dump(compose_run_config(overrides), tmp_path))
    assert saved.model.path == str(tmp_path / "model")
    assert saved.predict.data == str(tmp_path / "rows.jsonl")
    assert saved.predict.chat_template == str(tmp_path / "chat.jinja")
    saved = OmegaConf.create(dump(compose_run_config(["task=convert", "convert.output=made"]), tmp_path))
    assert saved.convert.output == str(tmp_path / "made")
    saved = OmegaConf.create(dump(compose_run_config(["model.path=org/name", "predict.data=conf"]), tmp_path))
    assert (saved.model.path, saved.predict.data, saved.predict.chat_template) == ("org/name", "conf", "auto")


def test_quoted_prompts_null_and_sweeps_are_hydras_own() -> None:
    for arguments in (
        ["predict.data='a, b'"],
        ['predict.data="a, b"'],
        ["predict.data=null"],
        ["-m", "predict.data=a.txt,b.txt"],
    ):
        assert quote_prompt(arguments) == arguments


def test_a_folder_to_resume_stands_for_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert saved_config(["predict.resume=a b"]) == ["predict.resume=a b"]  # which says what is missing
    for name in ("a b", "auto"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    for others in ([], ["predict.batch_size=4"], ["device.threads=2", "hydra.run.dir=x"]):
        arguments = ["predict.resume=a b", *others]
        assert saved_config(arguments) == ["--config-path", str(tmp_path / "a b"), *arguments]
    for arguments in (
        [],
        ["predict.resume=auto"],
        ["predict.resume=none"],
        ["predict.resume=a", "decode.seed=1"],
        ["predict.resume=a b", "predict.data=x"],
        ["predict.resume=a b", "model=tiny"],
        ["-m", "predict.resume=a b"],
        ["a"],
    ):
        assert saved_config(arguments) == arguments
    assert quote_prompt(["predict.resume=a, {b}"]) == ["predict.resume='a, {b}'"]


@pytest.mark.parametrize(("resume", "saved"), [("auto", "auto"), ("none", "none"), ("/a/folder", "auto")])
def test_a_saved_config_does_not_resume_what_its_run_resumed(tmp_path: Path, resume: str, saved: str) -> None:
    run = compose_run_config([f"predict.resume={resume}"])
    assert OmegaConf.create(dump(run, tmp_path)).predict.resume == saved
