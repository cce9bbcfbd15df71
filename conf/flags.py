"""Command line flags: checks for -m, and the position of flags that Hydra's parser needs."""

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from conf.errors import UserError, list_known_names
from conf.selection import KEY, parse_selection

DATA = "predict.data="
SELECT = f"{KEY}="
HOME = re.compile(r"(?<=[=,])~(?=/)")
LAUNCHER = "hydra/launcher="
SLURM = f"{LAUNCHER}submitit_slurm"
NO_SWEEP = "task=serve runs until it is ended, so it is no job of a sweep: leave out -m"
REPLAY, ALLOW = "--replay", "--allow"
DIFFERENCES = ("package", "processor", "file")  # of a run's lock, which --allow names
INFO = ("--info", "-i")  # the value is optional
FLAGS_WITH_VALUE = (
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
) + ("--experimental-rerun",)


class Replay(NamedTuple):
    folder: Path
    allowed: frozenset[str]
    """Of DIFFERENCES."""


def replay_of(arguments: list[str]) -> Replay | None:
    """Return what `--replay FOLDER [--allow=package,processor,file]` names; None for other arguments.

    Raises UserError for a missing folder, an unknown difference, and further arguments.
    """
    values: dict[str, str] = {}
    remaining, others = list(arguments), list[str]()
    while remaining:
        name, equals, value = (argument := remaining.pop(0)).partition("=")
        if name not in (REPLAY, ALLOW):
            others.append(argument)
        else:
            has_next = bool(remaining) and not remaining[0].startswith("-")
            values[name] = remaining.pop(0) if has_next and not equals else value
    if not values:
        return None
    if not values.get(REPLAY):
        raise UserError("--allow and --replay need the folder of a run: give --replay FOLDER --allow=package,processor")
    if others:
        remedy = "leave it out, or repeat the run with other settings by --config-path FOLDER"
        raise UserError(f"{others[0]} is not used by --replay, which changes no setting: {remedy}")
    allowed = [name.strip() for name in values[ALLOW].split(",")] if ALLOW in values else []
    for name in allowed:
        if name not in DIFFERENCES:
            raise UserError(f"--allow={name} does not exist: {list_known_names(DIFFERENCES, name)}")
    return Replay(Path(values[REPLAY]).expanduser().absolute(), frozenset(allowed))


def flags_first(arguments: list[str]) -> list[str]:
    """Move the flags, with their values, to the front.

    Hydra accepts them before or after the overrides, but not between.
    """
    flags, overrides, remaining = list[str](), list[str](), list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        takes_value = argument in FLAGS_WITH_VALUE or (argument in INFO and bool(remaining) and "=" not in remaining[0])
        flags.append(argument if takes_value or argument not in INFO else "--info=all")
        flags += [remaining.pop(0)] if takes_value and remaining else []
    flag_names = {flag.partition("=")[0] for flag in flags}
    if "--resolve" in flags and not flag_names & {"--help", "-h", "--cfg", "-c"}:
        raise UserError("--resolve shows a config with its references resolved: give --cfg job --resolve")
    return flags + overrides


def with_home(arguments: list[str]) -> list[str]:
    """Expand `~/` at the start of a value: shells do not after KEY=, and Hydra's grammar does not allow `~` there."""
    return [a if a.startswith(DATA) or set(a) & set("'\"") else HOME.sub(os.path.expanduser("~"), a) for a in arguments]


def check_sweep(arguments: list[str]) -> None:
    """Raise UserError for arguments that do not fit a sweep or need a sweep, and for Slurm's launcher without Slurm."""
    is_sweep = bool({"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments))
    if is_sweep and any(re.fullmatch(r"task=(.*,)?serve(,.*)?", a) for a in arguments):
        raise UserError(NO_SWEEP)
    if is_sweep and any(re.fullmatch(r"predict\.output_file=(?!null$)[^,()]+", a) for a in arguments):
        raise UserError("predict.output_file is one file, which each job of a sweep would replace: leave it out")
    for text in (a.removeprefix(SELECT).strip("'\"") for a in arguments if a.startswith(SELECT)):
        if text != "null":
            parse_selection(text)  # before the first job: a typing mistake costs no sweep
    if not is_sweep and "task=export,predict" in arguments:
        raise UserError("task=export,predict is two tasks: give predict.export=true, which exports and then predicts")
    launchers = [a for a in arguments if a.startswith(LAUNCHER)]
    if launchers and not is_sweep:
        raise UserError(f"{launchers[0]} is not used by a run alone: leave it out, or give -m for a sweep")
    if SLURM in launchers and shutil.which("srun") is None:
        remedy = f"start the sweep on a machine of the cluster, or give {LAUNCHER}submitit_local"
        raise UserError(f"{SLURM} needs Slurm, and there is no srun here: {remedy}")
