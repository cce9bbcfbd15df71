"""Where the states of recurrent layers are saved, so that later prompts continue from them. Imports no torch."""

from collections.abc import Set
from typing import NamedTuple

MIN_TOKENS = 64
"""A snapshot in a prompt lies at least this number of tokens behind the one before it. Each one ends a step early."""


class Snapshots(NamedTuple):
    """The places in a prompt where the state is saved."""

    ends: tuple[int, ...]
    """Numbers of tokens, ascending. A step ends there, at the end of a block."""
    shared_end: int
    """The end of the first turn (a system prompt), or of the prompt if it has no turns. Other conversations read the
    snapshots up to here."""


NO_SNAPSHOTS = Snapshots((), 0)


def place_snapshots(
    prompt: list[int], turn_end_ids: Set[int], block_size: int, num_known: int, num_computed: int
) -> Snapshots:
    """Return where to save states while a prompt is computed.

    A prompt with turns saves at the last full block of its first and of its last turn. A prompt without turns saves
    where the blocks end that an earlier prompt has computed, because a third prompt may begin with them too.
    `turn_end_ids`: the tokens that end a turn. `num_known`, `num_computed`: the first tokens whose blocks are in the
    prefix cache, and those whose states are saved too.
    """
    turn_ends = [i for i, token in enumerate(prompt, 1) if token in turn_end_ids]
    candidates = [turn_ends[0], turn_ends[-1]] if turn_ends else [num_known]
    ends, last = list[int](), num_computed
    for end in (candidate - candidate % block_size for candidate in candidates):
        if end - last >= MIN_TOKENS:
            ends.append(end)
            last = end
    return Snapshots(tuple(ends), turn_ends[0] if turn_ends else len(prompt))
