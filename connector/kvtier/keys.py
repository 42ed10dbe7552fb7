"""Keys of objects in a namespace: a byte for the group, then the engine's hash of the chunk's end.

The engine's hash is chained, so it covers the whole prefix; two chunks with the same key hold the
same tokens after the same tokens.
"""

from __future__ import annotations

from kvtier.errors import ProtocolError

MAX_GROUPS = 256
MAX_HASH_BYTES = 63
"""A key has at most 64 bytes (``tiers.base.ObjectRef``)."""
_PREFIXES = tuple(bytes([group]) for group in range(MAX_GROUPS))


def object_key(group: int, block_hash: bytes) -> bytes:
    """The key of a chunk of ``group`` that ends at ``block_hash``.

    Raises ``ProtocolError`` for an invalid group or hash.
    """
    if not 0 <= group < MAX_GROUPS or not 0 < len(block_hash) <= MAX_HASH_BYTES:
        raise ProtocolError(
            f"group {group} with a hash of {len(block_hash)} bytes: must be a group below "
            f"{MAX_GROUPS} with a hash of 1 to {MAX_HASH_BYTES} bytes"
        )
    return _PREFIXES[group] + block_hash


def split_key(key: bytes) -> tuple[int, bytes]:
    """(group, block hash) of a key. Raises ``ProtocolError`` for a key of invalid length."""
    if not 1 < len(key) <= MAX_HASH_BYTES + 1:
        raise ProtocolError(f"a key of {len(key)} bytes: must have 2 to {MAX_HASH_BYTES + 1}")
    return key[0], key[1:]


def group_prefix(group: int) -> bytes:
    """The part of a key before the hash, for loops over hundreds of keys on the scheduler's
    thread."""
    return _PREFIXES[group]
