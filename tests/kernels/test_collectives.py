"""Collectives of ranks that are threads, compared with slices of one process's tensor."""

import threading

import pytest
import torch

from kernels.collectives import Alone, RankFailed, Threads
from tests.helpers.cases import each
from tests.helpers.rank_threads import run_ranks

WIDTHS = [(3, 5), (1, 2, 4), (0, 4, 0, 3)]


def slices(widths: tuple[int, ...]) -> list[slice]:
    return [slice(sum(widths[:i]), sum(widths[: i + 1])) for i in range(len(widths))]


@each("widths", WIDTHS)
@each("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_concatenated_pieces_are_the_tensor(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randint(-100, 100, (7, sum(widths))).to(dtype)
    pieces = slices(widths)
    for gathered in run_ranks(len(widths), lambda group: group.gather(tensor[:, pieces[group.rank]], widths)):
        assert gathered.dtype == dtype
        assert gathered.equal(tensor)


def test_the_first_rank_alone_gets_the_whole() -> None:
    tensor, widths = torch.randn(4, 6), (1, 3, 2)
    results = run_ranks(3, lambda group: group.gather_first(tensor[:, slices(widths)[group.rank]], widths))
    assert results[0] is not None
    assert results[0].equal(tensor)
    assert results[1:] == [None, None]


def test_a_row_is_its_owners() -> None:
    rows, owners = torch.randn(3, 5, 4), torch.tensor([2, 0, 1, 1, 2])
    for selected in run_ranks(3, lambda group: group.owned_rows(rows[group.rank], owners)):
        assert selected.equal(torch.stack([rows[owner, row] for row, owner in enumerate(owners.tolist())]))


def test_many_collectives_in_turn_mix_nothing_up() -> None:
    """A rank that overwrites its piece after a collective does not change the results of other ranks."""

    def work(group: Threads) -> list[torch.Tensor]:
        gathered = []
        for number in range(200):
            piece = torch.full((2, 1 + group.rank), number * 10.0 + group.rank)
            gathered.append(group.gather(piece, (1, 2, 3)))
            piece.fill_(-1)
        return gathered

    for gathered in run_ranks(3, work):
        for number, tensor in enumerate(gathered):
            assert tensor.tolist() == [[number * 10.0 + rank for rank in (0, 1, 1, 2, 2, 2)]] * 2


def test_alone_nothing_is_copied() -> None:
    x, owners = torch.randn(3, 4), torch.zeros(3, dtype=torch.int64)
    group = Alone()
    group.check()
    assert group.gather(x, (4,)) is group.gather_first(x, (4,)) is group.owned_rows(x, owners) is x


def test_a_rank_that_fails_ends_the_others() -> None:
    checks = []

    def work(group: Threads) -> None:
        if group.rank == 1:
            raise OverflowError("of rank 1")
        try:
            group.gather(torch.randn(2, 1), (1, 1, 1))
        except RankFailed:
            with pytest.raises(RankFailed):
                group.check()
            checks.append(threading.get_ident())
            raise

    with pytest.raises(OverflowError, match="of rank 1"):
        run_ranks(3, work)
    assert len(checks) == 2


def test_pieces_of_other_shapes_are_refused() -> None:
    group = Threads.of(1)[0]
    with pytest.raises(ValueError, match=r"a piece \[2, 3\] of rank 0 of 1, whose pieces have widths \(4,\)"):
        group.gather(torch.randn(2, 3), (4,))
    with pytest.raises(ValueError, match=r"a piece \[3\] of rank 0"):
        group.gather_first(torch.randn(3), (3,))
    with pytest.raises(ValueError, match=r"widths \(3, 1\)"):
        group.gather(torch.randn(2, 3), (3, 1))
    with pytest.raises(ValueError, match=r"rows \[2, 3\] with owners \[3\] of torch.int64"):
        group.owned_rows(torch.randn(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"owners \[2\] of torch.int32"):
        group.owned_rows(torch.randn(2, 3), torch.zeros(2, dtype=torch.int32))
