"""Flags of the command line, such as --cfg job, which Hydra takes only before or after the overrides."""

import os
import re

from conf.errors import UserError

DATA = "predict.data="
HOME = re.compile(r"(?<=[=,])~(?=/)")
INFO = ("--info", "-i")  # whose value may be left out
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


def flags_first(arguments: list[str]) -> list[str]:
    """Move the flags, with their values, to the front. Hydra takes them before or after the overrides, but not between them."""
    flags, overrides, rest = list[str](), list[str](), list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        takes_value = argument in FLAGS_WITH_VALUE or (argument in INFO and bool(rest) and "=" not in rest[0])
        flags.append(argument if takes_value or argument not in INFO else "--info=all")
        flags += [rest.pop(0)] if takes_value and rest else []
    shown = {flag.partition("=")[0] for flag in flags}
    if "--resolve" in flags and not shown & {"--help", "-h", "--cfg", "-c"}:
        raise UserError("--resolve shows a config with its references resolved: give --cfg job --resolve")
    return flags + overrides


def with_home(arguments: list[str]) -> list[str]:
    """Put the home folder in the place of `~/` where a value begins: no shell does after KEY=, and Hydra's grammar has no `~` there."""
    return [a if a.startswith(DATA) or set(a) & set("'\"") else HOME.sub(os.path.expanduser("~"), a) for a in arguments]
