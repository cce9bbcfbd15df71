"""Composition: every option file is valid, typos fail, prompts need no escapes, saved configs run again."""

from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from conf.compose import (
    CONF,
    compose_run_config,
    dump,
    explain,
    for_hydra,
    options,
    options_over_saved,
    quote_prompt,
    saved_config,
    swept_tasks,
    to_run_config,
)
from conf.errors import UserError
from conf.flags import flags_first
from conf.quantization import KVCacheFormat, QuantConfig, QuantizeConfig, QuantizedFormat, QuantMethod, QuantScheme
from conf.schema import DeviceType, DType, Hub, ModelConfig, RunConfig, Task
from conf.tasks import PredictConfig, SweepConfig
from tests.helpers.cases import each

GROUPS = ("task", "model", "parallel", "quant", "decode", "device", "tracker", "experiment")
OPTIONS = [(group, option) for group in GROUPS for option in options(group)]


def test_defaults() -> None:
    run = compose_run_config([])
    assert (run.task, run.device.type, run.model.dtype) == (Task.predict, DeviceType.auto, DType.auto)
    assert Path(run.model.path) == CONF.parent / "models" / "tiny"
    assert run.decode.temperature == 0


def test_escapes_that_hydra_leaves_as_they_are_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert compose_run_config(['decode.stop=["\n","。"]']).decode.stop == ["\n", "。"]
    assert not caplog.text
    assert compose_run_config([r'decode.stop=["a\nb"]']).decode.stop == [r"a\nb"]
    assert r"decode.stop has the characters a\nb, a backslash and a letter" in caplog.text


def test_all_option_files_are_known() -> None:
    assert len(list(CONF.rglob("*.yaml"))) == len(OPTIONS) + 1
    assert len(OPTIONS) >= 16


# test_model_options.py tests the options of models
@pytest.mark.long
@each(("group", "option"), [(group, option) for group, option in OPTIONS if group != "model"])
def test_every_option_composes_and_says_when_to_choose_it(group: str, option: str) -> None:
    assert isinstance(compose_run_config([f"{group}={option}"]), RunConfig)
    lines = (CONF / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    comment = next(line for line in lines if not line.startswith("# @package"))
    assert comment.startswith("# ")
    assert len(comment) > 20


@pytest.mark.long
@each(
    ("override", "end"),
    [
        ("decode=gredy", "decode=gredy does not exist: there are beam, checkpoint, contrastive, greedy, sampling: did you mean greedy?"),
        ("model=llama3", "tiny, tinyllama_1_1b: did you mean llama3_8b?"),
        ("task=predct",
         "there are bench, chat, convert, embed, evaluate, export, predict, prefix, quantize, score, serve, verify: did you mean predict?"),
        ("decode.temprature=1", "cache_salt, speculate, speculation: did you mean temperature?"),
        ("decod=greedy", "calibrate, sweep, tracker, experiment: did you mean decode?"),
        ("experment=short_stories", "calibrate, sweep, tracker, experiment: did you mean experiment?"),
        ("export.format=gptq", "Key 'format' not in 'ExportConfig': there are output, tp, pp, overwrite"),
        ("predict.dta=x", "output_form, export: did you mean data?"),
        ("model.dtype=bfloat61", "expected one of [auto, float32, bfloat16, float16]: did you mean bfloat16?"),
        ("decode=xyz", "there are beam, checkpoint, contrastive, greedy, sampling"),  # resembles no option
    ],
)  # fmt: skip
def test_a_name_that_does_not_exist_is_answered_with_those_that_do(override: str, end: str) -> None:
    with pytest.raises(UserError) as raised:
        compose_run_config([override])
    assert str(raised.value).endswith(end)


def test_a_config_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    def refused(folder: Path, name: str) -> str:
        with initialize_config_dir(str(folder), version_base="1.3"), pytest.raises(HydraException) as raised:
            compose(name)
        return explain(raised.value)

    (tmp_path / "mine.yaml").touch()
    assert refused(tmp_path, "mnie") == f"{tmp_path} has no mnie.yaml: there are mine: did you mean mine?"
    (tmp_path / "mine.yaml").unlink()
    message = f"{tmp_path} has no config.yaml: give --config-path the folder of a run, which has a config.yaml"
    assert refused(tmp_path, "config") == message


@each(
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
        # typing keeps the order of a union that another module named first
        ("decode.max_new_tokens=2.5", "2.5.*is incompatible .*(int, str|str, int).*: give a value of one of these"),
        (
            "decode.max_new_tokens=many",
            "decode.max_new_tokens='many' is not allowed: give a number from 1, or auto, or null",
        ),
        ("+foo=1", "Key 'foo' not in 'RunConfig': there are task, model"),
        ("++decode.foo=1", "Key 'foo' not in 'DecodeConfig': there are max_new_tokens"),
        ("quant.smooth.foo=1", "Key 'foo' not in 'SmoothConfig': there are alpha, piecewise"),
        ("decode.max_new_tokens=???", r"decode.max_new_tokens=\?\?\? means that the value is missing: give one"),
        ("quant.skip=???", r"quant.skip=\?\?\? means that the value is missing"),
        ("quant.overrides={ }", "changes nothing of the option's own: give {lm_head: none}"),
        ("predict.data='???'", r"a prompt of \?\?\? goes into a row of a .jsonl"),
    ],
)
def test_typos_fail_in_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        compose_run_config([override])
    assert "\n" not in str(raised.value)
    assert "use +" not in str(raised.value)  # Hydra's advice would lead to the next error
    assert "search path" not in str(raised.value)


def test_any_layers_name_is_a_key_of_the_overrides() -> None:
    run = compose_run_config(["quant=int4", "quant.overrides={*.down_proj:int8}"])
    assert run.quant.overrides == {"lm_head": "int8", "*.down_proj": "int8"}
    for option in ("a8w8", "fp8"):  # their own entry for the head can be replaced
        assert compose_run_config([f"quant={option}"]).quant.overrides == {"lm_head": "none"}
        run = compose_run_config([f"quant={option}", "quant.overrides={lm_head:int8}"])
        assert (run.quant.overrides, run.quant.skip) == ({"lm_head": "int8"}, [])


def test_experiment_wins_over_groups_and_the_command_line_over_it() -> None:
    run = compose_run_config(["experiment=short_stories", "decode.seed=9"])
    assert (run.decode.temperature, run.decode.top_p, run.decode.max_new_tokens, run.decode.seed) == (1.0, 0.95, 60, 9)


def test_vllms_variable_names_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM reads "true" without regard to case, and no other value. The config that a run saves names the hub."""
    for value, hub in (
        ("True", Hub.modelscope),
        ("true", Hub.modelscope),
        ("1", Hub.huggingface),
        ("", Hub.huggingface),
    ):
        monkeypatch.setenv("VLLM_USE_MODELSCOPE", value)
        run = compose_run_config([])
        assert run.model.hub is hub
        assert compose_run_config(["model.hub=huggingface"]).model.hub is Hub.huggingface
        assert OmegaConf.create(dump(run, tmp_path)).model.hub == hub.name


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


@pytest.mark.long
@each("prompt", PROMPTS)
def test_a_prompt_is_taken_as_typed(prompt: str, tmp_path: Path) -> None:
    run = compose_run_config(quote_prompt([f"predict.data={prompt}", "decode=sampling"]))
    assert run.predict.data == prompt
    saved = OmegaConf.create(dump(run, tmp_path))
    del saved["defaults"], saved["hydra"]
    assert to_run_config(saved) == run


@each(
    ("argument", "expected"),
    [
        ("model.path=~/llama", "model.path=/home/me/llama"),
        ("model.path=~/a,~/b", "model.path=/home/me/a,/home/me/b"),
        ("model.path=~", "model.path=~"),
        ("model.path=a~/b", "model.path=a~/b"),
        ("model.path='~/a'", "model.path='~/a'"),  # its reader knows the form
        ("predict.data=~/a=~/b", "predict.data='~/a=~/b'"),
    ],
)
def test_the_home_folder_is_found_behind_a_key(argument: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert for_hydra([argument]) == [expected]


@pytest.mark.long
def test_a_saved_config_runs_again_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "conf"):
        (tmp_path / name).mkdir()
    (tmp_path / "rows.csv.gz").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    overrides = ["model.path=model", "predict.data=rows.csv.gz", "predict.chat_template=chat.jinja"]
    saved = OmegaConf.create(dump(compose_run_config(overrides), tmp_path))
    assert saved.model.path == str(tmp_path / "model")
    assert saved.predict.data == str(tmp_path / "rows.csv.gz")
    saved_home = OmegaConf.create(dump(compose_run_config(quote_prompt(["predict.data=~/rows.csv.gz"])), tmp_path))
    assert saved_home.predict.data == saved.predict.data
    assert saved.predict.chat_template == str(tmp_path / "chat.jinja")
    template = OmegaConf.create(dump(compose_run_config(["predict.chat_template='~/chat.jinja'"]), tmp_path))
    assert template.predict.chat_template == saved.predict.chat_template
    sweep_dir = OmegaConf.to_container(saved.hydra.sweep)["dir"]  # type: ignore[call-overload, index]
    assert sweep_dir.startswith("${outputs:multirun}/")
    saved = OmegaConf.create(dump(compose_run_config(["task=convert", "convert.output=made"]), tmp_path))
    assert saved.convert.output == str(tmp_path / "made")
    saved = OmegaConf.create(dump(compose_run_config(["model.path=org/name", "predict.data=conf"]), tmp_path))
    assert (saved.model.path, saved.predict.data, saved.predict.chat_template) == ("org/name", "conf", "auto")


def test_quoted_prompts_null_and_sweeps_are_hydras_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    for arguments in (
        ["predict.data='a, b'"],
        ['predict.data="a, b"'],
        ["predict.data=null"],
        ["-m", "predict.data=a.txt,b.txt"],
        ["-m", "predict.data=a.txt, my file.txt"],
        ["-m", "predict.data='a, b'"],
        ["-m", """predict.data='it is, so',"a, \\" b" , c"""],
        ["-m", "predict.data=choice(a, b)"],
        ["-m", "predict.resume=a,b"],
    ):
        assert quote_prompt(arguments) == arguments
    assert capsys.readouterr().err == ""


def test_a_revision_is_a_text() -> None:
    for revision in ("12e4567", "1_234_567", "v1.10"):  # numbers in Hydra's grammar
        assert compose_run_config([f"model.revision={revision}", "model.path=org/name"]).model.revision == revision
        assert quote_prompt(["-m", f"model.revision={revision}"])[1] == f"model.revision='{revision}'"


def jobs_of(argument: str) -> list[str | None]:
    """Return the prompts of a sweep's jobs, as Hydra's own sweeper passes them on."""
    (_, quoted) = quote_prompt(["-m", argument])
    (override,) = OverridesParser.create().parse_overrides([quoted])
    values = override.sweep_string_iterator() if override.is_sweep_override() else [override.get_value_element_as_str()]
    return [compose_run_config([f"{override.get_key_element()}={value}"]).predict.data for value in values]


@pytest.mark.long
@each("prompt", [p for p in PROMPTS if " " in p and p not in ("  spaces around  ", "null and more")])
def test_a_prompt_of_several_words_is_taken_as_typed_in_a_sweep(prompt: str) -> None:
    assert jobs_of(f"predict.data={prompt}") == [prompt]


@pytest.mark.long
def test_commas_of_a_sweep_that_can_be_meant_otherwise_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs_of("predict.data=I love Beijing, because") == ["I love Beijing, because"]
    told = 'predict.data is one prompt with commas in it: for several, quote each: \'"first","second"\'\n'
    assert capsys.readouterr().err == told
    assert jobs_of('predict.data="I love","Beijing, too"') == ["I love", "Beijing, too"]  # as the error line says
    assert capsys.readouterr().err == ""
    assert jobs_of("predict.data=Hello,World") == ["Hello", "World"]
    told = "predict.data has 2 values, a job for each: for one prompt with commas in it, quote it twice: \"'Hello,World'\"\n"
    assert capsys.readouterr().err == told
    assert jobs_of("predict.data='Hello,World'") == ["Hello,World"]
    assert jobs_of("predict.data={x}") == ["{x}"]
    assert capsys.readouterr().err == ""


def test_a_folder_to_resume_stands_for_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert saved_config(["predict.resume=a b"]) == ["predict.resume=a b"]  # the error names the missing part
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


@each(("resume", "saved"), [("auto", "auto"), ("none", "none"), ("/a/folder", "auto")])
def test_a_saved_config_does_not_resume_what_its_run_resumed(tmp_path: Path, resume: str, saved: str) -> None:
    run = compose_run_config([f"predict.resume={resume}"])
    assert OmegaConf.create(dump(run, tmp_path)).predict.resume == saved


def composed_over(arguments: list[str]) -> RunConfig:
    """Return the config that the command line makes of a saved config and further arguments."""
    flag, name, *overrides = options_over_saved(arguments)
    assert flag == "--config-name"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_run_config(compose(name, overrides=overrides))


SAMPLING_OVER_SAVED = ["decode=sampling", "decode.max_new_tokens=9"]
GIVEN: dict[str, dict[str, object]] = {  # what `saved` has in addition to its options
    "decode": {"max_new_tokens": 9},
    "model": {"dtype": DType.float32},
    "device": {"threads": 3},
    "quant": {"kv_cache": KVCacheFormat.fp8},
}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Return a run whose config is in the folder `saved` of the working directory."""
    arguments = [
        *quote_prompt(["predict.data=a, ${b}"]),
        "quant=a8w8",
        "decode=contrastive",
        "decode.max_new_tokens=9",
        "model.path=org/x",
    ]
    run = compose_run_config([*arguments, "model.dtype=float32", "device.threads=3", "quant.kv_cache=fp8"])
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "config.yaml").write_text(dump(run, tmp_path / "saved"))
    monkeypatch.chdir(tmp_path)
    return run


def test_an_option_over_a_saved_config_leaves_what_no_option_of_its_group_sets(saved: RunConfig) -> None:
    run = composed_over(["--config-path", "saved", "decode=sampling", "decode.seed=4"])
    fresh = compose_run_config(["decode=sampling", "decode.seed=4", "decode.max_new_tokens=9"])  # top_k is gone
    assert run == replace(saved, decode=fresh.decode)
    run = composed_over(["-cp=saved", "quant=int4", "model=llama2_7b", "device=cuda"])
    arguments = [
        "quant=int4",
        "quant.kv_cache=fp8",
        "model=llama2_7b",
        "model.dtype=float32",
        "device=cuda",
        "device.threads=3",
    ]
    fresh = compose_run_config(arguments)
    assert run == replace(saved, quant=fresh.quant, model=fresh.model, device=fresh.device)


@pytest.mark.long
@each(
    ("group", "option"), [(g, o) for g, o in OPTIONS if g not in ("task", "experiment", "model")] + [("model", "tiny")]
)
def test_every_option_goes_over_a_saved_config(saved: RunConfig, group: str, option: str) -> None:
    run, fresh = composed_over(["-cp", "saved", f"{group}={option}"]), compose_run_config([f"{group}={option}"])
    assert getattr(run, group) == replace(getattr(fresh, group), **GIVEN.get(group, {}))


@pytest.mark.long
def test_another_task_over_a_saved_config_leaves_the_section_of_the_former(saved: RunConfig) -> None:
    run = composed_over(["--config-path=saved", "task=evaluate", "evaluate.data=x.txt"])
    fresh = compose_run_config(["task=evaluate", "evaluate.data=x.txt"])
    assert run == replace(saved, task=Task.evaluate, predict=fresh.predict, evaluate=fresh.evaluate)
    fresh = compose_run_config(["task=serve", "serve.port=1"])
    arguments = ["--config-path=saved", "task=serve", "serve.port=1"]
    assert composed_over(arguments) == replace(saved, task=Task.serve, predict=fresh.predict, serve=fresh.serve)
    assert composed_over([*arguments, "decode=sampling"]).decode == compose_run_config(SAMPLING_OVER_SAVED).decode
    run = composed_over(["--config-path", "saved", "task=predict", "decode=greedy"])  # as before: with its own prompts
    assert run.predict == saved.predict


@pytest.mark.long
def test_a_sweep_over_tasks_keeps_the_section_of_the_saved_one(saved: RunConfig) -> None:
    settings = ["bench.new_tokens=5", "evaluate.data=x.txt"]
    _, name, *arguments = options_over_saved(
        ["--config-path", "saved", "-m", "task=predict, bench,evaluate", *settings]
    )
    swept = swept_tasks(arguments)
    for task in swept:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            run = to_run_config(compose(name, overrides=[f"task={task}", *settings]), swept)
        fresh = compose_run_config([f"task={task}", *(value for value in settings if value.startswith(task))])
        section = saved.predict if task == "predict" else getattr(fresh, task)  # with its own prompts, not the option's
        assert (run.task, getattr(run, task), run.decode) == (Task[task], section, saved.decode)


@pytest.mark.long
def test_another_task_over_a_saved_config_has_the_data_of_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = compose_run_config(["task=bench", "bench.new_tokens=5"])
    (tmp_path / "config.yaml").write_text(dump(run, tmp_path))
    fresh = compose_run_config(["task=predict"])
    assert fresh.predict.data
    assert composed_over(["--config-path", ".", "task=predict"]) == replace(fresh, model=run.model)


@pytest.mark.long
def test_another_task_over_a_saved_config_calibrates_in_its_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calibrated = ["quant=int4", "quant.method=gptq", "quantize.format=gptq"]
    for arguments in (["task=quantize", "quantize.overwrite=true"], ["predict.data=x"]):
        (tmp_path / "config.yaml").write_text(dump(compose_run_config([*calibrated, *arguments]), tmp_path))
        run = composed_over(["--config-path", ".", "task=bench"])
        assert run == compose_run_config([*calibrated, "task=bench"])


def test_a_saved_config_is_found_from_where_the_user_stands(saved: RunConfig, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    for typed in (["--config-path", "saved"], ["-cp", "./saved"], ["--config-path=saved"]):
        assert options_over_saved([*typed, "decode.seed=1"]) == ["--config-path", folder, "decode.seed=1"]
    assert options_over_saved(["decode=greedy"]) == ["decode=greedy"]
    with pytest.raises(UserError, match=f"--config-path={tmp_path}/svaed is no folder: give the folder of a run"):
        options_over_saved(["--config-path", "svaed", "decode=greedy"])
    with pytest.raises(UserError, match="experiment= does not go with a saved config: give the options and values of"):
        options_over_saved(["--config-path", "saved", "experiment=short_stories"])
    (tmp_path / "saved" / "config.yaml").write_text("defaults: [schema/run, decode: greedy]")  # Hydra's own groups
    assert options_over_saved(["-cp", "saved", "decode=greedy"]) == ["--config-path", folder, "decode=greedy"]


def test_an_option_over_a_config_without_groups_is_explained(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [schema/run]")
    with initialize_config_dir(str(tmp_path), version_base="1.3"), pytest.raises(HydraException) as raised:
        compose("mine", overrides=["decode=greedy"])
    assert "need a config that has the group in its defaults; give KEY.NAME=VALUE" in explain(raised.value)


def test_as_many_new_tokens_as_fit_is_saved_so(tmp_path: Path) -> None:
    run = compose_run_config(["decode.max_new_tokens=auto"])
    assert run.decode.max_new_tokens == "auto"
    saved = OmegaConf.create(dump(run, tmp_path))
    del saved["defaults"], saved["hydra"]
    assert to_run_config(saved) == run


def test_a_job_of_a_sweep_over_tasks_leaves_out_what_is_for_the_other_tasks() -> None:
    arguments = ["-m", "task=bench, evaluate", "evaluate.data=a.txt", "bench.new_tokens=9", "predict.batch_size=3"]
    assert swept_tasks(arguments) == ["bench", "evaluate"]
    assert swept_tasks(["-m", "task=bench", "decode=greedy,beam"]) == []
    config = OmegaConf.structured(RunConfig(task=Task.bench))
    config.evaluate.data, config.bench.new_tokens = "a.txt", 9
    with pytest.raises(UserError, match="evaluate.data=a.txt is not used by task=bench"):
        to_run_config(config)
    run = to_run_config(config, swept_tasks(arguments))
    assert (run.evaluate.data, run.bench.new_tokens) == (None, 9)
    config.quantize.overwrite, config.quantize.format = True, QuantizedFormat.gptq
    swept = ["bench", "evaluate", "quantize"]
    with pytest.raises(
        UserError, match="quantize.format=gptq is not used by task=bench: leave it at compressed_tensors"
    ):
        to_run_config(config, swept)
    config.quant = QuantConfig(QuantScheme.int4, QuantMethod.gptq)  # a task that calibrates reads it
    assert to_run_config(config, swept).quantize == QuantizeConfig(format=QuantizedFormat.gptq)
    config.quant, config.quantize = QuantConfig(), QuantizeConfig()
    config.predict.batch_size = 3  # settings of a task that the sweep does not run
    with pytest.raises(UserError, match="predict.batch_size=3 is not used by task=bench"):
        to_run_config(config, swept_tasks(arguments))


@each("task", [Task.embed, Task.score])
def test_a_task_of_rows_reads_the_settings_of_predict(task: Task) -> None:
    config = OmegaConf.structured(RunConfig(task=task))
    config.predict.data, config.predict.batch_size = "rows.jsonl", 3
    for swept in (None, ["predict", task.name]):
        assert to_run_config(config, swept).predict == PredictConfig(data="rows.jsonl", batch_size=3)
    config.bench.new_tokens = 9
    with pytest.raises(UserError, match=f"bench.new_tokens=9 is not used by task={task.name}"):
        to_run_config(config)


def test_settings_of_sweeps_are_for_jobs_of_a_sweep_alone(tmp_path: Path) -> None:
    for objective in ("perplexity", ["perplexity", "weight_bytes"]):
        config = OmegaConf.structured(RunConfig(model=ModelConfig("x"), sweep=SweepConfig(objective)))
        run = to_run_config(config, swept=[])
        assert run.sweep.objective == objective
        with pytest.raises(UserError, match="sweep.objective=.* is not used by a run alone: leave it out, or give -m"):
            to_run_config(config)
        saved = OmegaConf.create(dump(run, tmp_path))  # a single job runs again
        del saved["defaults"], saved["hydra"]
        assert to_run_config(saved).sweep.objective is None
    for setting in ("sweep.objective=perplexity", "sweep.baseline=2", "sweep.select='max accuracy'"):
        with pytest.raises(UserError, match=f"{setting.replace(chr(39), '')} is not used by a run alone"):
            compose_run_config([setting])


@each(
    ("arguments", "expected"),
    [
        (
            ["quant=int8", "--config-dir", "D", "seed=1", "--cfg", "job"],
            ["--config-dir", "D", "--cfg", "job", "quant=int8", "seed=1"],
        ),
        (["a=1", "-m", "b=2,3", "--cfg=job", "--resolve"], ["-m", "--cfg=job", "--resolve", "a=1", "b=2,3"]),
        (["--info", "quant=int8"], ["--info=all", "quant=int8"]),
        (["quant=int8", "-i", "defaults"], ["-i", "defaults", "quant=int8"]),
        (["decode.seed=-1", "~task"], ["decode.seed=-1", "~task"]),
    ],
)
def test_flags_may_stand_anywhere(arguments: list[str], expected: list[str]) -> None:
    assert flags_first(arguments) == expected


@each("others", [[], ["quant=int8"], ["-cp", "saved"]])
def test_resolve_alone_is_one_line(others: list[str]) -> None:
    with pytest.raises(UserError, match="give --cfg job --resolve"):
        flags_first(["--resolve", *others])
    assert flags_first(["--resolve", "-c", "job", *others])[0] == "--resolve"
