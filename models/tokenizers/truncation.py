"""Cut a text to a number of tokens as transformers does: its last tokens are left out, and the special tokens around it stay."""

from models.tokenizers.base import Tokenizer


def truncated(tokenizer: Tokenizer, text: str, token_ids: list[int], most: int | None) -> tuple[list[int], int]:
    """Return at most `most` tokens of a text, and how many were left out. token_ids: the text's with the special tokens around it."""
    num_cut = 0 if most is None else max(0, len(token_ids) - most)
    if num_cut == 0:
        return token_ids, 0
    inner = tokenizer.encode(text, add_special_tokens=False)
    starts = range(len(token_ids) - len(inner) + 1)
    end = next((i + len(inner) for i in starts if token_ids[i : i + len(inner)] == inner), len(token_ids))
    return [*token_ids[: max(0, end - num_cut)], *token_ids[end:]][:most], num_cut
