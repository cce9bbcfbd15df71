"""Where a text that comes in pieces first holds one of several strings. Each character is looked at once (Aho and Corasick 1975)."""

from collections import deque


class StopStrings:
    """An automaton. Its states are the beginnings of the strings, by number; the one where a text is, is the longest that it ends with.

    State 0 is the empty beginning.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.lengths = [0]
        """Characters of each state's beginning: so much of the text may belong to a string."""
        self._found = [0]  # length of the longest string that ends in the state; 0: none
        for string in strings:
            self._insert(string)
        self._shorter = [0] * len(
            self._next
        )  # the longest beginning that a state's beginning ends with, besides itself
        self._link()

    def advance(self, state: int, character: str) -> tuple[int, int]:
        """The state after one more character, and the length of the longest string that ends with it; 0: none does."""
        while character not in self._next[state] and state:
            state = self._shorter[state]
        state = self._next[state].get(character, 0)
        return state, self._found[state]

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self.lengths.append(self.lengths[state] + 1)
                self._found.append(0)
            state = self._next[state][character]
        self._found[state] = len(string)

    def _link(self) -> None:
        """Shorter beginnings first: each state's `_shorter` comes from its parent's."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, child in self._next[state].items():
                self._shorter[child], found = self.advance(self._shorter[state], character)
                self._found[child] = self._found[child] or found
                waiting.append(child)
