"""`.pdparams`: arrays equal to those that pickle reads, and no other objects, whatever a pickle contains."""

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from models.formats.paddle.pickle_reader import PdparamsFile
from tests.helpers.cases import each
from tests.helpers.damage import RunsCode

RANDOM = np.random.default_rng(0)
ARRAYS = {
    "half": RANDOM.normal(size=(3, 5)).astype(np.float16),
    "single": RANDOM.normal(size=(129, 200)).astype(np.float32),  # above 64 KB, which pickle writes outside its frames
    "double": RANDOM.normal(size=7),
    "bytes": RANDOM.integers(-128, 127, (2, 3, 4), np.int8),
    "words": RANDOM.integers(0, 9, 3, np.int64),
    "scalar": np.array(3.5, np.float32),
    "empty": np.empty((0, 4), np.float32),
    "columns": np.asfortranarray(RANDOM.normal(size=(4, 6)).astype(np.float32)),
}


def read(folder: Path, content: bytes) -> dict[str, Tensor]:
    (folder / "a.pdparams").write_bytes(content)
    file = PdparamsFile(folder / "a.pdparams")
    tensors = dict(file.read(file.shapes))
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == {
        name: (file.shapes[name], file.dtypes[name]) for name in file.shapes
    }
    return tensors


def assert_read(folder: Path, content: bytes, arrays: dict[str, np.ndarray]) -> None:
    tensors = read(folder, content)
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert torch.equal(tensors[name], torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))), name


@each("protocol", [2, 3, 4])
def test_every_protocol(protocol: int, tmp_path: Path) -> None:
    names = {"StructuredToParameterName@@": dict.fromkeys(ARRAYS, "w_0")}
    assert_read(tmp_path, pickle.dumps(ARRAYS | names, protocol), ARRAYS)


def test_an_ordered_dictionary(tmp_path: Path) -> None:
    assert_read(tmp_path, pickle.dumps(OrderedDict(ARRAYS), 4), ARRAYS)


class Pair:
    """A tensor outside a state dictionary, as Paddle pickles it."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (("linear_0.w_0", self._array),)


def test_tensors_with_their_names(tmp_path: Path) -> None:
    assert_read(tmp_path, pickle.dumps({name: Pair(array) for name, array in ARRAYS.items()}, 4), ARRAYS)


def test_names_of_older_numpy(tmp_path: Path) -> None:
    """It was called numpy.core before version 2; here with the texts of Python 2."""
    state = b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nU\x02f4K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x18"
    values = np.arange(6, dtype=np.float32)
    content = b"\x80\x02}U\x01acnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    content += state + values.tobytes() + b"tbs."
    assert pickle.loads(content, encoding="latin1")["a"].tolist() == values.reshape(2, 3).tolist()
    assert_read(tmp_path, content, {"a": values.reshape(2, 3)})


def test_bits_of_bfloat16(tmp_path: Path) -> None:
    tensor = torch.randn(5, 3).bfloat16()
    content = pickle.dumps({"a": tensor.view(torch.uint16).numpy()}, 4)
    assert torch.equal(read(tmp_path, content)["a"], tensor)


def test_code_does_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for protocol in (2, 4):
        content = pickle.dumps(ARRAYS | {"code": RunsCode(trace)}, protocol)
        with pytest.raises(
            UserError, match=r"names (posix|nt)\.mkdir, which is not called: only numpy arrays are read"
        ):
            read(tmp_path, content)
    assert not trace.exists()
    pickle.loads(content)
    assert trace.exists()  # the file is as dangerous as intended


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


@each(
    "content, message",
    [
        (pickle.dumps({"a": Calls(eval, "1")}), "names builtins.eval"),
        (pickle.dumps({"a": Calls(getattr, "a", "join")}), "names builtins.getattr"),
        (pickle.dumps({"a": Calls(os.system, "true")}), "system, which is not called"),
        (pickle.dumps({"a": np.array([Pair(np.ones(2))])}), "is not of an array of numbers"),
        (pickle.dumps({"a": np.ones(2, ">f4")}), "f4 before byte [0-9]+ is not in this machine's byte order"),
        (pickle.dumps({"a": np.ones(2, np.complex64)}), "is of type c8: only f2, f4, f8, u2"),
        (pickle.dumps({"a": np.ones(2, [("x", "f4")])}), "is of type V4"),
        (pickle.dumps({"a": 3}), "a is not an array"),
        (pickle.dumps({"a": {"b": np.ones(2)}}), "a is not an array"),
        (pickle.dumps({3: np.ones(2)}), "is not a name of at most 512 bytes"),
        (pickle.dumps({"a\nb": np.ones(2)}), "has control characters"),
        (pickle.dumps({"a" * 513: np.ones(2)}), "is not a name of at most 512 bytes"),
        (pickle.dumps([np.ones(2)]), "does not hold a dictionary"),
        (
            pickle.dumps({"a": np.ones(2), "UnpackBigParamInfor@@": {}}),
            r"split arrays: save it again with paddle\.save\(",
        ),
        (pickle.dumps({"a": 1.5}), "is b'G', an opcode that arrays do not need"),
        (b"\x80\x04}q\x00h\x07.", "value 7, which is read .*, was never stored"),
        (b"\x80\x04r\xff\xff\xff\x7f.", "damaged"),  # a memo index without a value
        (
            b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
            "it ends at byte 12, inside the value that begins at byte 11",
        ),
        (b"\x80\x04}(t.", "does not hold a dictionary|damaged"),
        (b"\x80\x04u.", "values are missing"),
        (b"}R.", "values are missing"),
        (b"}}R.", "calls a function .* that does not build an array"),
        (b"cos\nsystem\n.", "names os.system"),
        (
            b"}U\x01ac_codecs\nencode\nX\x01\0\0\0aX\x05\0\0\0utf-8\x86Rs.",
            "calls a function .* that does not build an array",
        ),
        (b"c" + b"a" * 600, "has no end"),
    ],
)
def test_pickles_without_an_array(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, content)


def test_more_opcodes_than_arrays_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = pickle.dumps({str(i): np.ones(2) for i in range(100)}, 4)
    monkeypatch.setattr("models.formats.paddle.pickle_reader.MOST_OPCODES", 100 * 30)
    assert len(read(tmp_path, content)) == 100
    with pytest.raises(UserError, match="it has more than 3000 opcodes"):
        read(tmp_path, b"}" * 3001)


def test_sizes_that_the_content_does_not_have(tmp_path: Path) -> None:
    content = pickle.dumps({"a": np.ones((3, 5), np.float32)}, 4)
    assert content.count(b"K\x03K\x05\x86") == 1
    for size in (2, 4):
        with pytest.raises(UserError, match=rf"\[{size}, 5\] .* takes {size * 20} bytes, but the file has 60"):
            read(tmp_path, content.replace(b"K\x03K\x05\x86", b"K%cK\x05\x86" % size))
    below_0 = b"J\xfd\xff\xff\xffJ\xfb\xff\xff\xff\x86"  # -3 and -5, whose product is right
    with pytest.raises(UserError, match="has no shape of up to 8 sizes"):
        read(tmp_path, content.replace(b"K\x03K\x05\x86", below_0))
    empty = pickle.dumps({"a": np.empty((0, 5), np.float32)}, 4)
    above_all = b"K\x00\x8a\x07" + (2**47).to_bytes(7, "little") + b"\x8a\x07" + (2**47).to_bytes(7, "little") + b"\x87"
    with pytest.raises(UserError, match="has sizes that no file can hold"):
        read(tmp_path, empty.replace(b"K\x00K\x05\x86", above_all))
    encoded = pickle.dumps({"a": np.ones((3, 5), np.float32)}, 2)
    with pytest.raises(UserError, match="a has 60 bytes, expected 40"):
        read(tmp_path, encoded.replace(b"K\x03K\x05\x86", b"K\x02K\x05\x86"))


@pytest.mark.long
@each("protocol", [2, 4])
def test_every_end_and_every_changed_byte(protocol: int, tmp_path: Path) -> None:
    """All truncations, and each byte set to several values: the result is a line or tensors, never another error."""
    content = pickle.dumps({"a": np.ones((2, 2), np.float32), "b": np.zeros(3, np.float16)}, protocol)
    changed = [content[:end] for end in range(len(content))]
    changed += [
        content[:i] + bytes([byte]) + content[i + 1 :] for i in range(len(content)) for byte in (0, 40, 82, 98, 255)
    ]
    for damaged in changed:
        try:
            read(tmp_path, damaged)
        except UserError:
            continue
