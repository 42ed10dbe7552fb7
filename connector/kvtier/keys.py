"""Keys of objects inside a namespace: one byte for the group, then the engine's block hash at the chunk's end.

The engine's hash is chained, so it covers the whole prefix; two chunks with the same key hold the same tokens after the same tokens.
"""

from __future__ import annotations

from kvtier.errors import ProtocolError

MAX_GROUPS = 256
MAX_HASH_BYTES = 63
"""A key has at most 64 bytes (``tiers.base.ObjectRef``)."""
_PREFIXES = tuple(bytes([group]) for group in range(MAX_GROUPS))


def object_key(group: int, block_hash: bytes) -> bytes:
    """The key of a chunk of ``group`` that ends at ``block_hash``.

    Raises ``ProtocolError`` for a group or hash that no engine can have.
    """
    if not 0 <= group < MAX_GROUPS or not 0 < len(block_hash) <= MAX_HASH_BYTES:
        raise ProtocolError(
            f"group {group} with a hash of {len(block_hash)} bytes; at most 255 and 1 to 63 are accepted"
        )
    return _PREFIXES[group] + block_hash


def split_key(key: bytes) -> tuple[int, bytes]:
    """(group, block hash) of a key. Raises ``ProtocolError`` if it is none."""
    if not 1 < len(key) <= MAX_HASH_BYTES + 1:
        raise ProtocolError(f"a key of {len(key)} bytes; 2 to {MAX_HASH_BYTES + 1} are accepted")
    return key[0], key[1:]


def group_prefix(group: int) -> bytes:
    """What ``join`` puts before the hash: for loops over hundreds of keys on the scheduler's thread."""
    return _PREFIXES[group]
