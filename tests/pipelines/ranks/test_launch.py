"""How ranks are started, how many there are, and which cores they use."""

import os
import signal

import pytest

from conf.errors import UserError
from conf.schema import Backend, ParallelConfig, ParallelMode
from pipelines.ranks.launch import (
    Joined,
    _cores,
    backend_of,
    bound,
    check_gpus,
    cores_of_ranks,
    degrees,
    first_host,
    gpu_of,
    joined,
    leave_launcher,
    refuse_launched_server,
    spawn,
)
from tests.helpers.launchers import SRUN, TORCHRUN

TWO_NODES = TORCHRUN | {"RANK": "3", "LOCAL_WORLD_SIZE": "2"}


def test_places_of_launchers() -> None:
    assert joined({}) is None
    assert joined({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) is None
    assert joined({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) is None
    assert joined(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert joined(TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}) is None
    assert joined(TORCHRUN) == Joined("torchrun", 1, 4, "x-9-", 1, 4)
    assert joined(SRUN) == Joined("srun", 1, 2, "7-3", 1, 2)


def test_places_on_several_machines() -> None:
    assert joined(TWO_NODES) == Joined("torchrun", 3, 4, "x-9-", 1, 2, ("first", 10))
    nodes = {"SLURM_STEP_NODELIST": "n[03-04,9],m", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NUM_TASKS": "5"}
    last = {"SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}
    assert joined(SRUN | nodes) == Joined("srun", 1, 5, "7-3", 1, 2, ("n03", 20_010))
    assert joined(SRUN | nodes | last) == Joined("srun", 4, 5, "7-3", 0, 1, ("n03", 20_010))


def test_a_port_without_a_next_one() -> None:
    assert joined(TORCHRUN | {"MASTER_PORT": "65535"}) == Joined("torchrun", 1, 4, "x-65535-", 1, 4)
    with pytest.raises(UserError, match=r"^--master-port=65535 of torchrun has no next port, .*: give a smaller one$"):
        joined(TWO_NODES | {"MASTER_PORT": "65535"})


@pytest.mark.parametrize(
    ("environment", "mark", "problem"),
    [
        ({"TORCHELASTIC_RUN_ID": "x"}, "TORCHELASTIC_RUN_ID", "RANK is missing"),
        (TORCHRUN | {"RANK": ""}, "TORCHELASTIC_RUN_ID", "invalid literal .* ''"),
        (TORCHRUN | {"RANK": "4"}, "TORCHELASTIC_RUN_ID", "rank 4 of 4, rank 1 of 4 here"),
        (TWO_NODES | {"LOCAL_RANK": "2"}, "TORCHELASTIC_RUN_ID", "rank 3 of 4, rank 2 of 2 here"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID is missing"),
        ({"SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS", "invalid literal .* ''"),
        (SRUN | {"SLURM_NODEID": "1"}, "SLURM_STEP_NUM_TASKS", "list index out of range"),
    ],
)
def test_variables_that_no_launcher_sets_so_are_one_line(environment: dict[str, str], mark: str, problem: str) -> None:
    launcher = "srun" if mark in SRUN else "torchrun"
    wrong = rf"other variables of {launcher} are not as it sets them \({problem}\)"
    with pytest.raises(UserError, match=rf"^{mark} is set, but {wrong}: start it by {launcher}, or unset {mark}$"):
        joined(environment)


def test_who_leaves_a_launcher_starts_its_ranks_itself() -> None:
    for environment in (TORCHRUN, SRUN, TORCHRUN | SRUN, {}):
        left = dict(environment)
        leave_launcher(left)
        assert joined(left) is None


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_does_not_end_a_rank_that_begins(number: signal.Signals) -> None:
    """A terminal sends it to all ranks, and rank 0 answers, also if the other ranks do not yet ignore it."""
    (rank,) = spawn(2)
    assert rank.process is not None
    os.kill(rank.pid, number)
    rank.channel.close()
    assert rank.process.wait(60) in (0, 1)  # by itself: its socket is closed


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("a-1,b", "a-1"),
        ("n[1-3]", "n1"),
        ("n[007,9]", "n007"),
        ("n[5]x,m", "n5x"),
        ("m,n[1-3]", "m"),
        ("r[1-2]n[03-9]-x,m", "r1n03-x"),
    ],
)
def test_the_first_host_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_the_backend_depends_on_devices_machines_and_tp() -> None:
    near, far = joined(TORCHRUN), joined(TWO_NODES)

    def used(backend: Backend, place: Joined | None, tp: int = 1, num_gpus: int = 0) -> Backend:
        return backend_of(backend, place, tp, num_gpus)

    auto, shared_memory, gloo, nccl = Backend
    assert {used(requested, place, 2) for requested in (auto, shared_memory) for place in (None, near)} == {
        shared_memory
    }
    assert {used(auto, place, 2, 4) for place in (None, near)} == {used(auto, far, 1, 4)} == {nccl}
    assert {used(gloo, place, 2, num_gpus) for place in (None, near, far) for num_gpus in (0, 1)} == {gloo}
    assert used(nccl, far, 2, 4) is nccl
    assert used(auto, far) is gloo
    with pytest.raises(
        UserError, match="backend=shared_memory is of one machine, but torchrun started 4 ranks on several"
    ):
        used(shared_memory, far)
    with pytest.raises(UserError, match="nccl is of GPUs, but this run has device=cpu: leave it out"):
        used(nccl, None)
    with pytest.raises(UserError, match="shared_memory is of CPUs, but this run has device=cuda: leave it out"):
        used(shared_memory, None, num_gpus=1)
    for num_gpus, over in ((0, "gloo"), (8, "nccl")):
        wrong = "parallel.tp=2 exchanges numbers several times in each layer: give parallel=pp"
        with pytest.raises(UserError, match=rf"{wrong}, .* or parallel.backend={over} for all of it over the network"):
            used(auto, far, 2, num_gpus)


def test_each_rank_has_a_gpu() -> None:
    check_gpus(2, 2)
    with pytest.raises(
        UserError, match="^3 ranks want a GPU each, but torch sees 2 here: give fewer ranks, or parallel.backend=gloo"
    ):
        check_gpus(3, 2)
    assert [gpu_of(rank, 2, None) for rank in range(3)] == ["0", "1", "0"]
    assert [gpu_of(rank, 2, "5, GPU-1f") for rank in range(3)] == ["5", "GPU-1f", "5"]
    assert gpu_of(3, 1, "7") == "7"  # a launcher has given it to this process


def ranks_of(tp: int | None, mode: ParallelMode = ParallelMode.tp, pp: int | None = None) -> ParallelConfig:
    return ParallelConfig(mode, tp=tp, pp=pp)


def test_numbers_of_ranks() -> None:
    place = joined(TORCHRUN)
    tp_pp = ranks_of(2, ParallelMode.tp_pp, 3)
    assert degrees(ranks_of(None, ParallelMode.single), None) == (1, 1)
    assert degrees(ranks_of(3), None) == (3, 1)
    assert degrees(ranks_of(None, ParallelMode.pp, 3), None) == (1, 3)
    assert degrees(ranks_of(None), place) == degrees(ranks_of(4), place) == (4, 1)
    assert degrees(ranks_of(None, ParallelMode.pp), place) == (1, 4)
    assert degrees(tp_pp, None) == (2, 3)
    assert degrees(ranks_of(None), None) == (2, 1)
    assert degrees(ranks_of(None, ParallelMode.pp), None) == (1, 2)
    assert (
        degrees(ranks_of(2, ParallelMode.tp_pp), place) == degrees(ranks_of(None, ParallelMode.tp_pp), None) == (2, 2)
    )
    with pytest.raises(
        UserError, match=r"started 4 processes, but parallel.tp=2 parallel.pp=3 has 6: give .*, or start 6"
    ):
        degrees(tp_pp, place)
    with pytest.raises(UserError, match="torchrun started 4 processes, but parallel=single has 1: give parallel=tp"):
        degrees(ranks_of(None, ParallelMode.single), place)
    with pytest.raises(UserError, match="parallel=single has 1: give parallel=pp parallel.pp=4, or start 1"):
        degrees(ranks_of(None, ParallelMode.single), joined(TWO_NODES))


def test_a_server_starts_its_ranks_itself() -> None:
    refuse_launched_server(None)
    with pytest.raises(UserError, match="which torchrun cannot start again: run it without torchrun"):
        refuse_launched_server(joined(TORCHRUN))


def test_ranks_have_cores_of_their_own_node_by_node() -> None:
    """Four cores of two threads, as x86 numbers them; the even cores are on the second node."""
    cores = _cores({0, 1, 2, 3, 4, 5, 7}, lambda cpu: {cpu % 4, cpu % 4 + 4}, lambda cpu: 1 - cpu % 2)
    assert cores == [{1, 5}, {3, 7}, {0, 4}, {2}]


def test_who_is_bound_to_processors_has_no_others_to_divide_them_with() -> None:
    both = [{0, 1}, {0, 1}]
    assert bound([(None, cpus) for cpus in both]) == [False, False]
    assert bound(list(zip("ab", both, strict=True))) == [True, True]
    assert bound([(None, {0, 1}), (None, {2, 3}), (None, {3})]) == [True, False, False]


def test_ranks_share_cores_where_there_are_too_few() -> None:
    allowed = os.sched_getaffinity(0)
    (all_cores,) = cores_of_ranks(1, allowed)
    assert all_cores == allowed
    many = cores_of_ranks(len(allowed) + 1, allowed)
    assert len(many) == len(allowed) + 1
    assert all(cores and cores <= allowed for cores in many)
