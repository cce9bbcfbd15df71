"""score, chat and serve on ranks and on stages: the output of one process, byte by byte, and a server that outlives a
rank. Real processes."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kernels import build
from tests.helpers.command import run
from tests.helpers.embedding_models import write_qwen3_embedding, write_qwen3_reranker, write_reward_model
from tests.helpers.processes import engines, processes
from tests.helpers.rank_runs import are_gone
from tests.helpers.server import ended, served
from tests.helpers.soft_prefixes import write_paddle
from tests.helpers.waiting import LIMIT_S, until

pytestmark = [pytest.mark.long, pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")]

TP = ("parallel=tp", "parallel.tp=2")
PP = ("parallel=pp", "parallel.pp=2")
parallel_layouts = pytest.mark.parametrize("how", [TP, pytest.param(PP, marks=pytest.mark.matrix)], ids=["tp", "pp"])
BODY = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 24, "logprobs": 2}
PAIRS = [{"query": "Who?", "document": "The owl."}, {"query": "a", "document": "b c d"}]
ENDLESS = BODY | {"max_tokens": 900, "ignore_eos": True, "stream": True}


def both(
    tmp_path: Path, how: tuple[str, ...], *arguments: str, **options: Any
) -> list[tuple[subprocess.CompletedProcess[str], Path]]:
    """Return the run of one process and of two ranks in this layout, each with its folder."""
    results = []
    for name, parallel in (("alone", ()), ("divided", how)):
        folder = tmp_path / name
        results.append((run("device=cpu", *arguments, *parallel, f"hydra.run.dir={folder}", **options), folder))
        assert results[-1][0].returncode == 0, results[-1][0].stderr
    return results


def ranks_of(engine: int) -> list[int]:
    known = processes().items()
    return [pid for pid, (parent, command) in known if parent == engine and "loading.worker" in command]


@pytest.mark.parametrize(
    ("write", "rows", "how"),
    [
        (write_reward_model, [{"prompt": "hello"}, {"prompt": "the owl is happy"}], TP),
        (write_qwen3_reranker, PAIRS, PP),
        pytest.param(write_qwen3_embedding, PAIRS, TP, marks=pytest.mark.long),
    ],
    ids=["reward model, tp", "reranker, pp", "embedding model, tp"],
)
def test_scores(tmp_path: Path, write: Callable[[Path], Any], rows: list[dict[str, str]], how: tuple[str, ...]) -> None:
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    write(model)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (_, alone), (_, divided) = both(tmp_path, how, "task=score", f"model.path={model}", f"predict.data={data}")
    scores = (alone / "scores.jsonl").read_bytes()
    assert scores == (divided / "scores.jsonl").read_bytes()
    assert [json.loads(line)["error"] for line in scores.splitlines()] == [None, None]


@parallel_layouts
def test_a_conversation(tmp_path: Path, how: tuple[str, ...]) -> None:
    asked = ("task=chat", "decode=sampling", "decode.seed=3", "decode.max_new_tokens=20")
    (alone, _), (divided, _) = both(tmp_path, how, *asked, stdin="Who?\nAnd then?\n")
    assert divided.stdout == alone.stdout
    assert len(alone.stdout.splitlines()) == 2


def answers(url: str) -> list[Any]:
    """Return greedy, seeded and multiple answers, with and without a prefix: texts with log probabilities, and
    fingerprints."""
    asked: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 5}]
    asked += [{"temperature": 1.0, "seed": 6, "n": 2}, {"temperature": 0, "model": "story"}]
    bodies = [httpx.post(f"{url}/v1/completions", json=BODY | fields, timeout=LIMIT_S).json() for fields in asked]
    return [(body["choices"], body["system_fingerprint"], body["usage"]["completion_tokens"]) for body in bodies]


@parallel_layouts
def test_a_server_answers_alike_and_comes_back_after_the_loss_of_a_rank(tmp_path: Path, how: tuple[str, ...]) -> None:
    write_paddle(tmp_path / "story.npy", 21, num_layers=4, channels=64)
    prefixes = f"model.prefixes={{story:{tmp_path / 'story.npy'}}}"
    with served(tmp_path / "alone", prefixes) as (_, url):
        expected = answers(url)
    assert expected[0][0] != expected[3][0]
    with served(tmp_path / "divided", prefixes, *how) as (process, url):
        assert answers(url) == expected
        for busy in (True, False):
            (engine,) = engines()
            (rank,) = ranks_of(engine)
            if busy:
                with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=LIMIT_S) as response:
                    lines = response.iter_lines()
                    assert next(lines).startswith("data: ")
                    os.kill(rank, signal.SIGKILL)
                    last = [line for line in lines if line.startswith("data: ")][-1]
                assert "ended with exit code 1: send the request again" in last
            else:
                os.kill(rank, signal.SIGKILL)
            until(lambda engine=engine: list(engines()) not in ([], [engine]))  # type: ignore[misc]
            until(lambda: httpx.get(f"{url}/ready").status_code == 200)
            assert not {rank, engine} & processes().keys()
            assert answers(url) == expected
        (engine,) = engines()
        (rank,) = ranks_of(engine)
        code, errors = ended(process)
    assert code == 0
    assert not {rank, engine} & processes().keys()
    lost = [line for line in errors.splitlines() if line.startswith("error: rank 1 (process ")]
    assert len(lost) == 2
    assert all("was ended by signal 9 (SIGKILL, out of memory?)" in line for line in lost)


def test_ranks_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with served(tmp_path / "run", *TP) as (process, _):
        (engine,) = engines()
        (rank,) = ranks_of(engine)
        process.kill()
    until(lambda: are_gone([engine, rank]))
