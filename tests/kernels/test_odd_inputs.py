"""Every operator with no rows, with no channels, and with inputs that are not contiguous."""

import torch

from tests.helpers.cases import each
from tests.helpers.odd_inputs import CASES, EMPTY, apart
from tests.helpers.ways import any_way, compiled, computing


@compiled
@each("operator, rows, channels", EMPTY)
def test_nothing_to_compute(operator: str, rows: int, channels: int) -> None:
    """The results are as empty as the reference's."""
    case = CASES[operator]
    case_result = case(rows, channels, torch.clone)
    with computing("torch"):
        wanted = case(rows, channels, torch.clone)
    for result, expected in zip(case_result, wanted, strict=True):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(result, expected)


@any_way
@each("operator", CASES)
def test_numbers_that_lie_apart(operator: str) -> None:
    """The bits equal those for contiguous inputs."""
    case = CASES[operator]
    for result, expected in zip(case(5, 32, apart), case(5, 32, torch.clone), strict=True):
        assert torch.equal(result, expected)
