"""The file format: a written object is read, and any change is detected."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import TierCorruptError, TierError, TierForeignError, TierUnverifiableError
from kvtier.testing.objects import buffer, make_object
from kvtier.tiers import checksum
from kvtier.tiers.base import ObjectMeta, ObjectRef, aligned
from kvtier.tiers.checksum import Blake3, Xxh3
from kvtier.tiers.filesystem.format import (
    HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_SHARDS,
    VERSIONS,
    clear_padding,
    read_header,
    verify_payload,
    write_header,
)
from kvtier.tiers.filesystem.walker import object_path

namespaces = st.binary(min_size=16, max_size=16).map(bytes.hex)
keys = st.binary(min_size=1, max_size=MAX_KEY_BYTES)
shard_lists = st.lists(st.integers(1, 9_000), min_size=1, max_size=4).map(tuple)
KINDS = {each.kind: each for each in (Xxh3(), Blake3())}


def pack(
    ref: ObjectRef, shards: tuple[int, ...], kind: str, fill: int
) -> tuple[memoryview, memoryview, ObjectMeta]:
    payload = buffer(sum(aligned(size) for size in shards))
    payload[:] = bytes([fill]) * payload.nbytes
    digests, start = [], 0
    for size in shards:
        digests.append(KINDS[kind].digest(payload[start : start + size]))
        start += aligned(size)
    meta = ObjectMeta(shards, kind, tuple(digests))
    clear_padding(payload, meta)
    header = memoryview(bytearray(HEADER_BYTES))
    write_header(header, ref, meta)
    return header, payload, meta


@settings(deadline=None)
@given(
    namespace=namespaces,
    key=keys,
    shards=shard_lists,
    kind=st.sampled_from(sorted(KINDS)),
    fill=st.integers(0, 255),
)
def test_written_documents_are_read_back(
    namespace: str, key: bytes, shards: tuple[int, ...], kind: str, fill: int
) -> None:
    ref = ObjectRef(namespace, key)
    header, payload, meta = pack(ref, shards, kind, fill)
    assert read_header(header, ref, payload.nbytes) == meta
    verify_payload(payload, meta)


@given(previous=st.binary(max_size=MAX_KEY_BYTES))
def test_a_header_tells_what_the_object_follows(previous: bytes) -> None:
    ref = ObjectRef("5" * 32, b"\x00key")
    header, payload, meta = pack(ref, (100,) * MAX_SHARDS, Blake3.kind, 1)
    write_header(header, ref, replace(meta, previous=previous))
    assert read_header(header, ref, payload.nbytes).previous == previous


@pytest.mark.parametrize("expires_at", [0, 2_000_000_000])
@pytest.mark.parametrize("limited", [False, True])
def test_a_header_tells_whether_the_object_is_limited_to_tiers(
    limited: bool, expires_at: int
) -> None:
    ref = ObjectRef("5" * 32, b"\x00key")
    header, payload, meta = pack(ref, (100,), Blake3.kind, 1)
    write_header(header, ref, replace(meta, limited=limited, expires_at=expires_at))
    found = read_header(header, ref, payload.nbytes)
    assert (found.limited, found.expires_at) == (limited, expires_at)


@settings(deadline=None)
@given(
    shards=shard_lists,
    kind=st.sampled_from(sorted(KINDS)),
    fill=st.integers(0, 255),
    place=st.floats(0, 1, exclude_max=True),
    change=st.integers(1, 255),
)
def test_a_change_of_any_byte_is_detected(
    shards: tuple[int, ...], kind: str, fill: int, place: float, change: int
) -> None:
    ref = ObjectRef("5" * 32, b"\x00key")
    header, payload, _ = pack(ref, shards, kind, fill)
    offset = int(place * (HEADER_BYTES + payload.nbytes))
    part, offset = (header, offset) if offset < HEADER_BYTES else (payload, offset - HEADER_BYTES)
    part[offset] ^= change
    with pytest.raises(TierError):
        verify_payload(payload, read_header(header, ref, payload.nbytes))


@settings(deadline=None)
@given(namespace=namespaces, key=keys, other=st.tuples(namespaces, keys))
def test_an_object_verifies_only_under_its_own_name(
    namespace: str, key: bytes, other: tuple[str, bytes]
) -> None:
    header, payload, _ = pack(ObjectRef(namespace, key), (100,), Blake3.kind, 1)
    if other != (namespace, key):
        with pytest.raises(TierCorruptError, match="another object"):
            read_header(header, ObjectRef(*other), payload.nbytes)


def test_keys_that_differ_by_zeros_at_the_end_are_different_objects() -> None:
    header, payload, _ = pack(ObjectRef("1" * 32, b"\x01\x02"), (100,), Blake3.kind, 1)
    with pytest.raises(TierCorruptError, match="another object"):
        read_header(header, ObjectRef("1" * 32, b"\x01\x02\x00"), payload.nbytes)


@given(
    seed=st.integers(0, 1 << 32), start=st.sampled_from([b"", b"KVTIEROB", b"KVTIEROB\x01\x00\x02"])
)
def test_random_bytes_are_not_a_header(seed: int, start: bytes) -> None:
    data = start + random.Random(seed).randbytes(HEADER_BYTES - len(start))
    with pytest.raises((TierCorruptError, TierForeignError)):
        read_header(memoryview(data), ObjectRef("0" * 32, b"\x00"), 4_096)


@pytest.mark.parametrize("offset", [8, 9])
def test_another_format_version_is_foreign_not_corrupt(offset: int) -> None:
    ref = ObjectRef("2" * 32, b"\x00k")
    header, payload, meta = pack(ref, (100,), Blake3.kind, 1)
    header[offset] += len(VERSIONS)
    header[-16:] = KINDS[meta.checksum_kind].digest(header[:-16])
    with pytest.raises(TierForeignError, match="version"):
        read_header(header, ref, payload.nbytes)


@pytest.mark.parametrize("offset", [8, 9])
def test_a_damaged_version_field_is_corrupt_not_foreign(offset: int) -> None:
    ref = ObjectRef("2" * 32, b"\x00k")
    header, payload, _ = pack(ref, (100,), Blake3.kind, 1)
    header[offset] ^= 0x40
    with pytest.raises(TierCorruptError, match="version"):
        read_header(header, ref, payload.nbytes)


@pytest.mark.parametrize("place", [5_000, 8_191])
def test_nonzero_padding_is_detected(place: int) -> None:
    _, payload, meta = make_object(1, (5_000, 100))
    verify_payload(payload, meta)
    payload[place] = 1
    with pytest.raises(TierCorruptError, match="padding after shard 0"):
        verify_payload(payload, meta)


@pytest.mark.parametrize(
    ("ref", "shards", "kind", "text"),
    [
        (ObjectRef("0" * 32, b""), (1,), Blake3.kind, "key of 0 bytes"),
        (ObjectRef("0" * 32, bytes(MAX_KEY_BYTES + 1)), (1,), Blake3.kind, "key of 65 bytes"),
        (ObjectRef("0" * 32, b"\x00"), (), Blake3.kind, "0 shards"),
        (ObjectRef("0" * 32, b"\x00"), (1,) * (MAX_SHARDS + 1), Blake3.kind, "65 shards"),
        (ObjectRef("0" * 32, b"\x00"), (1,), "crc32", "checksum kind 'crc32'"),
    ],
)
def test_objects_that_the_format_cannot_hold_are_rejected(
    ref: ObjectRef, shards: tuple[int, ...], kind: str, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        write_header(
            memoryview(bytearray(HEADER_BYTES)),
            ref,
            ObjectMeta(shards, kind, (bytes(16),) * len(shards)),
        )


def test_a_header_holds_the_most_shards_and_the_longest_key() -> None:
    ref = ObjectRef("9" * 32, bytes(range(MAX_KEY_BYTES)))
    header, payload, meta = pack(ref, (10,) * MAX_SHARDS, Xxh3.kind, 7)
    assert read_header(header, ref, payload.nbytes) == meta


def test_without_xxhash_its_objects_are_misses_and_new_ones_use_blake3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ref = ObjectRef("3" * 32, b"\x00k")
    foreign, payload, _ = pack(ref, (100,), Xxh3.kind, 1)
    own, _, meta = pack(ref, (100,), Blake3.kind, 1)
    monkeypatch.setattr(checksum, "_HAS_XXHASH", False)
    assert checksum.preferred().kind == Blake3.kind
    with pytest.raises(TierUnverifiableError, match="is not available"):
        read_header(foreign, ref, payload.nbytes)
    assert read_header(own, ref, payload.nbytes) == meta
    with pytest.raises(ValueError, match="checksum kind"):
        write_header(own, ref, ObjectMeta((100,), Xxh3.kind, (bytes(16),)))


@given(namespace=namespaces, key=keys)
def test_a_path_has_two_levels_of_two_hex_digits_and_ends_with_the_key(
    namespace: str, key: bytes
) -> None:
    path = Path(object_path("/root", namespace, key))
    first, second = path.parts[-3:-1]
    assert path.parts[:-3] == ("/", "root", namespace)
    assert (len(first), len(second), path.name) == (2, 2, f"{key.hex()}.kv")
    assert int(first + second, 16) >= 0
