"""Keys of chunks, from token ids.

ATOM's own block hash has 64 bits and no salt: two prompts may collide. KVTier chains BLAKE3 over
the token ids instead, one 32-byte hash per chunk, so that a key covers the whole prefix.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from blake3 import blake3

SEED = blake3(b"kvtier atom token chain 1").digest()
"""Change it if the form of the hashed bytes changes."""
TOKEN_CODE = "I" if array("I").itemsize == 4 else "L"
MAX_TOKEN = (1 << 32) - 1


class TokenChain:
    """The chained hashes of the whole chunks of one prompt, computed when they are first needed."""

    __slots__ = ("_chunk_tokens", "_hashes", "_tokens")

    def __init__(self, tokens: Sequence[int], chunk_tokens: int) -> None:
        """``tokens``: the prompt, which does not change. Ids from 0 to ``MAX_TOKEN``."""
        self._tokens = tokens
        self._chunk_tokens = chunk_tokens
        self._hashes: list[bytes] | None = None

    @property
    def hashes(self) -> list[bytes]:
        """One hash per whole chunk. Raises ``OverflowError`` for an id that is out of range."""
        if self._hashes is None:
            self._hashes = chain(self._tokens, self._chunk_tokens)
        return self._hashes


def chain(tokens: Sequence[int], chunk_tokens: int) -> list[bytes]:
    """Returns the chained hashes of the whole chunks of ``tokens``."""
    content = array(TOKEN_CODE, tokens).tobytes()
    step = chunk_tokens * array(TOKEN_CODE).itemsize
    hashes: list[bytes] = []
    parent = SEED
    for start in range(0, len(content) - step + 1, step):
        parent = blake3(parent + content[start : start + step]).digest()
        hashes.append(parent)
    return hashes
