"""Compose YAML files and overrides into a `RunConfig`. Besides this module, only `run.py` and `callbacks.py` use Hydra."""

import os
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from conf import pooling, quantization, schema, speculation, tracker
from conf.errors import UserError, did_you_mean, list_known_names, shortened
from conf.flags import DATA, NO_SWEEP, SELECT, Replay, check_sweep, flags_first, replay_of, with_home
from conf.former import refuse_former
from conf.saved import as_saved
from conf.schema import RunConfig, Task
from conf.tasks import SweepConfig

Config = TypeVar("Config")

CONF = Path(__file__).resolve().parent
REPOSITORY = CONF.parent
RESUME = "predict.resume="
REVISION = "model.revision="
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
HYDRAS_OWN = re.compile(  # quoted values and sweep functions
    rf"null|(?:{_QUOTED})(?:\s*,\s*(?:{_QUOTED}|[^\s,'\"]+))*|(?:choice|range|interval|glob|shuffle|sort|tag)\(.*\)",
    re.DOTALL,
)
# In a Hydra error, text after one of these patterns does not help the user.
NOISE = re.compile("full_key:|Config search path:|To append to your config|See https://hydra.cc")
CONFIG_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError)
REMEDIES = {  # for errors without a remedy of their own
    "is not a ListConfig": "give a list: KEY=[a,b], or KEY=[] for none",
    "Cannot assign .* to Dict": "give names with values: KEY={a:b}",
    "is not Optional": "leave it out for its default",
    "missing EQUAL": "give KEY=VALUE",
    "is incompatible with type hint": "give a value of one of these types",
    "is not a subclass of": "a group's options need a config that has the group in its defaults; give KEY.NAME=VALUE",
}
QUOTE = """close what is open, or give the value in quotes of its own: 'KEY="VALUE"'"""
SAVED_DEFAULTS = [  # of the config.yaml that a run writes
    "schema/run",
    "_self_",
    {"override hydra/job_logging": "none"},
    {"override hydra/hydra_logging": "none"},
]
HUBS = ("huggingface", "modelscope")  # selected by VLLM_USE_MODELSCOPE, which is parsed as vLLM parses it
UNSAFE = r"[^\w.-]"  # in a folder name
_COMPOSING = threading.Lock()  # Hydra has one state for the whole process


def _run_dir(task: Any, option: str, path: str) -> str:
    """Return outputs/<task>/<model>/<date_time>.

    If model.path is set, <model> is its folder name, not the default option.
    """
    file = CONF / "model" / f"{option}.yaml"
    own_path = OmegaConf.select(OmegaConf.load(file), "path") if file.exists() else path
    name = option if path == own_path else Path(path).resolve().name
    # Microseconds, so that two runs in one second do not share a folder.
    moment = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    return _outputs(f"{getattr(task, 'name', str(task))}/{re.sub(UNSAFE, '_', name)}/{moment}")


def _outputs(path: str) -> str:
    return str(Path.cwd() / "outputs" / path)


# Registered when this module is imported, so that the workers of a launcher have them too. The group is under
# `schema/`, so that Tab completes only real options.
_SCHEMA = OmegaConf.structured(RunConfig)
OmegaConf.set_struct(_SCHEMA.quant.overrides, False)  # its keys are layer names
_SCHEMA.model.hub = "${hub:}"
ConfigStore.instance().store(group="schema", name="run", node=_SCHEMA, package="_global_")
OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path))
OmegaConf.register_new_resolver("outputs", _outputs, use_cache=True)
OmegaConf.register_new_resolver("hub", lambda: HUBS[os.environ.get("VLLM_USE_MODELSCOPE", "").lower() == "true"])
OmegaConf.register_new_resolver("next_line", lambda: "\x85")
OmegaConf.register_new_resolver("run_dir", _run_dir, use_cache=True)


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def swept_tasks(arguments: list[str]) -> list[str]:
    """Return the tasks of `-m task=bench,evaluate`; empty for a single task."""
    values = [argument.removeprefix("task=") for argument in arguments if argument.startswith("task=")]
    return [task.strip() for task in ",".join(values).split(",")] if "," in "".join(values) else []


def to_run_config(config: DictConfig, swept: Iterable[str] | None = None) -> RunConfig:
    """Return the typed, checked config.

    Raises UserError for an unknown key, a value of ???, and a value that a check rejects.

    swept: the tasks of the sweep that this job belongs to; None for a single run. Settings of tasks other than this
    job's are dropped, because another job uses them.
    """
    # to_object would use the default instead.
    if missing := OmegaConf.missing_keys(config):
        remedy = "give one, or leave it out; a prompt of ??? goes into a row of a .jsonl"
        raise UserError(f"{min(missing)}=??? means that the value is missing: {remedy}")
    try:
        # A plain dictionary, because a typed config accepts keys that `+KEY=VALUE` added.
        plain = cast(dict[str, Any], OmegaConf.to_container(config))
        job_task = Task[str(getattr(plain["task"], "name", plain["task"]))]
        for task in set(swept or ()) - {job_task.name}:
            if not (job_task.reads_rows and task == Task.predict.name):
                _drop_section(plain, task)
        run = cast(RunConfig, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), plain)))
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    if swept is not None and run.task is Task.serve:
        raise UserError(NO_SWEEP)
    for name, value in vars(run.sweep).items() if swept is None else ():
        if value != getattr(SweepConfig(), name):
            raise UserError(f"sweep.{name}={value} is not used by a run alone: leave it out, or give -m for a sweep")
    run.decode.warn_of_escapes()
    return run


def from_json(kind: type[Config], plain: dict[str, Any]) -> Config:
    """Rebuild a config or one of its groups from its JSON form, with enums by name.

    Raises UserError for an unknown key, and for a value that a check rejects.
    """
    try:
        return cast(Config, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), _plain(plain))))
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error


def _drop_section(config: Any, task: str) -> None:
    """Remove the settings of another task. quantize.format stays, because every job that calibrates reads it."""
    section = config.pop(task, {})
    if task == Task.quantize.name and "format" in section:
        config[task] = {"format": section["format"]}


def explain(error: Exception) -> str:
    """Return an error of Hydra or OmegaConf and its cause as one line. For an unknown name, list the existing names."""
    texts = [str(e) for e in (error, error.__cause__) if e is not None]
    if line := _unknown_name("\n".join(texts)):
        return line
    line = " ".join(" ".join(dict.fromkeys(NOISE.split(text)[0] for text in texts)).split())
    if isinstance(error, UnicodeDecodeError):  # it does not name the file
        begin, end = error.object.rfind(b"\n", 0, error.start) + 1, error.object.find(b"\n", error.start)
        line_of_file = error.object[begin : end if end > 0 else None].decode("utf-8", "backslashreplace").strip()
        line = f"a file of the config is not UTF-8, in the line {line_of_file!r}: convert it first"
    if isinstance(error, OverrideParseException) and "missing EQUAL" not in line:
        line = f"{shortened(str(error.override))} cannot be read: {_form_that_works(str(error.override))}"
    # Such an OSError comes from making a folder.
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        line += ": give a folder that can be written as hydra.run.dir, or with -m as hydra.sweep.dir"
    if remedy := next((text for wrong, text in REMEDIES.items() if re.search(wrong, line)), None):
        line = f"{line.rstrip('.')}: {remedy}"
    configs_by_class = vars(pooling) | vars(quantization) | vars(speculation) | vars(tracker) | vars(schema)
    for key, class_name in re.findall(r"Key '(\w+)' not in '(\w+)'", line):
        if config := configs_by_class.get(class_name):  # not for Hydra's own classes
            names = [field.name for field in fields(config)] + ["experiment"] * (config is RunConfig)
            line += f": {list_known_names(names, key)}"
    if choice := re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", line):
        line += did_you_mean(choice[2].split(", "), choice[1])
    return line


def _unknown_name(text: str) -> str | None:
    """Return the error line for an unknown option of a group or an unknown config file; None for other errors of Hydra."""
    if option := re.search(r"Could not find '(.+)/(.+)'\s+Available options in .*:((?:\n\t.*)+)", text):
        group, name, listed = option.groups()
        return f"{group}={name} does not exist: {list_known_names(listed.split(), name)}"
    if config := re.search(r"Cannot find primary config '(.+?)'(?:.|\n)*provider=main, path=(?:file://)?(.*)", text):
        name, folder = config.groups()
        files = sorted(file.stem for file in Path(folder).glob("*.yaml"))
        remedy = "give --config-path the folder of a run, which has a config.yaml"
        hint = list_known_names(files, name) if files else remedy
        return f"{folder} has no {name}.yaml: {hint}"
    return None


def _form_that_works(override: str) -> str:
    """Return the remedy for a value that Hydra's grammar rejects, such as unquoted Chinese characters."""
    key, _, value = override.partition("=")
    if re.fullmatch(r"""\[[^\[\]'"]+\]""", value):
        texts = ", ".join(f'"{text.strip()}"' for text in value[1:-1].split(","))
        return f"give its texts in quotes of their own: '{key}=[{texts}]'"
    return QUOTE


def for_hydra(arguments: list[str]) -> list[str]:
    """Return the user's arguments in the form that Hydra's command line takes. Raises UserError."""
    check_sweep(arguments)
    if {"--help", "-h"} & set(arguments):
        text = (CONF / "help.txt").read_text(encoding="utf-8").replace("$GROUPS", _groups(arguments))
        arguments = [*arguments, _quote(f"hydra.help.template={text}")]
    return flags_first(quote_prompt(options_over_saved(saved_config(checked(with_home(arguments))))))


def _groups(arguments: list[str]) -> str:
    """Return a line per group with its options, including the options in a `--config-dir`.

    Hydra's own list would include the schema group.
    """
    config_dir, _ = _folder_flag(arguments, "-cd", "--config-dir")
    options_by_group: dict[str, set[str]] = {}
    for folder in filter(None, (CONF, config_dir)):
        for file in folder.glob("*/*.yaml"):
            options_by_group.setdefault(file.parent.name, set()).add(file.stem)
    return "".join(f"  {group}: {', '.join(sorted(names))}\n" for group, names in sorted(options_by_group.items()))


def version() -> str:
    import tomllib  # imported here, because only this function needs it

    with open(REPOSITORY / "pyproject.toml", "rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def checked(arguments: list[str]) -> list[str]:
    """Return the arguments.

    Raises UserError for options of other tools, and for an argument that removes a config group or the run's folder.
    """
    refuse_former(arguments)
    for argument in arguments:
        key, _, value = argument.lstrip("~").partition("=")
        if argument.startswith("~") or (value.lower() == "null" and options(key)):
            choice = f"one of {', '.join(options(key))}" if options(key) else "a value"
            raise UserError(f"{argument} would take away what is needed: leave it out, or give {key}= and {choice}")
        if key in ("hydra.run.dir", "hydra.sweep.dir") and value.strip("'\"").lower() in ("", "null"):
            raise UserError(f"{argument} is no folder: give one, or leave it out")
        if key == "quant.overrides" and value.replace(" ", "") == "{}":
            raise UserError(f"{argument} changes nothing of the option's own: give {{lm_head: none}}, for example")
    # A folder of --config-dir may have an option named gpu.
    has_gpu = any(argument.startswith(("--config-d", "-cd")) for argument in arguments)
    return ["device=cuda" if argument == "device=gpu" and not has_gpu else argument for argument in arguments]


def compose_run_config(overrides: list[str], texts: Mapping[str, str] | None = None) -> RunConfig:
    """Return the config that `python run.py OVERRIDES` composes.

    texts: values by dotted key, used literally, without Hydra's grammar.
    """
    with _COMPOSING:
        outer = GlobalHydra.instance().hydra  # the state of a caller that uses Hydra itself
        GlobalHydra.instance().hydra = None
        try:
            with initialize_config_dir(str(CONF), version_base="1.3"):
                quoted = [
                    _quote(override) if override.startswith(REVISION) else override for override in checked(overrides)
                ]
                config = compose("config", overrides=quoted)
        except CONFIG_ERRORS as error:
            raise UserError(explain(error)) from error
        finally:
            GlobalHydra.instance().hydra = outer
    for key, text in (texts or {}).items():
        OmegaConf.update(config, key, _literal(text))
    return to_run_config(config)


def replayed(arguments: list[str]) -> tuple[RunConfig, Replay] | None:
    """Return the run of `--replay FOLDER`, None for other arguments. Raises UserError as `replay_of`, and for a config
    that no run has written."""
    replay = replay_of(arguments)
    return None if replay is None else (saved_run(replay.folder), replay)


def saved_run(folder: Path) -> RunConfig:
    """Return the config that a run has saved in its folder. Raises UserError for any other config."""
    file, remedy = folder / "config.yaml", "give the folder of a run, which has a config.yaml"
    if not file.is_file():
        raise UserError(f"{folder} has no config.yaml: {remedy}")
    try:
        config = OmegaConf.load(file)
    except CONFIG_ERRORS as error:
        raise UserError(f"{file} cannot be read ({explain(error)}): {remedy}") from error
    if not isinstance(config, DictConfig) or config.pop("defaults", None) != SAVED_DEFAULTS or "task" not in config:
        raise UserError(f"{file} is not the config that a run has written: {remedy}")
    config.pop("hydra", None)
    return to_run_config(config)


def dump(run: RunConfig, output_dir: Path) -> str:
    """Return the resolved config as YAML.

    `python run.py --config-path FOLDER` repeats the run in a folder next to `output_dir`.
    """
    composed = {
        "defaults": SAVED_DEFAULTS,
        "hydra": {
            "run": {"dir": f"{output_dir.parent}/${{now:%Y-%m-%d_%H-%M-%S-%f}}"},
            "sweep": {"dir": "${outputs:multirun}/${now:%Y-%m-%d_%H-%M-%S-%f}"},
            "callbacks": {"sweep": {"_target_": "conf.callbacks.KnownSweep"}},
            "output_subdir": None,
            "job": {"chdir": False},
        },
    }
    plain = _plain(asdict(as_saved(run)))
    header = f"# Run again: python run.py --config-path {output_dir}\n"
    return header + OmegaConf.to_yaml(OmegaConf.create({**composed, **plain}))


def _plain(value: Any) -> Any:
    """Return the value with enums as names, and with escaped texts that look like interpolations."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return _literal(value) if isinstance(value, str) else value


def _literal(text: str) -> str:
    """Escape a text so that OmegaConf reads no interpolation in it. A backslash is special only before `${`.

    U+0085 becomes an interpolation, because YAML reads it as a line break and folds it into a space.
    """
    return re.sub(r"(\\*)(\$\{|\x85)", lambda m: m[1] * 2 + ("\\${" if m[2] == "${" else "${next_line:}"), text)


def quote_prompt(arguments: list[str]) -> list[str]:
    """Quote the values of `predict.data`, `predict.resume`, `model.revision` and `sweep.select` for Hydra's grammar.

    Users can then type them without quotes of their own. In a sweep (-m) a comma also separates jobs. `predict.data` is
    then quoted only if it is a single prompt.
    """
    arguments = [_quote(a) if a.startswith(SELECT) else a for a in arguments]
    if {"-m", "--multirun"} & set(arguments):
        arguments = [_quote(a) if a.startswith(REVISION) and "," not in a else a for a in arguments]
        return [_quote(a) if a.startswith(DATA) and _is_one_prompt(a.removeprefix(DATA)) else a for a in arguments]
    return [_quote(a) if a.startswith((DATA, RESUME, REVISION)) else a for a in arguments]


def _is_one_prompt(value: str) -> bool:
    """Whether a sweep's value is a single prompt, with any commas in it.

    A value with white space is a single prompt, unless it is Hydra syntax or names a file. For ambiguous commas, print
    the chosen meaning and how to select the other meaning.
    """
    parts = [os.path.expanduser(part.strip()) for part in value.split(",")]
    if HYDRAS_OWN.fullmatch(value) or (len(parts) > 1 and any(map(os.path.isfile, parts))):
        return False
    is_single = len(parts) == 1 or re.search(r"\s", value) is not None
    if is_single and len(parts) > 1:
        print(
            'predict.data is one prompt with commas in it: for several, quote each: \'"first","second"\'',
            file=sys.stderr,
        )
    elif not is_single:
        jobs = f"predict.data has {len(parts)} values, a job for each"
        print(f"{jobs}: for one prompt with commas in it, quote it twice: \"'{value}'\"", file=sys.stderr)
    return is_single


def saved_config(arguments: list[str]) -> list[str]:
    """Add `--config-path FOLDER` for `predict.resume=FOLDER`, if neither prompts nor group options are given."""
    named = [a for a in arguments if a.startswith(RESUME) and a not in (f"{RESUME}auto", f"{RESUME}none")]
    keys = [argument.partition("=")[0] for argument in arguments]
    if len(named) != 1 or "predict.data" in keys or any("." not in key for key in keys):
        return arguments
    folder = Path(named[0].removeprefix(RESUME)).expanduser().absolute()
    return ["--config-path", str(folder), *arguments] if (folder / "config.yaml").is_file() else arguments


def options_over_saved(arguments: list[str]) -> list[str]:
    """Apply the options of groups over a saved config, which sets all other keys.

    `--config-path FOLDER` names the folder of the saved config. A relative folder is relative to the working directory.
    Raises UserError if the folder does not exist.
    """
    folder, other_arguments = _folder_flag(arguments, "-cp", "--config-path")
    if folder is None:
        return arguments
    if not folder.is_dir():
        raise UserError(f"--config-path={folder} is no folder: give the folder of a run, which has a config.yaml")
    file = folder / "config.yaml"
    chosen = {key for argument in other_arguments if options(key := argument.partition("=")[0])}
    saved = cast(DictConfig, OmegaConf.load(file)) if chosen and file.is_file() else OmegaConf.create()
    # There is nothing to replace, or the config has groups of its own.
    if OmegaConf.select(saved, "defaults") != SAVED_DEFAULTS:
        return ["--config-path", str(folder), *other_arguments]
    if "experiment" in chosen:
        raise UserError("experiment= does not go with a saved config: give the options and values of the experiment")
    # Use the data of the saved task, not of the option file.
    if f"task={saved.task}" in other_arguments:
        other_arguments.remove(f"task={saved.task}")
        chosen.remove("task")
    # Before _self_, so that the saved section overrides the data of the option file.
    task: list[dict[str, str]] = []
    if "task" in chosen:
        chosen.remove("task")
        # Before the task, because task=serve chooses a decode option. The saved values override it.
        if "decode" not in chosen:
            task.append({"decode": options("decode")[0]})
        task.append({"task": saved.task})  # any option; the argument replaces it
        # Only the saved task's section has values. A sweep keeps it if one of its jobs is that task.
        for section in options("task"):
            if section != saved.task or section not in swept_tasks(other_arguments):
                _drop_section(saved, section)
        del saved["task"]
    for group in chosen:
        for file in (CONF / group).glob("*.yaml"):
            for name in OmegaConf.load(file):
                saved[group].pop(name, None)
    # Any option of each group; the argument replaces it.
    groups = [{group: options(group)[0]} for group in sorted(chosen)]
    saved.defaults = [SAVED_DEFAULTS[0], *task, SAVED_DEFAULTS[1], *groups, *SAVED_DEFAULTS[2:]]
    ConfigStore.instance().store("saved", saved)
    return ["--config-name", "saved", *other_arguments]


def _folder_flag(arguments: list[str], short: str, flag: str) -> tuple[Path | None, list[str]]:
    folder, other_arguments, remaining = None, [], iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name == short or (name.startswith(flag[: len("--config-p")]) and flag.startswith(name)):
            folder = value if equals else next(remaining, "")
        else:
            other_arguments.append(argument)
    return (None if folder is None else Path(folder).expanduser().absolute()), other_arguments


def _quote(argument: str) -> str:
    key, value = argument.split("=", 1)
    if value == "null" or re.fullmatch(r"""(['"])((?!\1)[^\\]|\\.)*\1""", value, re.DOTALL):
        return argument
    # Hydra, too, treats a backslash as special only before a quote.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", _literal(value))
    escaped = re.sub(r"(\\+)\Z", r"\1\1", escaped)
    return f"{key}='{escaped}'"
