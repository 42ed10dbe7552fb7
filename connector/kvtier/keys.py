"""Keys of objects in a namespace: a byte for the group, then the engine's hash of the chunk's end.

The engine's hash is chained, so it covers the whole prefix; two chunks with the same key hold the
same tokens after the same tokens. A module of its own, because the scheduler and the store build
keys in loops over hundreds of chunks and must agree on their form.
"""

from __future__ import annotations

MAX_GROUPS = 256
_PREFIXES = tuple(bytes([group]) for group in range(MAX_GROUPS))


def group_prefix(group: int) -> bytes:
    """The part of a key before the block hash. ``group`` is at least 0 and below ``MAX_GROUPS``."""
    return _PREFIXES[group]
