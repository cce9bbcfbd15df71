"""Truncate a text to a number of tokens as transformers does.

Its first or last tokens are dropped; the special tokens around it stay.
"""

from models.tokenizers.base import Tokenizer


def truncated(
    tokenizer: Tokenizer, text: str, token_ids: list[int], most: int | None, from_left: bool = False
) -> tuple[list[int], int]:
    """Return at most `most` tokens of a text, and the number of dropped tokens.

    `token_ids`: tokens of the text with the special tokens around it.
    """
    num_cut = 0 if most is None else max(0, len(token_ids) - most)
    if num_cut == 0:
        return token_ids, 0
    inner = tokenizer.encode(text, add_special_tokens=False)
    starts = range(len(token_ids) - len(inner) + 1)
    begin = next((i for i in starts if token_ids[i : i + len(inner)] == inner), None)
    begin, end = (0, len(token_ids)) if begin is None else (begin, begin + len(inner))
    if from_left:
        return [*token_ids[:begin], *token_ids[min(end, begin + num_cut) :]][:most], num_cut
    return [*token_ids[: max(0, end - num_cut)], *token_ids[end:]][:most], num_cut
