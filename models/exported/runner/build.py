"""Builds the runner: `python -m models.exported.runner.build FOLDER` writes the program and the kernel library. Keep both in one
folder."""

import shutil
import sys
from pathlib import Path

from kernels import build

PROGRAM, LIBRARY = "quintet-runner", "kernels.so"


def build_runner(folder: Path) -> Path:
    """Compile the program for this machine's instruction set into `folder`. Return its path. Raises
    kernels.build.NotBuilt."""
    name = build.instruction_set()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(build.compiled(name), folder / LIBRARY)
    flags = [*build.FLAGS, *build.INSTRUCTION_SETS[name][1], f'-DINSTRUCTION_SET="{name}"']
    sources = map(str, sorted(Path(__file__).parent.glob("*.cpp")))
    linked = ["-L", str(folder), f"-l:{LIBRARY}", "-Wl,-rpath,$ORIGIN"]
    build.run([build.compiler(), *flags, *sources, "-o", str(folder / PROGRAM), *linked])
    return folder / PROGRAM


if __name__ == "__main__":
    print(build_runner(Path(sys.argv[1])))
