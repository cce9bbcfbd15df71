"""Where ranks come from, which cores they have, and what crosses their sockets."""

import os
import socket

import pytest

from conf.errors import UserError
from conf.schema import ModelConfig, ParallelConfig, ParallelMode, RunConfig
from pipelines.ranks.launch import Joined, _cores, cores_of_ranks, joined, num_ranks
from pipelines.ranks.messages import LENGTHS, Channel, Gone

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "9", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3"}


def test_places_of_launchers() -> None:
    assert joined({}) is None
    assert joined({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) is None
    assert joined(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert joined(TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}) is None
    assert joined(TORCHRUN) == Joined("torchrun", 1, 4, "x-9-")
    assert joined(SRUN) == Joined("srun", 1, 2, "7-3")


@pytest.mark.parametrize("environment", [TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, SRUN | {"SLURM_STEP_NUM_NODES": "2"}])
def test_several_machines_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UserError, match="on several machines: start all of them on one"):
        joined(environment)


def run_of(tp: int | None, mode: ParallelMode = ParallelMode.tp) -> RunConfig:
    return RunConfig(model=ModelConfig(path="x"), parallel=ParallelConfig(mode, tp=tp))


def test_numbers_of_ranks() -> None:
    place = joined(TORCHRUN)
    assert num_ranks(run_of(None, ParallelMode.single), None) == 1
    assert num_ranks(run_of(3), None) == 3
    assert num_ranks(run_of(None), place) == num_ranks(run_of(4), place) == 4
    with pytest.raises(UserError, match="parallel.tp is missing"):
        num_ranks(run_of(None), None)
    with pytest.raises(UserError, match="torchrun started 4 processes, but parallel=single has 1: give parallel=tp"):
        num_ranks(run_of(None, ParallelMode.single), place)


def test_ranks_have_cores_of_their_own_node_by_node() -> None:
    """Four cores of two threads, as x86 numbers them; the even cores are on the second node."""
    found = _cores({0, 1, 2, 3, 4, 5, 7}, lambda cpu: {cpu % 4, cpu % 4 + 4}, lambda cpu: 1 - cpu % 2)
    assert found == [{1, 5}, {3, 7}, {0, 4}, {2}]


def test_ranks_share_cores_where_there_are_too_few() -> None:
    allowed = os.sched_getaffinity(0)
    (whole,) = cores_of_ranks(1, allowed)
    assert whole == allowed
    many = cores_of_ranks(len(allowed) + 1, allowed)
    assert len(many) == len(allowed) + 1
    assert all(each and each <= allowed for each in many)


def test_messages_arrive_whole_and_others_are_refused() -> None:
    pair = socket.socketpair()
    ours, theirs = map(Channel, pair)
    ours.send({"op": "run", "text": "é"}, b"\0\1\2")
    ours.send({})
    assert theirs.receive() == ({"op": "run", "text": "é"}, b"\0\1\2")
    assert theirs.receive() == ({}, b"")
    for content in (b"[]", b"{", b"\xff"):
        pair[0].sendall(LENGTHS.pack(len(content), 0) + content)
        with pytest.raises(Gone):
            theirs.receive()
    pair[0].sendall(LENGTHS.pack(1 << 30, 0))
    with pytest.raises(Gone):
        theirs.receive()
    ours.close()
    with pytest.raises(Gone):
        theirs.receive()
    with pytest.raises(Gone):
        ours.send({})
