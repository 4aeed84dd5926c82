"""Keys of KV blocks: equal keys, equal content.

A block's keys and values depend on its tokens, on every token before it, and on whatever separates tenants. So
its key is a chained hash over all of that (rule H4):

    key(0) = hash(root, tokens 0 .. B-1)        root = hash(model, block size, salt)
    key(i) = hash(key(i-1), tokens i*B .. (i+1)*B-1)

The hash is BLAKE2b with 128 bits: nobody finds two inputs with one output, so equality of keys is identity and
tokens need not be compared again (rule H6). Only full blocks of settled positions with committed tokens get a
key (rules H1, H2).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from stepahead.scheduler.core.ids import BlockKey

DIGEST_BYTES = 16


class KeyChain:
    """The keys of one history, extended as it grows."""

    __slots__ = ("_block_size", "_history", "_keys", "_parent")

    def __init__(self, history: list[int], *, block_size: int, model: str, salt: str) -> None:
        self._history = history
        self._block_size = block_size
        self._keys: list[BlockKey] = []
        root = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for part in (model.encode(), str(block_size).encode(), salt.encode()):
            # Lengths first: no two different triples give the same bytes.
            root.update(len(part).to_bytes(8, "little"))
            root.update(part)
        self._parent = root.digest()

    def first(self, num_blocks: int) -> Sequence[BlockKey]:
        """The keys of the first blocks; the history must cover them. The longest list asked for is kept."""
        while len(self._keys) < num_blocks:
            start = len(self._keys) * self._block_size
            tokens = self._history[start : start + self._block_size]
            assert len(tokens) == self._block_size, "a key beyond the history"
            content = self._parent + array("I", tokens).tobytes()
            self._parent = hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
            self._keys.append(BlockKey(self._parent))
        return self._keys if len(self._keys) == num_blocks else self._keys[:num_blocks]
