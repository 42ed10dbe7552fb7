"""The slot table: which object with checksums lies in which slot of the pool, for recovery by the
next tierd.

A file beside the pool, in memory like the pool::

    0       header: magic, length, JSON (format, pool, topology, a random word), BLAKE3 over all of
    it 4096    records of ``RECORD_BYTES`` each, in no order; a record whose digest does not match
    is ignored

A record is written after the object has its checksums, and erased before the slot is used for
anything else. So whenever the process dies, each record names a slot that holds exactly that
object. Its digest covers the record and the header's random word, which excludes partial records
and records of an earlier table in the same file. The object itself is verified separately, against
the digest in the record (``recovery``).
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from kvtier.hashing import blake3_digest
from kvtier.store.pool_layout import PoolLayout
from kvtier.tiers.base import ALIGNMENT_BYTES, ObjectMeta

FORMAT, FORMAT_OF_PARTS = 3, 4
"""Of a pool in one part, and in several. A tierd that knows no parts rejects the second."""
HEADER_BYTES = 4096
DIGEST_BYTES = 16
RECORD_BYTES = 176
MIN_TABLE_BYTES = 256 << 10
MAX_TABLE_BYTES = 64 << 20
"""380,000 records: 64 GiB in objects of 176 KiB. A chunk of 256 tokens has a hundred times that
size."""
TABLE_SHARE = 1024
"""A table has at most a thousandth of the pool's bytes, within the two limits above."""
_MAGIC = b"KVTSLOTS"
_PREFIX = struct.Struct("<8sI")
_RECORD = struct.Struct("<4sBBBBQQIIQ16s16s64s8s8sII")
_PREVIOUS_BYTES = 8
"""What a record keeps of the key of the object before its own: enough to find it among the others.
"""
_RECORD_MAGIC = b"slot"
_MAX_TIME = (1 << 32) - 1
_DIGEST_AT = RECORD_BYTES - DIGEST_BYTES
_EMPTY = bytes(RECORD_BYTES)
_KINDS = ("xxh3-128", "blake3")
_MAX_KEY_BYTES = 64
_PIECE_RECORDS = 4096


def slot_table_bytes(pool_bytes: int) -> int:
    """Maximum size of the slot table of a pool."""
    return min(max(pool_bytes // TABLE_SHARE, MIN_TABLE_BYTES), MAX_TABLE_BYTES)


def object_digest(meta: ObjectMeta) -> bytes:
    """One digest for all shards of an object: that of their checksums."""
    return blake3_digest(b"".join(meta.checksums), DIGEST_BYTES)


def key_mark(key: bytes) -> bytes:
    """Marks a key among those of one namespace, well enough for the order of eviction."""
    return blake3_digest(key, _PREVIOUS_BYTES)


@dataclass(frozen=True, slots=True)
class SlotLocation:
    """A slot, and the segment that it belongs to. ``layout``: of the pool that it is a slot of;
    None for one part, and in records of a table, which has the layout itself."""

    offset: int
    slot_bytes: int
    segment_start: int
    segment_slots: int
    layout: PoolLayout | None = None


class ReadLog(Protocol):
    """Records the slots that tierd reads into, in case that it dies and one of its threads does
    not."""

    def begin(self, place: SlotLocation) -> bool:
        """Records a read before it starts; False if the read must not start."""
        ...

    def end(self, offset: int) -> None:
        """The read has returned, or never starts."""
        ...


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One object with checksums. ``segment_start`` and ``segment_slots``: the segment of its slot.
    ``digest``: ``object_digest``. ``sequence`` increases with every record. ``previous``:
    ``key_mark`` of the object before it in its prefix; empty if there is none or it is not known.
    ``tenant``: empty if it belongs to no tenant. ``expires_at``: seconds since the epoch, 0: never.
    ``tiers``: bits of the only tiers that it may be stored in, 0: all.
    """

    namespace: str
    key: bytes
    offset: int
    slot_bytes: int
    segment_start: int
    segment_slots: int
    shards: int
    checksum_kind: str
    digest: bytes
    sequence: int = 0
    previous: bytes = b""
    tenant: bytes = b""
    expires_at: int = 0
    tiers: int = 0

    @property
    def location(self) -> SlotLocation:
        """The object's slot."""
        return SlotLocation(self.offset, self.slot_bytes, self.segment_start, self.segment_slots)


@dataclass(frozen=True, slots=True)
class TableIdentity:
    """What a table belongs to. ``pool_inode``: inode of the pool's file. ``topology``: digest of
    the structural document."""

    pool_bytes: int
    pool_inode: int
    topology: str

    def difference(self, now: TableIdentity) -> str:
        """Why a table of this identity cannot be used for ``now``; empty if it can. A pool may have
        grown."""
        if self.pool_inode != now.pool_inode:
            return "pool_file"
        if self.topology != now.topology:
            return "topology"
        return "pool_size" if self.pool_bytes > now.pool_bytes else ""


def encode_record(record: SlotRecord, word: bytes) -> bytes:
    """The bytes of a record in the table with this random word."""
    body = _RECORD.pack(
        _RECORD_MAGIC,
        _KINDS.index(record.checksum_kind),
        len(record.key),
        record.shards,
        len(record.tenant),
        record.offset,
        record.segment_start,
        record.segment_slots,
        record.slot_bytes // ALIGNMENT_BYTES,
        record.sequence,
        bytes.fromhex(record.namespace),
        record.digest,
        record.key,
        record.previous,
        record.tenant,
        min(record.expires_at, _MAX_TIME),
        record.tiers,
    ).ljust(_DIGEST_AT, b"\0")
    return body + blake3_digest(word + body, DIGEST_BYTES)


def decode_record(data: bytes, word: bytes) -> SlotRecord | None:
    """The record; None if it belongs to another table or is damaged."""
    body = data[:_DIGEST_AT]
    if len(data) != RECORD_BYTES or blake3_digest(word + body, DIGEST_BYTES) != data[_DIGEST_AT:]:
        return None
    fields = _RECORD.unpack_from(body)
    _, kind, key_bytes, shards, tenant_bytes, offset, start, slots, pages, sequence = fields[:10]
    namespace, digest, key, previous, tenant, expires_at, tiers = fields[10:]
    if kind >= len(_KINDS) or key_bytes > _MAX_KEY_BYTES or tenant_bytes > len(tenant):
        return None
    return SlotRecord(
        namespace.hex(),
        key[:key_bytes],
        offset,
        pages * ALIGNMENT_BYTES,
        start,
        slots,
        shards,
        _KINDS[kind],
        digest,
        sequence,
        previous if any(previous) else b"",
        tenant[:tenant_bytes],
        expires_at,
        tiers,
    )


class SlotTable:
    """The table of the running tierd. Owns ``descriptor``, which is open for reading and writing.

    ``recovered``: records of the previous tierd, oldest first. ``rejected``: numbers of records
    that cannot be used, by reason. ``layout``: of the pool whose slots it names; None: one part.
    May be created on any thread; after that only the store's thread uses it. The constructor raises
    ``OSError`` if the file cannot be read or written; a later record that cannot be written is
    missing.
    """

    def __init__(
        self, descriptor: int, identity: TableIdentity, namespaces: Iterable[str] | None = None
    ) -> None:
        """``namespaces``: the namespaces whose objects may be recovered; None: all."""
        self.rejected: Counter[str] = Counter()
        self.recovered: list[SlotRecord] = []
        self.layout: PoolLayout | None = None
        self._descriptor = descriptor
        self._identity = identity
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []
        self._next = 0
        self._sequence = 0
        self._max_records = (slot_table_bytes(identity.pool_bytes) - HEADER_BYTES) // RECORD_BYTES
        word, why = self._read_header(identity)
        if word is None:
            if why:
                self.rejected[why] = sum(1 for _ in self._pieces())
            self._word = secrets.token_bytes(DIGEST_BYTES)
            # The header first: it invalidates the old records, whether the file is truncated or
            # not.
            self._write_header(identity)
            os.ftruncate(descriptor, HEADER_BYTES)
        else:
            self._word = word
            self._recover(None if namespaces is None else set(namespaces))
            self._write_header(identity)

    def _read_header(self, now: TableIdentity) -> tuple[bytes | None, str]:
        """The random word of the existing table, if it belongs to this pool; else None and why
        (empty: there is none)."""
        data = os.pread(self._descriptor, HEADER_BYTES, 0)
        if not data:
            return None, ""
        try:
            magic, length = _PREFIX.unpack_from(data)
            text = data[_PREFIX.size : _PREFIX.size + length]
            end = _PREFIX.size + length
            if (
                magic != _MAGIC
                or blake3_digest(data[:end], DIGEST_BYTES) != data[end : end + DIGEST_BYTES]
            ):
                return None, "header"
            document = json.loads(text)
            if document["format"] not in (FORMAT, FORMAT_OF_PARTS):
                return None, "format"
            was = TableIdentity(
                int(document["poolBytes"]), int(document["poolInode"]), str(document["topology"])
            )
            word = bytes.fromhex(document["word"])
            layout = None
            if document["format"] == FORMAT_OF_PARTS:
                layout = PoolLayout(int(document["parts"]), int(document["partBytes"]))
        except (struct.error, ValueError, KeyError, TypeError):
            return None, "header"
        why = was.difference(now)
        if layout is not None and not (layout.parts > 1 and layout.fits(now.pool_bytes)):
            why = why or "layout"
        if why:
            return None, why
        self.layout = layout
        return word, ""

    def _write_header(self, identity: TableIdentity) -> None:
        layout = self.layout
        document = {
            "format": FORMAT if layout is None else FORMAT_OF_PARTS,
            "poolBytes": identity.pool_bytes,
            "poolInode": identity.pool_inode,
            "topology": identity.topology,
            "word": self._word.hex(),
        }
        if layout is not None:
            document |= {"parts": layout.parts, "partBytes": layout.part_bytes}
        text = json.dumps(document).encode()
        data = _PREFIX.pack(_MAGIC, len(text)) + text
        data += blake3_digest(data, DIGEST_BYTES)
        os.pwrite(self._descriptor, data.ljust(HEADER_BYTES, b"\0"), 0)

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of each record that is not empty."""
        number = 0
        while True:
            data = os.pread(
                self._descriptor,
                _PIECE_RECORDS * RECORD_BYTES,
                HEADER_BYTES + number * RECORD_BYTES,
            )
            for start in range(0, len(data), RECORD_BYTES):
                piece = data[start : start + RECORD_BYTES]
                if piece.strip(b"\0"):
                    yield number, piece
                number += 1
            if len(data) < _PIECE_RECORDS * RECORD_BYTES:
                return

    def _recover(self, namespaces: set[str] | None) -> None:
        used: set[int] = set()
        for number, data in self._pieces():
            record = decode_record(data, self._word)
            if record is None:
                self.rejected["damaged"] += 1
            elif namespaces is not None and record.namespace not in namespaces:
                self.rejected["namespace"] += 1
            elif record.offset in self._numbers:
                self.rejected["overlap"] += 1
            else:
                self.recovered.append(record)
                self._numbers[record.offset] = number
                used.add(number)
                continue
            self._write(number, _EMPTY)
        self.recovered.sort(key=lambda record: record.sequence)
        self._sequence = self.recovered[-1].sequence if self.recovered else 0
        self._next = max(used, default=-1) + 1
        self._free = [number for number in range(self._next) if number not in used]

    def _write(self, number: int, data: bytes) -> None:
        if os.pwrite(self._descriptor, data, HEADER_BYTES + number * RECORD_BYTES) != len(data):
            raise OSError(errno.ENOSPC, "a record of the slot table is truncated")

    def __len__(self) -> int:
        return len(self._numbers)

    def take_recovered(self) -> list[SlotRecord]:
        """Returns ``recovered`` and empties it."""
        taken, self.recovered = self.recovered, []
        return taken

    def take_rejected(self) -> Counter[str]:
        """Returns ``rejected`` and empties it."""
        taken, self.rejected = self.rejected, Counter()
        return taken

    def lay_out(self, layout: PoolLayout | None) -> bool:
        """Records another layout of the pool, for a table without records. None: one part. False if
        that failed: then the pool keeps the layout, and the records of this tierd may be lost."""
        previous = self.layout, self._word
        # A record that could not be erased is void with the old word.
        self.layout, self._word = layout, secrets.token_bytes(DIGEST_BYTES)
        try:
            self._write_header(self._identity)
        except OSError:
            self.layout, self._word = previous
            return False
        return True

    def add(self, record: SlotRecord) -> str:
        """Writes a record, with the next sequence number, for a slot without one. Returns why it
        failed: "full", "no_space"; else empty."""
        if self._free:
            number = self._free.pop()
        elif self._next < self._max_records:
            number, self._next = self._next, self._next + 1
        else:
            return "full"
        self._sequence += 1
        data = encode_record(replace(record, sequence=self._sequence), self._word)
        try:
            self._write(number, data)
        except OSError:
            self._free.append(number)
            return "no_space"
        self._numbers[record.offset] = number
        return ""

    def erase(self, offset: int) -> str:
        """Erases the record of a slot, if there is one. Returns why it failed, else empty.
        Overwriting needs no space."""
        number = self._numbers.pop(offset, None)
        if number is None:
            return ""
        try:
            self._write(number, _EMPTY)
        except OSError:
            return "not_erased"
        self._free.append(number)
        return ""

    def close(self) -> None:
        """Closes the file and keeps its content."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
