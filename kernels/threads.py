"""How many threads share the work of a C++ kernel. Results do not depend on it."""

from kernels import build


def set_threads(num_threads: int) -> None:
    """`num_threads` with the calling one; at first there is one for each physical core that the process may use.

    Without the C++ kernels this does nothing: torch has its own threads. Raises ValueError for less than 1.
    """
    if num_threads < 1:
        raise ValueError(f"{num_threads} threads: give at least 1")
    library = build.library()
    if library is not None:
        library.set_threads(num_threads)
