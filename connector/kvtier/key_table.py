"""A map from keys to numbers that takes about 50 bytes for a key of 33.

A dictionary takes three times that: an object for each key and one for each number. Here the
records of all keys with the same hash modulo 65,536 are in one array of bytes, which is searched by
the interpreter's ``find``. Growing moves one such array, so no call is slow, however many keys
there are.

Numbers are from 1 to 2^32 - 1. One thread at a time may change the table; ``get`` and ``parts`` may
be called from any thread meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

_BUCKETS = 1 << 16
_VALUE_BYTES = 4


class KeyTable:
    """Numbers by key. Keys of each length have 65,536 buckets of their own."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[bytearray | None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def longest_bytes(self) -> int:
        """Length of the longest key that the table has, or has had; 0 if it never had any."""
        return max(self._buckets, default=0)

    def get(self, key: bytes) -> int:
        """The number of the key; 0 if it has none."""
        buckets = self._buckets.get(len(key))
        records = buckets[hash(key) % _BUCKETS] if buckets is not None else None
        if records is None:
            return 0
        # A copy, because another thread may remove a record between the two steps.
        data = bytes(records)
        at = _find(data, key)
        return 0 if at < 0 else _value(data, at + len(key))

    def set(self, key: bytes, value: int) -> None:
        """Sets the number of the key."""
        size = len(key)
        buckets = self._buckets.get(size)
        if buckets is None:
            buckets = self._buckets[size] = [None] * _BUCKETS
        number = hash(key) % _BUCKETS
        records = buckets[number]
        if records is None:
            records = buckets[number] = bytearray()
        at = _find(records, key)
        data = value.to_bytes(_VALUE_BYTES, "little")
        if at < 0:
            records += key + data
            self._count += 1
        else:
            records[at + size : at + size + _VALUE_BYTES] = data

    def add(self, key: bytes, value: int) -> None:
        """Sets the number of a key that has none. Saves the search of ``set``."""
        buckets = self._buckets.get(len(key))
        records = buckets[hash(key) % _BUCKETS] if buckets is not None else None
        if records is None:
            self.set(key, value)
            return
        records += key + value.to_bytes(_VALUE_BYTES, "little")
        self._count += 1

    def change_bits(self, key: bytes, bits: int, present: bool) -> bool:
        """Sets or clears bits of the key's number; a number of 0 is no number. False if they were
        set or clear before. One search instead of two."""
        size = len(key)
        buckets = self._buckets.get(size)
        number = hash(key) % _BUCKETS
        records = buckets[number] if buckets is not None else None
        at = -1 if records is None else _find(records, key)
        if records is None or at < 0:
            if present:
                self.set(key, bits)
            return present
        before = _value(records, at + size)
        after = before | bits if present else before & ~bits
        if not after:
            self.pop(key)
        elif after != before:
            records[at + size : at + size + _VALUE_BYTES] = after.to_bytes(_VALUE_BYTES, "little")
        return after != before

    def clear_part(self, buckets: int) -> bool:
        """Removes the keys of up to ``buckets`` buckets. False if the table is empty: freeing all
        of a large table at once takes long."""
        for size, lists in list(self._buckets.items()):
            del lists[-buckets:]
            if lists:
                return True
            del self._buckets[size]
        self._count = 0
        return False

    def pop(self, key: bytes) -> int:
        """Removes the key and returns its number; 0 if it has none."""
        buckets = self._buckets.get(len(key))
        number = hash(key) % _BUCKETS
        records = buckets[number] if buckets is not None else None
        if buckets is None or records is None:
            return 0
        at = _find(records, key)
        if at < 0:
            return 0
        value = _value(records, at + len(key))
        del records[at : at + len(key) + _VALUE_BYTES]
        if not records:
            buckets[number] = None
        self._count -= 1
        return value

    def place(self, key: bytes) -> tuple[int, int]:
        """Where the key is: its length and its bucket, for ``key_at``."""
        return len(key), hash(key) % _BUCKETS

    def key_at(self, size: int, bucket: int, value: int) -> bytes:
        """The key of a number, which no other key of that place has. Raises ``KeyError``."""
        records = self._buckets[size][bucket] or b""
        stride = size + _VALUE_BYTES
        for at in range(0, len(records), stride):
            if _value(records, at + size) == value:
                return bytes(records[at : at + size])
        raise KeyError(value)

    def parts(self) -> Iterator[list[tuple[bytes, int]]]:
        """All keys with their numbers, a few at a time. A key that is there all the while is
        returned once; others may or may not be."""
        for size, buckets in list(self._buckets.items()):
            stride = size + _VALUE_BYTES
            for records in buckets:
                if records is not None:
                    data = bytes(records)
                    yield [
                        (data[at : at + size], _value(data, at + size))
                        for at in range(0, len(data), stride)
                    ]


def _find(records: bytes | bytearray, key: bytes) -> int:
    stride = len(key) + _VALUE_BYTES
    at = records.find(key)
    while at >= 0 and at % stride:
        at = records.find(key, at + 1)
    return at


def _value(records: bytes | bytearray, at: int) -> int:
    return int.from_bytes(records[at : at + _VALUE_BYTES], "little")
