"""Sealed objects: what is proven is served, everything else is a miss and stays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import (
    KVTierError,
    TierCorruptError,
    TierError,
    TierForeignError,
    TierKeyMissingError,
    TierUntrustedError,
)
from kvtier.testing.objects import NAMESPACE, buffer, make_object
from kvtier.tiers.base import ObjectMeta, ObjectRef, TierLimits
from kvtier.tiers.checksum import by_kind
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.format import DIGEST_AT, HEADER_BYTES, finish_header
from kvtier.tiers.filesystem.seal import PIECE_BYTES, Sealing, require_cipher
from kvtier.tiers.filesystem.unusable import RETRY_SECONDS
from kvtier.tiers.filesystem.walker import object_path
from kvtier.tiers.isolation_keys import KeySet, make_key_set

MATERIAL = {"old": b"o" * 32, "new": b"n" * 32, "other": b"x" * 32}
Change = tuple[str, bytes, bool]


def keys(current: str, *others: str) -> KeySet:
    entries = {name: MATERIAL[name] for name in (current, *others)}
    found = make_key_set({**entries, "current": current.encode()})
    assert found is not None
    return found


class Tenant:
    """A process with the directory open. ``keys`` may be replaced; None: the Secret is gone."""

    def __init__(self, root: Path, found: KeySet | None, encrypt: bool = False) -> None:
        self.now = 0.0
        self.key_set: KeySet | None = found
        self.changes: list[Change] = []
        document = FileSystemTierDocument(name="disk", path=str(root), sharing="Pod")
        self.tier = FileSystemTier(
            document,
            TierLimits(1 << 30),
            clock=lambda: self.now,
            sealing=Sealing(self._keys, encrypt),
        )

    def _keys(self) -> KeySet:
        if self.key_set is None:
            raise TierKeyMissingError("no Secret")
        return self.key_set

    def read(self, ref: ObjectRef, payload: memoryview) -> memoryview:
        into = buffer(payload.nbytes)
        self.tier.read(ref, into)
        return into


@contextmanager
def tenant(root: Path, found: KeySet | None, encrypt: bool = False) -> Iterator[Tenant]:
    made = Tenant(root, found, encrypt)
    made.tier.open(lambda *change: made.changes.append(change))
    try:
        yield made
    finally:
        made.tier.close()


def unkeyed(root: Path) -> FileSystemTier:
    document = FileSystemTierDocument(name="disk", path=str(root), sharing="Pod")
    tier = FileSystemTier(document, TierLimits(1 << 30))
    tier.open(lambda *_: None)
    return tier


def file_of(root: Path, ref: ObjectRef) -> Path:
    return Path(object_path(str(root), ref.namespace, ref.key))


def rewrite(path: Path, change: Callable[[bytearray], None], finish: bool = True) -> bytes:
    """Changes a file as a process with access to the directory can: with valid checksums."""
    content = bytearray(path.read_bytes())
    change(content)
    checksum = by_kind("xxh3-128" if content[10] == 1 else "blake3")
    assert checksum is not None
    if finish:
        finish_header(memoryview(content), checksum)
    path.write_bytes(content)
    return bytes(content)


def expect_miss(made: Tenant, ref: ObjectRef, payload: memoryview, reason: str) -> None:
    """The object is a miss for the reason, is no longer served, and its file is untouched."""
    root = Path(made.tier.maintenance._directory.root)
    before = file_of(root, ref).read_bytes()
    made.changes.clear()
    with pytest.raises(TierError) as caught:
        made.read(ref, payload)
    assert caught.value.reason == reason
    assert file_of(root, ref).read_bytes() == before
    assert not made.tier.contains(ref)
    assert ref.key not in list(made.tier.keys(ref.namespace))
    assert made.changes == [(ref.namespace, ref.key, False)]


def expect_replaced(made: Tenant, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> None:
    """The engine recomputes and stores; the object is served again, and charged once."""
    before = made.tier.usage()
    made.changes.clear()
    made.tier.write(ref, payload, meta)
    assert made.changes == [(ref.namespace, ref.key, True)]
    assert made.read(ref, payload) == payload
    assert made.tier.usage() == before


SEALS = pytest.mark.parametrize("encrypt", [False, True], ids=["tag", "AES256GCM"])


@SEALS
def test_objects_are_read_with_the_key_of_another_process(tmp_path: Path, encrypt: bool) -> None:
    ref, payload, meta = make_object(1, (5_000, PIECE_BYTES + 4_097))
    with tenant(tmp_path, keys("old"), encrypt) as one:
        one.tier.write(ref, payload, meta)
    with tenant(tmp_path, keys("old"), encrypt) as two:
        assert two.read(ref, payload) == payload
        two.tier.check()


@pytest.mark.parametrize("written_encrypted", [False, True])
def test_encryption_can_be_turned_on_and_off_over_a_directory(
    tmp_path: Path, written_encrypted: bool
) -> None:
    ref, payload, meta = make_object(1)
    with tenant(tmp_path, keys("old"), written_encrypted) as one:
        one.tier.write(ref, payload, meta)
    with tenant(tmp_path, keys("old"), not written_encrypted) as two:
        assert two.read(ref, payload) == payload


def test_encryption_hides_content_sizes_and_checksums(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1, (8_192, 5_000))
    with tenant(tmp_path, keys("old"), encrypt=True) as one:
        one.tier.write(ref, payload, meta)
        assert payload == make_object(1, (8_192, 5_000))[1], "the slot has changed"
    content = file_of(tmp_path, ref).read_bytes()
    assert len(content) == HEADER_BYTES + payload.nbytes
    for secret in (*meta.checksums, bytes(payload[:16]), bytes(payload[8_192:8_208])):
        assert secret not in content
    # Not even the padding and the zeros of the header.
    assert bytes(64) not in content[256:]


def test_two_writes_of_one_object_share_no_ciphertext(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    contents = []
    for name in ("a", "b"):
        with tenant(tmp_path / name, keys("old"), encrypt=True) as one:
            one.tier.write(ref, payload, meta)
        contents.append(file_of(tmp_path / name, ref).read_bytes())
    blocks = [
        {content[at : at + 16] for at in range(256, len(content), 16)} for content in contents
    ]
    assert not blocks[0] & blocks[1]


def test_a_planted_object_without_a_tag_is_a_miss(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    stranger = unkeyed(tmp_path)
    stranger.write(ref, payload, meta)
    stranger.close()
    with tenant(tmp_path, keys("old")) as one:
        expect_miss(one, ref, payload, "unkeyed")
        expect_replaced(one, ref, payload, meta)


@SEALS
def test_an_object_of_another_key_is_a_miss(tmp_path: Path, encrypt: bool) -> None:
    ref, payload, meta = make_object(1)
    with tenant(tmp_path, keys("other"), encrypt) as stranger:
        stranger.tier.write(ref, payload, meta)
    with tenant(tmp_path, keys("old"), encrypt) as one:
        expect_miss(one, ref, payload, "unknown_key")
        expect_replaced(one, ref, payload, meta)


@SEALS
def test_another_key_under_the_same_id_is_a_miss(tmp_path: Path, encrypt: bool) -> None:
    ref, payload, meta = make_object(1)
    with tenant(tmp_path, make_key_set({"old": b"z" * 32}), encrypt) as stranger:
        stranger.tier.write(ref, payload, meta)
    with tenant(tmp_path, keys("old"), encrypt) as one:
        expect_miss(one, ref, payload, "wrong_tag")
        expect_replaced(one, ref, payload, meta)


def _shorten_tag(content: bytearray) -> None:
    content[128:144] = bytes(16)


def _no_tag(content: bytearray) -> None:
    content[112:144] = bytes(32)


def _name_the_key(content: bytearray) -> None:
    content[144:176] = b"old".ljust(32, b"\0")


@pytest.mark.parametrize("change", [_shorten_tag, _no_tag], ids=["half", "zeros"])
def test_a_truncated_tag_is_a_miss(tmp_path: Path, change: Callable[[bytearray], None]) -> None:
    ref, payload, meta = make_object(1)
    with tenant(tmp_path, keys("old")) as one:
        one.tier.write(ref, payload, meta)
        rewrite(file_of(tmp_path, ref), change)
        expect_miss(one, ref, payload, "wrong_tag")


def test_a_planted_object_that_names_the_key_is_a_miss(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    stranger = unkeyed(tmp_path)
    stranger.write(ref, payload, meta)
    stranger.close()
    rewrite(file_of(tmp_path, ref), _name_the_key)
    with tenant(tmp_path, keys("old")) as one:
        expect_miss(one, ref, payload, "wrong_tag")


@SEALS
def test_a_sealed_object_is_not_accepted_under_another_name(tmp_path: Path, encrypt: bool) -> None:
    (ref, payload, meta), (victim, _, _) = make_object(1), make_object(2)
    with tenant(tmp_path, keys("old"), encrypt) as one:
        one.tier.write(ref, payload, meta)

    def rename(content: bytearray) -> None:
        content[41 : 41 + len(victim.key)] = victim.key

    target = file_of(tmp_path, victim)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(file_of(tmp_path, ref).read_bytes())
    rewrite(target, rename)
    with tenant(tmp_path, keys("old"), encrypt) as one:
        expect_miss(one, victim, payload, "wrong_tag")
        assert one.read(ref, payload) == payload


@pytest.mark.parametrize("place", [40, 116, 150, 180, 210, 230, 300, 4_000, 4_096, -1])
def test_a_change_of_an_encrypted_object_is_detected(tmp_path: Path, place: int) -> None:
    ref, payload, meta = make_object(1)

    def flip(content: bytearray) -> None:
        content[place] ^= 1

    with tenant(tmp_path, keys("old"), encrypt=True) as one:
        one.tier.write(ref, payload, meta)
        rewrite(file_of(tmp_path, ref), flip)
        with pytest.raises((TierUntrustedError, TierCorruptError)):
            one.read(ref, payload)


@pytest.mark.parametrize("place", [300, DIGEST_AT + 1, HEADER_BYTES + 7])
def test_a_tagged_object_that_contradicts_its_checksums_is_removed(
    tmp_path: Path, place: int
) -> None:
    ref, payload, meta = make_object(1)

    def flip(content: bytearray) -> None:
        content[place] ^= 1

    with tenant(tmp_path, keys("old")) as one:
        one.tier.write(ref, payload, meta)
        rewrite(file_of(tmp_path, ref), flip, finish=False)
        with pytest.raises(TierCorruptError):
            one.read(ref, payload)
        assert not file_of(tmp_path, ref).exists()


@SEALS
def test_after_a_rotation_old_objects_are_read_and_new_ones_use_the_new_key(
    tmp_path: Path, encrypt: bool
) -> None:
    first, payload, meta = make_object(1)
    second, new_payload, new_meta = make_object(2)
    with tenant(tmp_path, keys("old"), encrypt) as one:
        one.tier.write(first, payload, meta)
        one.key_set = keys("new", "old")
        one.tier.keys_changed()
        one.tier.write(second, new_payload, new_meta)
        assert one.read(first, payload) == payload
        assert one.read(second, new_payload) == new_payload
        one.key_set = keys("new")
        one.tier.keys_changed()
        expect_miss(one, first, payload, "unknown_key")
        assert one.read(second, new_payload) == new_payload
        # The old key returns: what was a miss is announced and served again.
        one.key_set = keys("new", "old")
        one.changes.clear()
        one.tier.keys_changed()
        assert one.changes == [(NAMESPACE, first.key, True)]
        assert one.read(first, payload) == payload


def test_what_was_read_with_earlier_keys_is_not_hidden_after_a_change(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    with tenant(tmp_path, keys("old")) as one:
        one.tier.write(ref, payload, meta)
        one.key_set = keys("new")
        late = one.tier._unusable.generation
        one.key_set = keys("new", "old")
        one.tier.keys_changed()
        one.tier._set_unusable(ref, True, late)
        assert one.tier.contains(ref)


def test_what_cannot_be_used_is_tried_again_after_a_while(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    with tenant(tmp_path, keys("other")) as stranger:
        stranger.tier.write(ref, payload, meta)
    with tenant(tmp_path, keys("old")) as one:
        expect_miss(one, ref, payload, "unknown_key")
        one.changes.clear()
        one.now += RETRY_SECONDS + 1
        one.tier.maintain()
        assert one.changes == [(NAMESPACE, ref.key, True)]


def test_without_keys_nothing_is_read_written_or_opened(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    with pytest.raises(TierKeyMissingError), tenant(tmp_path, None):
        pass
    with tenant(tmp_path, keys("old")) as one:
        one.tier.write(ref, payload, meta)
        content = file_of(tmp_path, ref).read_bytes()
        one.key_set = None
        for call in (
            lambda: one.read(ref, payload),
            lambda: one.tier.write(make_object(2)[0], payload, meta),
            one.tier.check,
        ):
            with pytest.raises(TierKeyMissingError):
                call()
        assert file_of(tmp_path, ref).read_bytes() == content
        one.key_set = keys("old")
        assert one.read(ref, payload) == payload


def test_an_encrypted_object_is_a_miss_without_keys_and_is_not_replaced(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    with tenant(tmp_path, keys("old"), encrypt=True) as one:
        one.tier.write(ref, payload, meta)
    content = file_of(tmp_path, ref).read_bytes()
    tier = unkeyed(tmp_path)
    with pytest.raises(TierUntrustedError, match="encrypted with key 'old'"):
        tier.read(ref, buffer(payload.nbytes))
    tier.write(ref, payload, meta)
    assert file_of(tmp_path, ref).read_bytes() == content
    tier.close()


@pytest.mark.parametrize("size_changes", [0, 4_096, 100])
def test_another_format_version_is_a_miss_and_stays(tmp_path: Path, size_changes: int) -> None:
    ref, payload, meta = make_object(1)
    tier = unkeyed(tmp_path)
    tier.write(ref, payload, meta)
    path = file_of(tmp_path, ref)

    def change(content: bytearray) -> None:
        content[8] = 9
        content.extend(bytes(size_changes))

    content = rewrite(path, change)
    with pytest.raises(TierForeignError):
        tier.read(ref, buffer(payload.nbytes))
    assert not tier.contains(ref)
    tier.write(ref, payload, meta)
    assert path.read_bytes() == content
    tier.close()
    os.utime(path, (1.0, 1.0))
    unkeyed(tmp_path).close()
    assert path.read_bytes() == content


def test_encryption_without_its_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    require_cipher()
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(KVTierError, match="requires the Python package cryptography"):
        require_cipher()
