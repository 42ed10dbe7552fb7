"""A large directory is served from a saved index at once, and the index is verified afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tiers.test_file_tier import make, object_bytes, path_of

from kvtier.errors import TierMissError
from kvtier.testing.objects import NAMESPACE, buffer, make_object
from kvtier.tiers.base import ObjectRef, TierLimits
from kvtier.tiers.filesystem import FileSystemTier, index_saver, saved_index
from kvtier.tiers.filesystem.index import MAX_USES, Index, SavedObject
from kvtier.tiers.filesystem.layout import SAVED_INDEX
from kvtier.tiers.filesystem.maintenance import DirectoryMaintenance
from kvtier.tiers.isolation_keys import KeySet, make_key

PROMPT = [make_object(seed) for seed in range(24)]
DEADLINE_SECONDS = 60.0
ONE, TWO = make_key("one", bytes(range(32))), make_key("two", bytes(range(8, 40)))
KEYS, OTHER = KeySet(ONE, {"one": ONE}), KeySet(TWO, {"two": TWO})


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_saver, "MIN_OBJECTS", 1)


@contextmanager
def opened(root: Path, limits: TierLimits | None = None) -> Iterator[FileSystemTier]:
    tier = make(root, limits)
    tier.open(lambda *_: None)
    try:
        yield tier
    finally:
        tier.close()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with the objects of a prompt and a saved index."""
    with opened(tmp_path) as tier:
        previous = b""
        for ref, payload, meta in PROMPT:
            tier.write(ref, payload, replace(meta, previous=previous))
            previous = ref.key
        tier.maintain()
        assert tier.saver.saves == 1
    return tmp_path / NAMESPACE / SAVED_INDEX


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is scanned: what is served comes from the saved index."""
    monkeypatch.setattr(DirectoryMaintenance, "start_loop", lambda _: None)

    def scan_completely(_: object) -> None:
        raise AssertionError("the directory is scanned")

    monkeypatch.setattr(DirectoryMaintenance, "scan_completely", scan_completely)


@pytest.mark.usefixtures("saved", "no_scan")
def test_a_start_serves_every_object_before_the_directory_is_scanned(tmp_path: Path) -> None:
    announced: list[bytes] = []
    tier = make(tmp_path)
    tier.open(lambda _, key, present: announced.append(key) if present else None)
    assert all(tier.contains(ref) for ref, _, _ in PROMPT)
    assert sorted(announced) == sorted(ref.key for ref, _, _ in PROMPT)
    assert sorted(tier.keys(NAMESPACE)) == sorted(announced)
    assert tier.usage().used_bytes >= object_bytes(tmp_path)
    for ref, payload, meta in PROMPT:
        into = buffer(payload.nbytes)
        assert tier.read(ref, into).checksums == meta.checksums
        assert bytes(into) == bytes(payload)
    tier.close()


@pytest.mark.usefixtures("saved", "no_scan")
def test_the_order_of_eviction_and_what_precedes_an_object_are_restored(tmp_path: Path) -> None:
    tier = make(tmp_path)
    tier.open(lambda *_: None)
    order = []
    while (oldest := tier._index.oldest()) is not None:
        order.append(oldest[1])
        tier._index.remove(*oldest)
    assert order == [ref.key for ref, _, _ in reversed(PROMPT)]
    tier.close()


@pytest.mark.usefixtures("saved")
def test_what_has_changed_since_is_found_by_the_scan_that_follows(tmp_path: Path) -> None:
    gone, kept, later = PROMPT[3][0], PROMPT[4][0], make_object(100)
    (other := tmp_path / "other").mkdir()
    with opened(other) as tier:
        tier.write(*later)
    place = path_of(tmp_path, later[0])
    place.parent.mkdir(parents=True, exist_ok=True)
    path_of(other, later[0]).rename(place)
    path_of(tmp_path, gone).unlink()
    with opened(tmp_path) as tier:
        wait_until(lambda: not tier.maintenance.verifying)
        assert not tier.contains(gone)
        assert tier.contains(kept)
        assert tier.contains(later[0])


@pytest.mark.usefixtures("saved", "no_scan")
def test_an_object_that_no_longer_exists_is_a_miss(tmp_path: Path) -> None:
    ref, payload, _ = PROMPT[5]
    path_of(tmp_path, ref).unlink()
    tier = make(tmp_path)
    tier.open(lambda *_: None)
    assert tier.contains(ref)
    with pytest.raises(TierMissError):
        tier.read(ref, buffer(payload.nbytes))
    assert not tier.contains(ref)
    tier.close()


def _flip(position: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        place = position % len(data)
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return change


@pytest.mark.parametrize(
    "damage",
    [
        *(_flip(position) for position in (0, 8, 12, 16, 32, 64, 79, 80, 84, 92, 93, 100, -1)),
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: data + b"\0",
        lambda _: b"",
        lambda data: b"\xff" * len(data),
        lambda data: data * 3,
    ],
)
def test_a_damaged_index_is_ignored_and_the_directory_scanned(
    saved: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    saved.write_bytes(damage(saved.read_bytes()))
    with opened(tmp_path) as tier:
        assert not tier.maintenance.verifying
        assert all(tier.contains(ref) for ref, _, _ in PROMPT)


@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "foreign"])
def test_something_else_in_its_place_is_ignored(saved: Path, tmp_path: Path, kind: str) -> None:
    content = saved.read_bytes()
    saved.unlink()
    if kind == "directory":
        saved.mkdir()
    elif kind == "pipe":
        os.mkfifo(saved)
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        saved.symlink_to(tmp_path / "elsewhere")
    else:
        # That of another namespace.
        saved.write_bytes(content.replace(bytes.fromhex(NAMESPACE), bytes(16), 1))
    with opened(tmp_path) as tier:
        assert not tier.maintenance.verifying
        assert all(tier.contains(ref) for ref, _, _ in PROMPT)


def test_the_saved_index_is_charged_and_replaced_within_the_capacity(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_saver, "SAVE_SECONDS", 0.0)
    with opened(tmp_path) as tier:
        wait_until(lambda: not tier.maintenance.verifying)
        for _ in range(20):
            for ref, payload, _ in PROMPT:
                tier.read(ref, buffer(payload.nbytes))
            tier.maintain()
            janitor = tier.maintenance.janitor
            assert janitor is not None
            stored = object_bytes(tmp_path) + saved.stat().st_size
            assert (janitor.ledger.charge_bytes or 0) >= stored
        assert tier.saver.saves == 20
        assert list(tmp_path.rglob("t-*")) == []
        tier.maintenance.scan_completely()
        # What earlier ones were charged is credited.
        assert stored <= tier.usage().used_bytes <= 2 * stored


def test_a_directory_that_is_small_for_it_is_not_saved(tmp_path: Path) -> None:
    with opened(tmp_path, TierLimits(4 << 20)) as tier:
        for each in PROMPT[:4]:
            tier.write(*each)
        tier.maintain()
        assert tier.saver.saves == 0
    assert not (tmp_path / NAMESPACE / SAVED_INDEX).exists()


def test_sizes_that_cannot_be_are_not_believed(
    saved: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    index = Index(1 << 40)
    for ref, _, _ in PROMPT:
        index.reserve(1 << 29)
        index.publish(ref.namespace, ref.key, 1 << 29)
    saved.unlink()
    saved_index.write(str(saved), index, NAMESPACE, None, 0o600)
    request.getfixturevalue("no_scan")
    tier = make(tmp_path)
    tier.open(lambda *_: None)
    assert 0 < tier.usage().objects <= 8
    assert tier.usage().used_bytes <= 5 << 30
    tier.close()


def test_with_keys_only_an_index_made_with_one_of_them_is_used(tmp_path: Path) -> None:
    index = Index(1 << 40)
    for ref, _, _ in PROMPT:
        index.reserve(8_192)
        index.publish(ref.namespace, ref.key, 8_192)
    unkeyed, keyed = tmp_path / "unkeyed", tmp_path / "keyed"
    saved_index.write(str(unkeyed), index, NAMESPACE, None, 0o600)
    saved_index.write(str(keyed), index, NAMESPACE, KEYS, 0o600)
    assert len(saved_index.read(keyed, NAMESPACE, KEYS, 100)) == len(PROMPT)
    assert len(saved_index.read(unkeyed, NAMESPACE, None, 100)) == len(PROMPT)
    for path, keys in ((unkeyed, KEYS), (keyed, None), (keyed, OTHER)):
        with pytest.raises(saved_index.InvalidIndexError):
            saved_index.read(path, NAMESPACE, keys, 100)
    with pytest.raises(saved_index.InvalidIndexError):
        saved_index.read(keyed, NAMESPACE, KEYS, len(PROMPT) - 1)


@settings(deadline=None)
@given(
    objects=st.lists(
        st.tuples(st.binary(min_size=1, max_size=64), st.integers(1, 1 << 30), st.booleans()),
        max_size=40,
        unique_by=lambda each: each[0],
    )
)
def test_what_is_saved_is_restored(
    tmp_path_factory: pytest.TempPathFactory, objects: list[tuple[bytes, int, bool]]
) -> None:
    index, path = Index(1 << 60), tmp_path_factory.mktemp("saved") / "index"
    previous = b""
    for key, size, often in objects:
        index.reserve(size)
        index.publish(NAMESPACE, key, size, previous)
        if often:
            index.touch(NAMESPACE, key)
        previous = key
    saved_index.write(str(path), index, NAMESPACE, None, 0o600)
    found = saved_index.read(path, NAMESPACE, None, 100)
    restored = Index(1 << 60)
    for each in saved_index.merged([found]):
        assert restored.add_saved(each)
    assert restored.usage() == replace(index.usage(), capacity_bytes=1 << 60)
    before = {ref: index.previous(*ref) for ref in _all(index)}
    assert {ref: restored.previous(*ref) for ref in _all(restored)} == before


def _all(index: Index) -> list[tuple[str, bytes]]:
    return [(namespace, key) for namespace, key, _ in index.entries()]


@given(data=st.binary(max_size=300), valid=st.booleans())
def test_any_content_is_read_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, valid: bool
) -> None:
    path = tmp_path_factory.mktemp("saved") / "index"
    if valid:
        # Right as far as anyone can make it: only what the objects say is arbitrary.
        objects = len(data) // 15
        head = saved_index._head(objects, NAMESPACE, b"", bytes(16))
        digest = saved_index._hasher(None).update(data).update(head).digest(16)
        data = saved_index._head(objects, NAMESPACE, b"", digest) + data
    path.write_bytes(data)
    index = Index(1 << 60)
    try:
        found = saved_index.read(path, NAMESPACE, None, 100)
    except saved_index.InvalidIndexError:
        return
    for each in saved_index.merged([found]):
        index.add_saved(each)
    while (oldest := index.oldest()) is not None:
        index.remove(*oldest)
    assert index.count == 0


def test_predecessors_that_form_a_circle_do_no_harm() -> None:
    index = Index(1 << 60)
    keys = [bytes([number]) * 33 for number in range(8)]
    for number, key in enumerate(keys):
        assert index.add_saved(SavedObject(NAMESPACE, key, 4_096, keys[number - 1], number % 2 > 0))
    gone = []
    while (oldest := index.oldest()) is not None:
        gone.append(oldest[1])
        index.remove(*oldest)
    assert sorted(gone) == keys


def test_an_object_of_a_saved_index_is_the_ref_that_was_stored() -> None:
    ref = PROMPT[0][0]
    index = Index(1 << 60)
    assert index.add_saved(SavedObject(ref.namespace, ref.key, 4_096, b"", False))
    assert [ObjectRef(namespace, key) for namespace, key, _ in index.entries()] == [ref]


def earlier(data: bytes, version: int) -> bytes:
    """A saved index as releases wrote it that did not count uses."""
    head, objects = data[: saved_index._HEAD.size], b""
    at = len(head)
    while at < len(data):
        use, previous, units, _, flags, length = saved_index._OBJECT.unpack_from(data, at)
        at += saved_index._OBJECT.size
        rest = length + (saved_index._FACTS.size if flags & saved_index._HAS_FACTS else 0)
        kept = rest if version > 1 else length
        flags &= 7 if version > 1 else saved_index._OFTEN
        objects += saved_index._OBJECT_WITHOUT_USES.pack(use, previous, units, flags, length)
        objects += data[at : at + kept]
        at += rest
    head = head[:8] + version.to_bytes(2, "little") + head[10:-16] + bytes(16)
    digest = saved_index._hasher(None)
    digest.update(objects + head)
    return head[:-16] + digest.digest(16) + objects


@pytest.mark.parametrize("version", [1, 2])
def test_a_saved_index_of_an_earlier_version_is_used(saved: Path, version: int) -> None:
    saved.write_bytes(earlier(saved.read_bytes(), version))
    found = saved_index.read(saved, NAMESPACE, None, 100)
    assert saved.read_bytes()[8] == version
    assert len(found) == len(PROMPT)
    assert not found.counts_uses
    assert list(found.uses_by_key()) == []
    objects = list(saved_index.merged([found]))
    assert sum(not each.previous for each in objects) == 1
    assert all((each.facts is None) == (version == 1) for each in objects)


def uses(tier: FileSystemTier) -> list[int]:
    nodes = dict(tier._index.nodes(NAMESPACE))
    return [tier._index.uses_of(nodes[ref.key]) for ref, _, _ in PROMPT]


@pytest.mark.parametrize("served", [True, False])
def test_how_often_objects_were_used_is_kept_across_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """``served``: from the saved index, as a large directory; else it is scanned at the start."""
    monkeypatch.setattr(index_saver, "MIN_OBJECTS", 1 if served else 1_000)
    monkeypatch.setattr(index_saver, "SAVE_SECONDS", 0.0)
    with opened(tmp_path) as tier:
        for ref, payload, meta in PROMPT:
            tier.write(ref, payload, meta)
        for number, (ref, payload, _) in enumerate(PROMPT[:5]):
            for _ in range(number):
                tier.read(ref, buffer(payload.nbytes))
        tier.touch(PROMPT[0][0])
        assert uses(tier)[:6] == [1, 1, 2, 3, 4, 0]
        tier.maintain()
        assert tier.saver.saves == 1
    with opened(tmp_path) as tier:
        assert served or not tier.maintenance.verifying
        assert uses(tier)[:6] == [1, 1, 2, 3, 4, 0]
        tier.delete(PROMPT[4][0])
        tier.write(*PROMPT[4])
        assert uses(tier)[4] == 0, "of another object under the same name"


def test_a_small_directory_is_not_saved_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_saver, "MIN_OBJECTS", 1_000)
    with opened(tmp_path) as tier:
        tier.write(*PROMPT[0])
        tier.maintain()
        assert tier.saver.saves == 0


def test_uses_are_counted_up_to_a_bound() -> None:
    index = Index(1 << 40)
    index.reserve(4096)
    index.publish(NAMESPACE, b"key", 4096)
    index.add_uses(NAMESPACE, b"key", MAX_USES - 1)
    for _ in range(3):
        index.touch(NAMESPACE, b"key")
    index.touch(NAMESPACE, b"key", often=False)
    index.add_uses(NAMESPACE, b"key", 5)
    index.add_uses(NAMESPACE, b"other", 5)
    assert index.uses_of(dict(index.nodes(NAMESPACE))[b"key"]) == MAX_USES
