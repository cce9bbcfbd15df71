"""MindSpore's files alone: types, sizes, and refused damage."""

import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import UserError
from models.formats.mindspore.checkpoint import our_name
from models.formats.mindspore.ckpt import CkptFile
from tests.helpers.cases import each
from tests.helpers.mindspore_files import CHECKPOINT, SOUND, ckpt


@each("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_and_checksum(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randn(3, 5).to(dtype)
    (tmp_path / "a.ckpt").write_bytes(ckpt({"x": tensor}) + b"crc_num" + bytes(10))
    ((name, read),) = CkptFile(tmp_path / "a.ckpt", our_name).read(["x"])
    assert (name, read.dtype) == ("x", dtype)
    assert torch.equal(read, tensor)


def test_empty_dims_are_a_scalar(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(ckpt({"x": torch.tensor(2.5)}))
    ((_, read),) = CkptFile(tmp_path / "a.ckpt", our_name).read(["x"])
    assert (read.shape, read.item()) == ((), 2.5)


QUERY = "model.layers.0.attention.wq.weight"


@each(
    "content, message",
    [
        (ckpt({QUERY: torch.ones(2)}) + b"\x0a", r"it ends inside a number at byte \d+"),
        (ckpt({QUERY: torch.ones(2)})[:-1], r"the field at byte \d+ is \d+ bytes long, but its message ends after \d+"),
        (ckpt({QUERY: torch.ones(2)}) + b"\x12\x00", "field 2 of Checkpoint is unknown"),
        (b"\x0a\x00", "has no tag or no tensor"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "longer than 10 bytes"),
        (b"\x0d\x00\x00\x00\x00", "unknown wire type 5"),
        (ckpt({QUERY: torch.ones(2), "x": torch.ones(1), "\n": torch.ones(1)}), "is empty, longer than 512 bytes or not text"),
        (ckpt({"x" * 600: torch.ones(2)}), "longer than 512 bytes"),
        (ckpt({"x": torch.ones(1), "y": torch.ones(1)}) + ckpt({"x": torch.ones(1)}), "x occurs twice"),
        (ckpt({"x": torch.ones(2)}) + ckpt({"x": torch.ones(3)}), "the parts of x differ in shape or type"),
        (ckpt({"x": torch.ones(2)}) + ckpt({"x": torch.ones(2)}), r"x \[2\] of Float32 takes 8 bytes, but the file has 16"),
        (ckpt({"x": torch.ones(2, dtype=torch.int8)}), "x is of type Int8: only Float32, Float16, BFloat16 are supported"),
        (ckpt({"x": torch.ones((1,) * 9)}), "x has more than 8 dimensions"),
        (ckpt({"model.layers.0.attention.w_qkv.weight": torch.ones(2)}), "w_qkv.weight is fused in one of two orders"),
        (ckpt({"model.layers.0.feed_forward.w_gate_hidden.weight": torch.ones(2)}), "fused in one of two orders"),
        (ckpt({"model.layers.0.feed_forward.ffn.w1.weight": torch.ones(2)}), "belongs to a mixture of experts"),
        (ckpt({"x": torch.ones(2)}).replace(b"\x08\x02", b"\x08\x00"), r"x \[0\] of Float32 takes 0 bytes, but the file has 8"),
    ],
)  # fmt: skip
def test_refused_files(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.ckpt is damaged or not a MindSpore checkpoint: .*{message}"):
        CkptFile(tmp_path / "a.ckpt", our_name)


def test_a_negative_dimension(tmp_path: Path) -> None:
    checkpoint = CHECKPOINT[False]()
    value = checkpoint.value.add(tag="x")
    value.tensor.dims.extend([-1, -2])
    value.tensor.tensor_type, value.tensor.tensor_content = "Float32", bytes(8)
    (tmp_path / "a.ckpt").write_bytes(checkpoint.SerializeToString())
    with pytest.raises(UserError, match="x has more than 8 dimensions, or a negative one"):
        CkptFile(tmp_path / "a.ckpt", our_name)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.ckpt cannot be read"):
        CkptFile(tmp_path / "a.ckpt", our_name)


def test_a_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(ckpt({"x": torch.ones(100)}))
    file = CkptFile(path, our_name)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match="became shorter"):
        list(file.read(["x"]))


@pytest.mark.long
@settings(max_examples=1200, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=4),
    inserted=st.tuples(st.integers(0, len(SOUND)), st.binary(max_size=12)),
    end=st.one_of(st.none(), st.integers(0, len(SOUND))),
)
def test_damaged_bytes(
    changes: list[tuple[int, int]], inserted: tuple[int, bytes], end: int | None, tmp_path: Path
) -> None:
    """Every damaged file is refused by name or read whole, and no tensor is larger than the file."""
    content = bytearray(SOUND)
    for at, byte in changes:
        content[at] = byte
    content[inserted[0] : inserted[0]] = inserted[1]
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(content[:end])
    refusal = ""
    before = time.process_time()
    try:
        file = CkptFile(path, our_name)
        for name, tensor in file.read(file.shapes):
            assert tuple(tensor.shape) == file.shapes[name]
            assert tensor.nbytes <= len(content)
    except UserError as error:
        refusal = str(error)
    # A file of 1 kB takes far less; a reader that continues into missing data would not. Processor time, because the
    # machine may be busy.
    assert time.process_time() - before < 0.5
    assert "\n" not in refusal
    assert len(refusal) < 2000
