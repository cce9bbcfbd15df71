"""Hashes of the blocks of a sequence, by which the prefix cache finds them."""

import hashlib
from array import array

from pipelines.engine.request import Sequence


def extend_hashes(
    hashes: list[bytes], token_ids: list[int], num_blocks: int, block_size: int, root: bytes, num_prefix_tokens: int = 0
) -> None:
    """Extend `hashes` to the hashes of the first `num_blocks` blocks of a sequence. These blocks must be full.

    A block's hash is the sha256 of the previous block's hash (for the first block: of the root, see `root_hash`) and
    the block's tokens. Equal hashes mean that the roots and all tokens up to the end of the block are equal.
    `num_prefix_tokens`: virtual tokens before the first token; the root represents them.
    """
    for i in range(len(hashes), num_blocks):
        first, end = (max(0, j * block_size - num_prefix_tokens) for j in (i, i + 1))
        block = array("q", token_ids[first:end]).tobytes()
        hashes.append(hashlib.sha256((hashes[-1] if hashes else root) + block).digest())


def root_hash(sequence: Sequence) -> bytes:
    """Return the root of a sequence's block hashes. Sequences with different roots share no blocks.

    It contains the digests of prefix and adapter, so a new prefix under an old name does not find the old prefix's
    blocks.
    """
    salt, prefix, adapter = sequence.params.cache_salt, sequence.prefix.digest, sequence.request.adapter
    # With these text prefixes no salt has the same bytes as a block of token ids.
    parts = [b"past border:"] if sequence.is_past_threshold else []
    parts += [b"prefix:" + prefix.encode()] if prefix else []
    parts += [b"adapter:" + adapter.digest.encode()] if adapter else []
    parts += [] if salt is None else [b"salt:" + salt.encode("utf-8", "surrogatepass")]
    return hashlib.sha256(b"".join(parts)).digest() if parts else b""
