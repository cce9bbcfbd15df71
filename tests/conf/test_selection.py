"""The grammar of sweep.select."""

import pytest

from conf.compose import for_hydra
from conf.errors import ErrorCode, UserError
from conf.selection import Limit, Selection, parse_selection
from conf.tasks import SweepConfig
from tests.helpers.cases import each

MALFORMED, UNKNOWN = ErrorCode.malformed, ErrorCode.unknown_name


@each(
    ("text", "expected"),
    [
        ("max decode_tokens_per_s", Selection((), True, "decode_tokens_per_s")),
        (
            "kl_mean<=0.01, peak_memory<=12GB, max decode_tokens_per_s",
            Selection(
                (
                    Limit("kl_mean", "<=", 0.01, "kl_mean<=0.01"),
                    Limit("peak_memory_bytes", "<=", 12e9, "peak_memory<=12GB"),
                ),
                True,
                "decode_tokens_per_s",
            ),
        ),
        (
            " min  weight_bytes ,time_to_first_token_s.p90 < 1.5e-1,tasks.arc_easy.acc_norm>.5",
            Selection(
                (
                    Limit("time_to_first_token_s.p90", "<", 0.15, "time_to_first_token_s.p90 < 1.5e-1"),
                    Limit("tasks.arc_easy.acc_norm", ">", 0.5, "tasks.arc_easy.acc_norm>.5"),
                ),
                False,
                "weight_bytes",
            ),
        ),
        (
            "evaluate.peak_memory>=2GiB, min bench.load_s",  # of one task, in a sweep over tasks
            Selection(
                (Limit("evaluate.peak_memory_bytes", ">=", 2**31, "evaluate.peak_memory>=2GiB"),), False, "bench.load_s"
            ),
        ),
        ("", (MALFORMED, "has ''")),
        ("kl_mean<=0.01", (MALFORMED, "has 0 objectives")),
        ("max accuracy, min kl_mean", (MALFORMED, "has 2 objectives")),
        ("max accuracy,", (MALFORMED, "has ''")),
        ("accuracy", (MALFORMED, "has 'accuracy'")),
        ("best accuracy", (MALFORMED, "has 'best accuracy'")),
        ("kl_mean==0.01, max accuracy", (MALFORMED, "has 'kl_mean==0.01': give constraints as")),
        ("kl_mean<=small, max accuracy", (MALFORMED, "whose value is neither a number nor a size")),
        ("kl_mean<=nan, max accuracy", (MALFORMED, "whose value is neither a number nor a size")),
        ("peak_memory<=12GX, max accuracy", (MALFORMED, "whose value is neither a number nor a size")),
        ("kl_mean<=1GB, max accuracy", (MALFORMED, "but kl_mean is not a number of bytes: give a number without a unit")),
        ("kl_men<=1, max accuracy", (UNKNOWN, "metric kl_men: there are accuracy, .*, seed: did you mean kl_mean?")),
        ("max decode_tokens_per_sec", (UNKNOWN, "did you mean decode_tokens_per_s?")),
        ("max memory", (UNKNOWN, "has the unknown metric memory: ")),
        ("max kl_mean_stderr", (UNKNOWN, "has the unknown metric kl_mean_stderr: ")),
    ],
)  # fmt: skip
def test_a_selection(text: str, expected: Selection | tuple[ErrorCode, str]) -> None:
    if isinstance(expected, Selection):
        assert parse_selection(text) == expected
        assert for_hydra(["-m", f"sweep.select={text}"]) == ["-m", f"sweep.select='{text}'"]  # no sweep over commas
        assert for_hydra(["-m", f"sweep.select='{text}'"]) == ["-m", f"sweep.select='{text}'"]
        return
    code, message = expected
    for refuse in (  # the command line before the first job; a job, because a YAML file may have the selection
        lambda: for_hydra(["-m", f"sweep.select={text}"]),
        lambda: SweepConfig(select=text),
    ):
        with pytest.raises(UserError, match=f"^sweep.select.*{message.replace('?', '[?]')}") as raised:
            refuse()
        assert (raised.value.code, raised.value.key) == (code, "sweep.select")
