"""Find added tokens in a text before the vocabulary's own rules apply, as transformers does."""

from collections.abc import Iterator, Mapping

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

REST = "\ue000"  # the library's token for text between added tokens


class AddedTokens:
    """The leftmost token wins, then the longest. Tokens with `lstrip` or `rstrip` include the adjacent white space."""

    def __init__(self, by_id: Mapping[int, AddedToken]) -> None:
        self.by_id = dict(by_id)
        ids = {token.content: id for id, token in self.by_id.items()}
        self._finder = Tokenizer(WordLevel({**ids, REST: max(self.by_id, default=-1) + 1}, unk_token=REST))
        self._finder.add_tokens(list(self.by_id.values()))

    @property
    def strips(self) -> bool:
        """Whether any token strips white space, whose length is not limited."""
        return any(token.lstrip or token.rstrip for token in self.by_id.values())

    def cut(self, text: str) -> Iterator[str | int]:
        """Yield the ids of the added tokens in a text, and the texts between them."""
        (encoding,) = self._finder.encode_batch([text], add_special_tokens=False)  # releases the GIL
        for id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            yield id if id in self.by_id else text[begin:end]
