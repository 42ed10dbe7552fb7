"""The demo's control: files that are valid in every respect and hold the wrong KV.

No fault of a disk looks like this (a reader cannot tell, that is the point). If the engine's answer stayed the same with such
files, equal answers elsewhere in the demo would prove nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvtier.tiers.base import ObjectMeta, ObjectRef
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem.format import HEADER_BYTES, read_header, write_header


def reference_of(path: Path) -> ObjectRef:
    """Which object lies in ``path``: ``<root>/<namespace>/<2 hex>/<2 hex>/<key>.kv``."""
    return ObjectRef(path.parents[2].name, bytes.fromhex(path.stem))


def replace_by_foreign_bytes(victims: Sequence[Path], donors: Sequence[Path]) -> None:
    """Gives each victim the KV of a donor, under the victim's key and with a right checksum. One rank's shard each.

    Raises ``ValueError`` if there are too few donors, ``OSError``, and ``TierCorruptError`` for a file that is none of ours.
    """
    checksum = preferred()
    for victim, donor in zip(victims, donors[: len(victims)], strict=True):
        content = bytearray(donor.read_bytes())
        whole = memoryview(content)
        meta = read_header(whole[:HEADER_BYTES], reference_of(donor), len(content) - HEADER_BYTES)
        payload = whole[HEADER_BYTES : HEADER_BYTES + meta.shard_bytes[0]]
        foreign = ObjectMeta(meta.shard_bytes, checksum.kind, (checksum.digest(payload),))
        write_header(whole[:HEADER_BYTES], reference_of(victim), foreign)
        fresh = victim.with_suffix(".demo")
        fresh.write_bytes(content)
        os.replace(fresh, victim)
