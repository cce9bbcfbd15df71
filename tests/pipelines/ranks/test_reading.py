"""The bytes that a rank reads of a checkpoint's files, and the memory that it needs. A real process per rank, one at a
time.

The files are hollow: they contain their headers and holes. A mapping allocates pages of /dev/shm where it is read, so a
file's blocks tell, to a page, which parts were read.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from conf.schema import ParallelConfig, ParallelMode
from kernels import build
from pipelines.loading.driver import DriverExecutor
from pipelines.loading.fingerprint import plain
from pipelines.loading.load_engine import load_engine
from pipelines.ranks.messages import Channel, Header
from tests.helpers.builders import REPOSITORY, run_config, write_llama
from tests.helpers.conversion import SHARDED, convert
from tests.helpers.tiers import tiers

SHM = Path("/dev/shm")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels"),
    pytest.mark.skipif(
        not SHM.is_dir(), reason="holes take pages where they are read in memory's own file system alone"
    ),
]

MORE = 1.05  # allowance for a rank's part: pages at the borders of its ranges
# In addition to the weights: torch's one-time memory for the first products, and freed memory; 6 MiB were measured.
OVERHEAD_BYTES = 8 << 20
SIZES = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
LARGEST_BYTES = 4 * SIZES["vocab_size"] * SIZES["hidden_size"]

Loaded = tuple[dict[str, int], dict[str, int]]
"""The process's output, and the bytes read by file."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, num_attention_heads=8, **SIZES)
    return folder


@pytest.fixture
def load() -> Iterator[Callable[[Path, int, int, int], Loaded]]:
    """Load a rank's part of a hollow copy of a folder."""
    with tempfile.TemporaryDirectory(dir=SHM) as folder:

        def load(source: Path, tp: int, pp: int, rank: int) -> Loaded:
            target = Path(folder) / "hollow"
            files = [_hollow(file, target) for file in source.iterdir()]
            before = {file: _held(file) for file in files}
            run = json.dumps(plain(asdict(run_config(target))))
            command = [sys.executable, "-m", "tests.helpers.rank_load", run, *map(str, (tp, pp, rank))]
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            read = {file.name: _held(file) - before[file] for file in files if file.suffix == ".safetensors"}
            shutil.rmtree(target)
            return json.loads(done.stdout), read

        yield load


def _hollow(file: Path, folder: Path) -> Path:
    """Copy a file without the content of its tensors."""
    folder.mkdir(exist_ok=True)
    with file.open("rb") as source, (folder / file.name).open("wb") as target:
        size = file.stat().st_size
        head = source.read(8)
        target.write(head + source.read(int.from_bytes(head, "little") if file.suffix == ".safetensors" else size))
        target.truncate(size)
    return folder / file.name


def _held(file: Path) -> int:
    """Return the bytes of a file's pages."""
    return file.stat().st_blocks * 512


@pytest.mark.parametrize(("tp", "pp"), tiers([(2, 1), (1, 2)], long=[(2, 1)]), ids=["tp2", "pp2"])
def test_a_rank_reads_its_part_and_holds_no_more(
    model: Path, load: Callable[[Path, int, int, int], Loaded], tp: int, pp: int
) -> None:
    for rank in range(2):
        said, read = load(model, tp, pp, rank)
        assert 0.99 * said["weight_bytes"] < sum(read.values()) < MORE * said["weight_bytes"]
        assert said["weight_bytes"] < 0.51 * (model / "model.safetensors").stat().st_size
        assert said["peak_bytes"] < said["weight_bytes"] + LARGEST_BYTES + OVERHEAD_BYTES


@pytest.mark.parametrize(("tp", "pp"), tiers([(2, 1), (1, 2)], long=[(1, 2)]), ids=["tp2", "pp2"])
def test_of_files_in_the_same_division_a_rank_reads_its_own(
    model: Path, load: Callable[[Path, int, int, int], Loaded], tmp_path: Path, tp: int, pp: int
) -> None:
    folder = convert(model, tmp_path / "divided", format=SHARDED, tp=tp, pp=pp)
    for rank in range(2):
        said, read = load(folder, tp, pp, rank)
        rank_file_bytes = read.pop(f"rank_{rank // tp}_{rank % tp}.safetensors")
        assert 0.99 * said["weight_bytes"] < rank_file_bytes < MORE * said["weight_bytes"]
        assert [*read.values()] == [0]  # its header was written, and nothing beyond it is read
        assert said["peak_bytes"] < said["weight_bytes"] + LARGEST_BYTES + OVERHEAD_BYTES


def test_ranks_of_one_machine_verify_its_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 verifies them. Otherwise every rank would read all of each file."""
    write_llama(tmp_path / "model")
    folder = convert(tmp_path / "model", tmp_path / "whole")
    send, told = Channel.send, list[Header]()

    def watched(self: Channel, header: Header, *payload: bytes) -> None:
        told.append(header)
        send(self, header, *payload)

    monkeypatch.setattr(Channel, "send", watched)
    run = run_config(folder, verify=True)
    run.parallel = ParallelConfig(ParallelMode.tp, tp=2)
    engine = load_engine(run, 3)
    assert isinstance(engine.executor, DriverExecutor)
    engine.executor.driver.close()
    assert [header["model"]["verify"] for header in told if "model" in header] == [False]
