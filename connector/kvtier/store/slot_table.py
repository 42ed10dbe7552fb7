"""The slot table: which sealed object lies in which slot of the pool, for the tierd that comes after this one.

A file beside the pool, in memory like it::

    0       header: magic, its length, JSON (format, pool, topology, a random word), BLAKE3 over all that
    4096    records of ``RECORD_BYTES`` each, in no order; anything that does not prove itself is none

A record is written when its object has been sealed and erased before its slot is given away, so whenever this process dies, what the
table names is a slot that held exactly that object. It carries a digest over itself and the header's random word: what was half-written,
or is of an earlier table in the same file, is not believed. And what it names is not believed either before the bytes in the slot have
the digest that the record has (kept.py).
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
from kvtier.tiers.base import ALIGNMENT_BYTES, ObjectMeta

FORMAT = 1
HEADER_BYTES = 4096
DIGEST_BYTES = 16
RECORD_BYTES = 160
MIN_TABLE_BYTES = 256 << 10
MAX_TABLE_BYTES = 64 << 20
"""400,000 objects: 64 GiB of 160 KiB each, where a chunk of 256 tokens has a hundred times that."""
TABLE_SHARE = 1024
"""A table has at most a thousandth of the pool's bytes, within the two limits above."""
_MAGIC = b"KVTSLOTS"
_PREFIX = struct.Struct("<8sI")
_RECORD = struct.Struct("<4sBBBxQQIIQ16s16s64s")
_RECORD_MAGIC = b"slot"
_DIGEST_AT = RECORD_BYTES - DIGEST_BYTES
_EMPTY = bytes(RECORD_BYTES)
_KINDS = ("xxh3-128", "blake3")
_MAX_KEY_BYTES = 64
_PIECE_RECORDS = 4096


def slot_table_bytes(pool_bytes: int) -> int:
    """How large the table of a pool may become."""
    return min(max(pool_bytes // TABLE_SHARE, MIN_TABLE_BYTES), MAX_TABLE_BYTES)


def object_digest(meta: ObjectMeta) -> bytes:
    """One digest for all shards of an object: that of their checksums."""
    return blake3_digest(b"".join(meta.checksums), DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class SlotLocation:
    """A slot, and the run of equal slots that it belongs to."""

    offset: int
    slot_bytes: int
    segment_start: int
    segment_slots: int


class ReadLog(Protocol):
    """Where tierd notes the slots that it reads into, for the case that it dies and a thread of it does not."""

    def begin(self, place: SlotLocation) -> bool:
        """A read is about to begin; False if it must not."""
        ...

    def end(self, offset: int) -> None:
        """The read has returned, or will not begin."""
        ...


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One sealed object. ``segment_start`` and ``segment_slots``: the run of equal slots that its slot belongs to;
    ``digest``: ``object_digest``; ``sequence`` rises with every record that is written."""

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


@dataclass(frozen=True, slots=True)
class TableIdentity:
    """What a table is about. ``pool_inode``: of the pool's file; ``topology``: digest of the structural document."""

    pool_bytes: int
    pool_inode: int
    topology: str

    def difference(self, now: TableIdentity) -> str:
        """Why nothing of a pool that was this is taken over into ``now``; empty if it is. A pool may have grown."""
        if self.pool_inode != now.pool_inode:
            return "pool_file"
        if self.topology != now.topology:
            return "topology"
        return "pool_size" if self.pool_bytes > now.pool_bytes else ""


def encode_record(record: SlotRecord, word: bytes) -> bytes:
    """A record as it stands in the table whose random word this is."""
    body = _RECORD.pack(
        _RECORD_MAGIC,
        _KINDS.index(record.checksum_kind),
        len(record.key),
        record.shards,
        record.offset,
        record.segment_start,
        record.segment_slots,
        record.slot_bytes // ALIGNMENT_BYTES,
        record.sequence,
        bytes.fromhex(record.namespace),
        record.digest,
        record.key,
    ).ljust(_DIGEST_AT, b"\0")
    return body + blake3_digest(word + body, DIGEST_BYTES)


def decode_record(data: bytes, word: bytes) -> SlotRecord | None:
    """The record, or None if this is none of this table, or not a whole one."""
    body = data[:_DIGEST_AT]
    if len(data) != RECORD_BYTES or blake3_digest(word + body, DIGEST_BYTES) != data[_DIGEST_AT:]:
        return None
    fields = _RECORD.unpack_from(body)
    _, kind, key_bytes, shards, offset, start, slots, pages, sequence, namespace, digest, key = (
        fields
    )
    if kind >= len(_KINDS) or key_bytes > _MAX_KEY_BYTES:
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
    )


class SlotTable:
    """The table of the living tierd. ``descriptor`` is open for reading and writing and belongs to the table.

    ``recovered``: what the last tierd left, oldest first; ``refused``: what was not taken from it, by reason. Made on any thread,
    afterwards used by the store's owner alone. Raises ``OSError`` where the file cannot be read or written at all; later on a record
    that cannot be written is just not there.
    """

    def __init__(
        self, descriptor: int, identity: TableIdentity, namespaces: Iterable[str] | None = None
    ) -> None:
        """``namespaces``: those whose objects may be taken over; None: all."""
        self.rejected: Counter[str] = Counter()
        self.recovered: list[SlotRecord] = []
        self._descriptor = descriptor
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
            # First the header: from then on nothing of the old table proves itself, whether it is cut off or not.
            self._write_header(identity)
            os.ftruncate(descriptor, HEADER_BYTES)
        else:
            self._word = word
            self._recover(None if namespaces is None else set(namespaces))
            self._write_header(identity)

    def _read_header(self, now: TableIdentity) -> tuple[bytes | None, str]:
        """The random word of the table that is there, if it is of this pool; else None and why (empty: there is none)."""
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
            if document["format"] != FORMAT:
                return None, "format"
            was = TableIdentity(
                int(document["poolBytes"]), int(document["poolInode"]), str(document["topology"])
            )
            word = bytes.fromhex(document["word"])
        except (struct.error, ValueError, KeyError, TypeError):
            return None, "header"
        why = was.difference(now)
        return (None, why) if why else (word, "")

    def _write_header(self, identity: TableIdentity) -> None:
        document = {
            "format": FORMAT,
            "poolBytes": identity.pool_bytes,
            "poolInode": identity.pool_inode,
            "topology": identity.topology,
            "word": self._word.hex(),
        }
        text = json.dumps(document).encode()
        data = _PREFIX.pack(_MAGIC, len(text)) + text
        data += blake3_digest(data, DIGEST_BYTES)
        os.pwrite(self._descriptor, data.ljust(HEADER_BYTES, b"\0"), 0)

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of everything in the table that is not empty."""
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
            raise OSError(errno.ENOSPC, "a record of the slot table was cut off")

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, record: SlotRecord) -> str:
        """Writes a record, under a sequence number of its own, for a slot that has none; or says why not: "full", "no_space"."""
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
        """The slot is about to be given away; or says why its record stays. It overwrites what is there, so want of room is no reason."""
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
        """Closes the file; what is in it stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
