"""Settings of several ranks: accepted values, and settings that they contradict."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from conf.compose import compose_run_config, from_json
from conf.errors import UserError
from conf.schema import RunConfig
from pipelines.loading.fingerprint import plain
from tests.helpers.cases import each

TP = ["parallel=tp", "parallel.tp=2"]


def test_a_config_crosses_a_socket_as_json() -> None:
    run = compose_run_config([*TP, "quant=int4", "decode=sampling", "quant.overrides={a.b:{scheme:int8}}"])
    run = replace(run, predict=replace(run.predict, data="${a} \\ \x85 b"))
    assert from_json(RunConfig, plain(asdict(run))) == run


REFUSED: dict[str, list[str]] = {
    "parallel.tp=2 is not used by parallel=single: leave it at null, or give parallel=tp": ["parallel.tp=2"],
    "parallel.tp=1 is not allowed: give a number from 2 to 512, or null": ["parallel=tp", "parallel.tp=1"],
    "parallel.heartbeat_s=1.0 is not allowed: give a finite number from 5": [*TP, "parallel.heartbeat_s=1"],
    "parallel.backend=gloo is not used by parallel=single: leave it at auto, or give parallel=tp": [
        "parallel.backend=gloo"
    ],
    "parallel.sum=reduce is not used by parallel=single: leave it at gather, or give parallel=tp": [
        "parallel.sum=reduce"
    ],
    "parallel.sum=reduce is not used by parallel=pp: leave it at gather": ["parallel=pp", "parallel.sum=reduce"],
    "parallel.experts=whole is not used by parallel=pp: leave it at split": ["parallel=pp", "parallel.experts=whole"],
    "parallel.sum=reduce is of ranks, which parallel=ray has with parallel.tp: give parallel.tp too, or leave it out": [
        "parallel=ray",
        "parallel.sum=reduce",
    ],
    "Error merging override parallel.sum=add Invalid value 'add', expected one of [gather, reduce]": [
        *TP,
        "parallel.sum=add",
    ],
    "Error merging override parallel.experts=none Invalid value 'none', expected one of [split, whole]": [
        *TP,
        "parallel.experts=none",
    ],
    "task=convert does not work with parallel=tp: leave one of them out": [*TP, "task=convert", "convert.output=out"],
    "task=prefix does not work with parallel=tp": [*TP, "task=prefix"],
    "parallel.sum=reduce is not allowed with task=quantize, which chooses scales to the bits of one process": [
        *TP,
        "task=quantize",
        "parallel.sum=reduce",
    ],
    "parallel.experts=whole is not allowed with task=quantize": [*TP, "task=quantize", "parallel.experts=whole"],
    "parallel=ray is not used by task=quantize: leave it out": ["parallel=ray", "task=quantize"],
    "parallel.replicas=2 is not used by parallel=tp": [*TP, "task=quantize", "parallel.replicas=2"],
    "parallel.pp=2 is not used by parallel=tp: leave it at null, or give parallel=pp": [*TP, "parallel.pp=2"],
    "parallel.tp=2 is not used by parallel=pp: leave it at null, or give parallel=tp": ["parallel=pp", "parallel.tp=2"],
    "parallel.pp=1 is not allowed: give a number from 2 to 512, or null": ["parallel=pp", "parallel.pp=1"],
    "task=prefix does not work with parallel=pp": ["parallel=pp", "task=prefix"],
}


@pytest.mark.long
@each("message", REFUSED)
def test_options_that_ranks_do_not_support_are_refused_in_one_line(message: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_run_config(REFUSED[message])
    assert str(caught.value).startswith(message)


@each("setting", ["decode.speculate=model", "model.adapters={a: b}", "model.keep_packed=true", "device=cuda"])
def test_options_that_ranks_support_compose(setting: str) -> None:
    run: Any = compose_run_config([*TP, setting])
    assert (run.parallel.mode.name, run.parallel.tp) == ("tp", 2)
