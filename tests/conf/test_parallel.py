"""Settings of several ranks: what they take, and what is refused beside them."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from conf.compose import compose_run_config, from_json
from conf.errors import UserError
from pipelines.fingerprint import plain

TP = ["parallel=tp", "parallel.tp=2"]


def test_a_config_crosses_a_socket_as_json() -> None:
    run = compose_run_config([*TP, "quant=int4", "decode=sampling", "quant.overrides={a.b:{scheme:int8}}"])
    run = replace(run, predict=replace(run.predict, data="${a} \\ \x85 b"))
    assert from_json(plain(asdict(run))) == run


REFUSED: dict[str, list[str]] = {
    "parallel.tp=2 is not used by parallel=single: leave it at null, or give parallel=tp": ["parallel.tp=2"],
    "parallel.tp=1 is not allowed: give a number from 2 to 512, or null": ["parallel=tp", "parallel.tp=1"],
    "parallel.heartbeat_s=1.0 is not allowed: give a number from 5 on": [*TP, "parallel.heartbeat_s=1"],
    "task=serve does not work with parallel=tp: leave one of them out": [*TP, "task=serve"],
    "task=convert does not work with parallel=tp": [*TP, "task=convert", "convert.output=out"],
    "decode.speculate=model does not work with parallel=tp": [*TP, "decode.speculate=model"],
    "model.adapters does not work with parallel=tp": [*TP, "model.adapters={a: b}"],
    "model.keep_packed=true does not work with parallel=tp": [*TP, "model.keep_packed=true"],
    "device=cuda does not work with parallel=tp": [*TP, "device=cuda"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_ranks_do_not_do_is_one_line(message: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_run_config(REFUSED[message])
    assert str(caught.value).startswith(message)


def test_drafts_that_need_no_model_go_with_ranks() -> None:
    run: Any = compose_run_config([*TP, "decode.speculate=ngram"])
    assert (run.parallel.mode.name, run.parallel.tp) == ("tp", 2)
