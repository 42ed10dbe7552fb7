"""Large objects are verified while they are being read, with the same results."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tiers.test_file_tier import make

from kvtier.errors import TierCorruptError, TierError, TierUnavailableError, TierUntrustedError
from kvtier.testing.objects import buffer, make_object
from kvtier.tiers.base import ObjectMeta, ObjectRef, TierLimits, aligned
from kvtier.tiers.checksum import by_kind
from kvtier.tiers.filesystem import FileSystemTier, overlap
from kvtier.tiers.filesystem.format import HEADER_BYTES, PayloadVerifier, verify_payload
from kvtier.tiers.filesystem.overlap import MIN_BYTES, piece_bytes

SHARDS = (3_000_001, 1, 4096, 2_500_000)
PAYLOAD_BYTES = sum(map(aligned, SHARDS))
OBJECT = make_object(7, SHARDS)
DAMAGED = (0, 150, 3_000_000, 3_000_001, 3_004_000, aligned(3_000_001), PAYLOAD_BYTES - 1)


@pytest.fixture
def tier(tmp_path: Path) -> Any:
    found = make(tmp_path, TierLimits(1 << 28))
    found.open(lambda *_: None)
    yield found
    found.close()


def verified(tier: FileSystemTier) -> int:
    return tier._files.overlapped.verified


def stored(tier: FileSystemTier) -> Path:
    tier.write(*OBJECT)
    return Path(tier._path(OBJECT[0]))


def test_a_large_object_is_verified_while_it_is_read(tier: FileSystemTier) -> None:
    stored(tier)
    into = buffer(PAYLOAD_BYTES)
    assert tier.read(OBJECT[0], into) == OBJECT[2]
    assert into == OBJECT[1]
    assert verified(tier) == 1
    small = make_object(8, (4096,))
    tier.write(*small)
    tier.read(small[0], buffer(4096))
    assert verified(tier) == 1


def test_beside_another_one_it_is_verified_when_it_was_read(tier: FileSystemTier) -> None:
    stored(tier)
    into = buffer(PAYLOAD_BYTES)
    assert tier._files.overlapped.take()
    assert tier.read(OBJECT[0], into) == OBJECT[2]
    assert (into, verified(tier)) == (OBJECT[1], 0)
    tier._files.overlapped.give()
    tier.read(OBJECT[0], into)
    assert verified(tier) == 1


@pytest.mark.parametrize("at", [-HEADER_BYTES, -HEADER_BYTES + 300, *DAMAGED])
def test_a_flipped_byte_is_found_and_the_file_removed(tier: FileSystemTier, at: int) -> None:
    path = stored(tier)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + at)
        byte = file.read(1)[0]
        file.seek(HEADER_BYTES + at)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(TierCorruptError):
        tier.read(OBJECT[0], buffer(PAYLOAD_BYTES))
    assert not path.exists()
    assert verified(tier) == 0
    assert tier._files.overlapped.take(), "the thread is free again"


def test_a_file_that_is_cut_while_it_is_read_is_corrupt(
    tier: FileSystemTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = stored(tier), os.preadv

    def cut(*arguments: Any) -> int:
        found = read(*arguments)
        os.truncate(path, HEADER_BYTES + MIN_BYTES)
        return found

    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(TierCorruptError):
        tier.read(OBJECT[0], buffer(PAYLOAD_BYTES))
    assert tier._files.overlapped.take()


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_an_error_in_the_middle(
    tier: FileSystemTier, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """A stale file is opened again. After any other error the thread is free, and has ended its
    work on the memory."""
    stored(tier)
    read, calls = os.preadv, []

    def failing(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(error, os.strerror(error))
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    into = buffer(PAYLOAD_BYTES)
    if error == errno.EIO:
        with pytest.raises(TierUnavailableError):
            tier.read(OBJECT[0], into)
    tier.read(OBJECT[0], into)
    assert into == OBJECT[1]
    assert verified(tier) == (1 if error == errno.EIO else 0)
    assert tier._files.overlapped.take()


def test_an_encrypted_object_is_not_usable_without_keys(
    tier: FileSystemTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tier)
    fixed = overlap.read_fixed

    def encrypted(*arguments: Any) -> Any:
        found = fixed(*arguments)
        monkeypatch.setattr(type(found), "encrypted", property(lambda _: True))
        return found

    monkeypatch.setattr(overlap, "read_fixed", encrypted)
    with pytest.raises(TierUntrustedError):
        tier.read(OBJECT[0], buffer(PAYLOAD_BYTES))


def test_pieces_are_few_and_not_small() -> None:
    for size in (MIN_BYTES, 3 << 20, 16 << 20, 64 << 20, 1 << 30):
        assert piece_bytes(size) % 4096 == 0
        assert 2 <= -(-size // piece_bytes(size)) <= 16


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=6),
    ends=st.lists(st.integers(0, 40), max_size=8),
    damage=st.none() | st.integers(0, 1 << 20),
    kind=st.sampled_from(["xxh3-128", "blake3"]),
)
def test_piece_by_piece_finds_what_the_whole_finds(
    sizes: list[int], ends: list[int], damage: int | None, kind: str
) -> None:
    checksum = by_kind(kind)
    assert checksum is not None
    payload = buffer(max(sum(map(aligned, sizes)), 4096))
    start, digests = 0, []
    for number, size in enumerate(sizes):
        payload[start : start + size] = bytes([number + 1]) * size
        digests.append(checksum.digest(payload[start : start + size]))
        start += aligned(size)
    payload = payload[:start]
    if damage is not None and start:
        payload[damage % start] ^= 1
    meta = ObjectMeta(tuple(sizes), kind, tuple(digests))

    def outcome(verify: Any) -> str:
        try:
            verify()
        except TierError as error:
            return str(error)
        return ""

    def pieces() -> None:
        verifier = PayloadVerifier(payload, meta, checksum)
        for end in sorted({min(each * 4096, start) for each in ends} | {start}):
            verifier.advance(end)
        verifier.finish()

    assert outcome(pieces) == outcome(lambda: verify_payload(payload, meta))


def test_what_has_not_been_read_to_its_end_is_corrupt() -> None:
    _, payload, meta = OBJECT
    checksum = by_kind(meta.checksum_kind)
    assert checksum is not None
    verifier = PayloadVerifier(payload, meta, checksum)
    verifier.advance(PAYLOAD_BYTES - 4096)
    with pytest.raises(TierCorruptError, match="not complete"):
        verifier.finish()


def test_the_object_of_another_name_is_corrupt(tier: FileSystemTier) -> None:
    path = stored(tier)
    other = ObjectRef(OBJECT[0].namespace, OBJECT[0].key[:-1] + b"\xee")
    os.makedirs(os.path.dirname(tier._path(other)), exist_ok=True)
    os.link(path, tier._path(other))
    with pytest.raises(TierCorruptError):
        tier.read(other, buffer(PAYLOAD_BYTES))
