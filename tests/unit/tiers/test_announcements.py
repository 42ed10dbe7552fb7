"""Announcements between tiers of one directory, whose rounds the tests run."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tiers.announcing_hosts import Hosts

from kvtier.errors import TierMissError
from kvtier.hashing import blake3_digest
from kvtier.testing.objects import NAMESPACE, buffer, make_object
from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem.announcement_format import (
    BLOCK_BYTES,
    Announcement,
    RejectedError,
    decode_block,
    decode_frame,
    encode_block,
    encode_frames,
    pack_blocks,
)
from kvtier.tiers.filesystem.announcement_ring import AHEAD_POLLS, LogReader, LogWriter
from kvtier.tiers.filesystem.announcements import MAX_PENDING, Announcements, log_blocks, log_bytes
from kvtier.tiers.filesystem.gc import CollectHooks, CollectReport, collect
from kvtier.tiers.filesystem.layout import ANNOUNCEMENTS, Modes, term_path, writers_path
from kvtier.tiers.isolation_keys import make_key_set

MIB, GIB = 1 << 20, 1 << 30
MODES = Modes(0o640, 0o750, None)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(tmp_path / "tier", monkeypatch)


KEYS = make_key_set({"a": b"k" * 32})
OTHER_KEYS = make_key_set({"a": b"x" * 32})
BOTH_KEYS = make_key_set({"a": b"k" * 32, "b": b"y" * 32, "current": b"b"})


def entry(seed: int, size_bytes: int = 8192, previous: bytes = b"") -> Announcement:
    return Announcement(NAMESPACE, seed.to_bytes(33, "big"), size_bytes, previous)


# The format.


def test_entries_come_back_as_they_were_whatever_their_number() -> None:
    entries = [
        entry(1),
        entry(2, previous=entry(1).key),
        Announcement("f" * 32, b"k", 1 << 33),
        entry(3, 0),
        *(entry(seed, previous=entry(seed - 1).key) for seed in range(5, 500)),
    ]
    frames = encode_frames(entries, 7, 40, KEYS)
    assert len(frames) > 1
    found = [decode_frame(frame, KEYS) for frame in frames]
    assert [frame.number for frame in found] == list(range(40, 40 + len(frames)))
    read = [each for frame in found for each in frame.entries]
    # What precedes the first entry of a frame, other than the entry before it, is not said.
    assert [(each.namespace, each.key, each.size_bytes) for each in read] == [
        (each.namespace, each.key, each.size_bytes) for each in entries
    ]
    assert read[1].previous == entry(1).key
    assert all(len(block) <= BLOCK_BYTES for block in pack_blocks(frames))


@pytest.mark.parametrize(
    ("made_with", "read_with", "reason"),
    [
        (None, KEYS, "unkeyed"),
        (KEYS, None, "no_key"),
        (KEYS, OTHER_KEYS, "wrong_tag"),
        (BOTH_KEYS, KEYS, "unknown_key"),
        (KEYS, BOTH_KEYS, ""),
        (None, None, ""),
    ],
)
def test_a_frame_is_accepted_only_with_the_right_key(
    made_with: object, read_with: object, reason: str
) -> None:
    (frame,) = encode_frames([entry(1)], 1, 0, made_with)  # type: ignore[arg-type]
    if not reason:
        assert decode_frame(frame, read_with).entries == (entry(1),)  # type: ignore[arg-type]
        return
    with pytest.raises(RejectedError) as raised:
        decode_frame(frame, read_with)  # type: ignore[arg-type]
    assert raised.value.reason == reason


@pytest.mark.parametrize("keys", [None, KEYS])
def test_no_change_of_a_single_byte_is_accepted(keys: object) -> None:
    (frame,) = encode_frames([entry(1), entry(2)], 1, 9, keys)  # type: ignore[arg-type]
    for position in range(len(frame)):
        changed = bytearray(frame)
        changed[position] ^= 0x41
        with pytest.raises(RejectedError):
            decode_frame(bytes(changed), keys)  # type: ignore[arg-type]
    block = encode_block(b"l" * 8, 3, 16, frame)
    for position in range(48 + len(frame)):
        changed = bytearray(block)
        changed[position] ^= 0x41
        assert decode_block(bytes(changed)) is None


def test_bytes_of_a_hostile_writer_raise_nothing_else() -> None:
    generator = random.Random(1)
    (frame,) = encode_frames([entry(1)], 1, 9, None)
    for _ in range(2_000):
        body = generator.randbytes(generator.randrange(120))
        # With the digest that belongs to these bytes, as a hostile writer computes it.
        head = bytearray(frame[:24])
        head[:2] = (40 + len(body)).to_bytes(2, "little")
        head[4:6] = generator.randrange(6).to_bytes(2, "little")
        made = bytes(head) + blake3_digest(bytes(head) + body, 16) + body
        try:
            found = decode_frame(made, None)
        except RejectedError:
            continue
        for each in found.entries:
            assert 1 <= len(each.key) <= 64
            assert len(each.namespace) == 32
            assert each.size_bytes == 0 or each.size_bytes >= 8192


# One log.


class Log:
    """A log in a directory, its owner and a reader."""

    def __init__(self, directory: Path, blocks: int = 8) -> None:
        self.path = directory / ANNOUNCEMENTS
        self.blocks = blocks
        self.writer = LogWriter()
        self.losses: list[str] = []
        self.reader = LogReader(self.path, self.losses.append)
        self.sent = 0

    def append(self, count: int = 1) -> None:
        for _ in range(count):
            frames = encode_frames([entry(self.sent)], 1, self.sent, None)
            self.writer.append(self.path, self.blocks, MODES, frames)
            self.sent += 1

    def poll(self, limit: int = 256) -> list[int]:
        return [
            int.from_bytes(each.key, "big")
            for frame in self.reader.poll(self.writer.number, limit)
            for each in decode_frame(frame, None).entries
        ]


def test_a_reader_sees_everything_once_over_many_turns_of_the_log(tmp_path: Path) -> None:
    log = Log(tmp_path)
    generator = random.Random(2)
    seen: list[int] = []
    for _ in range(200):
        log.append(generator.randrange(8))
        seen += log.poll()
    assert seen == list(range(log.sent))
    assert log.sent > 100
    assert not log.losses
    assert log.path.stat().st_size == 8 * BLOCK_BYTES


def test_a_poll_reads_no_more_than_it_may(tmp_path: Path) -> None:
    log = Log(tmp_path, 64)
    log.append()
    log.poll()
    log.append(40)
    assert len(log.poll(8)) <= 16
    assert len(log.poll()) >= 24
    assert not log.losses


def test_who_falls_behind_counts_it_and_goes_on_with_what_is_there(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append(2)
    assert log.poll() == [0, 1]
    log.append(9)
    assert log.poll() == list(range(3, 11))
    assert log.losses == ["overrun"]
    log.append()
    assert log.poll() == [11]


def _truncate(path: Path) -> None:
    os.truncate(path, BLOCK_BYTES + 100)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _garble(path: Path) -> None:
    path.write_bytes(random.Random(3).randbytes(path.stat().st_size))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for start in range(0, len(data), BLOCK_BYTES):
        data[start + 60] ^= 1
    path.write_bytes(bytes(data))


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (Path.unlink, "lost"),
    "cut": (_truncate, "truncated"),
    "zeros": (_zero, "truncated"),
    "noise": (_garble, "corrupt"),
    "flipped bits": (_flip, "corrupt"),
    "a directory in its place": (_replace_by_directory, "lost"),
    "a pipe in its place": (_replace_by_pipe, "lost"),
    "a link in its place": (_replace_by_link, "lost"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_log_costs_what_was_not_read_and_is_counted_by_reason(
    tmp_path: Path, damage: str
) -> None:
    inflict, reason = DAMAGES[damage]
    log = Log(tmp_path)
    log.append(2)
    assert log.poll() == [0, 1]
    log.append(4)
    inflict(log.path)
    found = log.poll()
    assert set(found) <= {2, 3, 4, 5}
    assert log.losses[0] == reason
    assert set(log.losses) <= {reason, "lost"}
    if not log.path.is_file() or log.path.is_symlink():
        with contextlib.suppress(OSError):
            log.append()
        if log.path.is_dir() or log.path.is_symlink() or log.path.is_fifo():
            # Its owner cannot write either. The janitor removes what is in the owner's directory
            # when it fences it.
            return
    log.append(12)
    assert log.poll()[-1] == log.sent - 1
    log.losses.clear()
    log.append()
    assert log.poll() == [log.sent - 1]
    assert not log.losses


def test_a_damaged_log_that_was_read_costs_nothing(tmp_path: Path) -> None:
    for number, (inflict, _) in enumerate(DAMAGES.values()):
        directory = tmp_path / str(number)
        directory.mkdir()
        log = Log(directory)
        log.append(3)
        log.poll()
        inflict(log.path)
        log.poll()
        if log.path.is_file() and not log.path.is_symlink():
            log.append()
            assert log.poll() == [3]


def test_planted_blocks_with_absurd_numbers_do_not_stop_the_log(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append(2)
    log.poll()
    (frame,) = encode_frames([entry(99)], 5, 0, None)
    for number in ((1 << 62) + 2, (1 << 40) + 3):
        data = bytearray(log.path.read_bytes().ljust(8 * BLOCK_BYTES, b"\0"))
        start = number % 8 * BLOCK_BYTES
        data[start : start + BLOCK_BYTES] = encode_block(log.writer._log_id, number, 8, frame)
        log.path.write_bytes(bytes(data))
    log.append(6)
    assert 99 not in log.poll()
    log.append()
    assert log.poll() == [8]


def test_a_reader_that_starts_passes_over_planted_blocks(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append(2)
    data = bytearray(log.path.read_bytes().ljust(8 * BLOCK_BYTES, b"\0"))
    data[5 * BLOCK_BYTES : 6 * BLOCK_BYTES] = encode_block(b"another!", (1 << 40) + 5, 8, b"")
    log.path.write_bytes(bytes(data))
    log.reader.skip(log.writer.number)
    log.append()
    assert log.poll() == [2]
    assert not log.losses


def _plant(path: Path, number: int, blocks: int) -> None:
    """A block of another log, with a number that the owner may come to."""
    with path.open("r+b") as file:
        file.seek(number % blocks * BLOCK_BYTES)
        file.write(encode_block(b"another!", number, blocks, b""))


def test_a_block_of_another_log_does_not_stop_the_log(tmp_path: Path) -> None:
    log = Log(tmp_path, 64)
    log.append(20)
    log.poll()
    ahead = log.writer.number + 5_000
    _plant(log.path, ahead + (log.writer.number - ahead) % 64, 64)
    for _ in range(10):
        assert log.poll() == []
    for _ in range(200):
        log.append()
        assert log.poll() == [log.sent - 1]
    assert not log.losses


def test_a_poll_reads_little_while_a_block_of_another_log_is_in_the_next_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path, 64)
    log.append(20)
    log.poll()
    ahead = log.writer.number + 5_000
    _plant(log.path, ahead + (log.writer.number - ahead) % 64, 64)
    log.poll()
    sizes: list[int] = []
    pread = os.pread

    def counted(descriptor: int, size: int, at: int) -> bytes:
        sizes.append(size)
        return pread(descriptor, size, at)

    monkeypatch.setattr(os, "pread", counted)
    log.poll()
    assert sum(sizes) <= 4 * BLOCK_BYTES


def test_a_log_that_another_one_has_replaced_is_followed_again(tmp_path: Path) -> None:
    """As when a directory is restored from a copy, or a log copied from another directory."""
    log = Log(tmp_path, 64)
    log.append(20)
    log.poll()
    other = LogWriter(3_000)
    for number in range(200):
        frames = encode_frames([entry(number)], 2, number, None)
        other.append(tmp_path / "other", 64, MODES, frames)
    log.path.write_bytes((tmp_path / "other").read_bytes())
    log.poll()
    assert log.losses
    log.losses.clear()
    log.append()
    for _ in range(AHEAD_POLLS + 2):
        log.poll()
    assert log.losses, "what was announced meanwhile must be found by a scan"
    log.losses.clear()
    for _ in range(200):
        log.append()
        assert log.sent - 1 in log.poll()


# Capacity.


def test_logs_take_a_small_part_of_the_capacity_and_none_of_a_small_one() -> None:
    assert log_blocks(GIB, 2) == (32, 256)
    assert log_blocks(MIB, 2) == (0, 0)
    assert log_bytes(MIB, 2) == 0
    for capacity in (16 * MIB, 64 * MIB, GIB, 1 << 40):
        for writers in (1, 2, 8, 32, 1_000):
            assert log_bytes(capacity, writers) <= capacity // 64


def test_what_waits_is_bounded() -> None:
    announcements = Announcements(True)
    for seed in range(MAX_PENDING + 3):
        announcements.published(NAMESPACE, seed.to_bytes(4, "big"), 8192)
    assert announcements.counts() == {("tier_announcements_lost", "not_sent"): 3}
    assert len(announcements.take(MAX_PENDING + 3)) == MAX_PENDING


# Tiers.


def test_an_object_of_another_node_is_found_without_a_scan(hosts: Hosts) -> None:
    first, second, third = hosts.make(), hosts.make(), hosts.make()
    hosts.settle()
    hosts.store(second, 1)
    ref, payload, meta = make_object(1)
    assert not third.tier.contains(ref)
    hosts.announce()
    for host in (first, third):
        assert host.changes == [(NAMESPACE, ref.key, True)]
        into = buffer(payload.nbytes)
        assert host.tier.read(ref, into) == meta
        assert into == payload
    second.tier.delete(ref)
    hosts.announce()
    for host in (first, third):
        assert not host.tier.contains(ref)
        assert host.changes[-1] == (NAMESPACE, ref.key, False)


def test_what_the_janitor_evicts_is_gone_everywhere(hosts: Hosts) -> None:
    first, second = hosts.make(), hosts.make()
    hosts.settle()
    for seed in range(8):
        first.write(seed)
    hosts.announce()
    assert second.tier.usage().objects == 8
    janitor = first.tier.maintenance.janitor
    assert janitor is not None
    janitor.evict(1 << 40)
    hosts.announce()
    assert second.tier.usage().objects == 0


def collect_beside(hosts: Hosts, **options: Any) -> CollectReport:
    """``kvtier gc`` down to 5 MiB, as another process, while the tiers go on."""

    now = 0.0

    def others_go_on(seconds: float) -> None:
        nonlocal now
        now += seconds
        hosts.rounds(seconds=seconds)
        hosts.announce()

    hooks = CollectHooks(sleep=others_go_on, clock=lambda: now)
    return collect(hosts.root, 5 * MIB, None, dry_run=False, hooks=hooks, **options)


def test_what_gc_removes_is_gone_everywhere(hosts: Hosts) -> None:
    first, second = hosts.make(), hosts.make()
    hosts.settle()
    for seed in range(500):
        hosts.store(first, seed)
    hosts.announce()
    hosts.settle()
    assert second.tier.usage().objects == 500
    scans = hosts.count_scans()
    second.changes.clear()
    done = collect_beside(hosts)
    assert not done.janitor
    assert done.announced == done.objects > 0
    hosts.announce()
    left = [seed for seed in range(500) if os.path.exists(hosts.path(seed))]
    assert len(left) == 500 - done.objects
    assert [s for s in range(500) if second.tier.contains(make_object(s)[0])] == left
    assert len(second.changes) == done.objects
    assert not scans[id(second.tier.maintenance)]
    assert not hosts.lost(first) + hosts.lost(second)
    hosts.settle()
    assert len(os.listdir(writers_path(hosts.root))) == 2


@pytest.mark.parametrize("keys", [KEYS, None], ids=["with keys", "without"])
def test_gc_announces_removals_of_sealed_objects_with_keys_only(hosts: Hosts, keys: object) -> None:
    first, second = hosts.make(keys=KEYS), hosts.make(keys=KEYS)
    hosts.settle()
    for seed in range(500):
        hosts.store(first, seed)
    hosts.announce()
    hosts.settle()
    done = collect_beside(hosts, keys=keys)
    hosts.announce()
    assert done.objects > 0
    assert done.announced == (done.objects if keys else 0)
    assert second.tier.usage().objects == 500 - done.announced
    assert not hosts.lost(first) + hosts.lost(second), "nothing is sent that would be rejected"
    hosts.rounds(200)
    hosts.announce()
    assert second.tier.usage().objects == 500 - done.objects, "the janitor has counted"


def test_gc_does_not_wait_for_a_leader_that_passes_nothing_on(
    hosts: Hosts,
) -> None:
    first = hosts.make()
    hosts.settle()
    for seed in range(500):
        hosts.store(first, seed)
    naps: list[float] = []
    hooks = CollectHooks(sleep=naps.append, clock=lambda: sum(naps))
    done = collect(hosts.root, 5 * MIB, None, dry_run=False, hooks=hooks)
    assert done.objects > 0
    assert done.announced == 0
    assert sum(naps) <= 6.0
    hosts.rounds(20)
    assert first.tier.usage().objects == 500 - done.objects


def test_who_follows_the_log_does_not_scan(hosts: Hosts) -> None:
    first, second = hosts.make(), hosts.make()
    hosts.settle()
    hosts.announce()
    listed = hosts.count_scans()
    for _ in range(30):
        hosts.rounds(1, 6.0)
        hosts.announce()
    assert listed[id(second.tier.maintenance)] == 0
    assert listed[id(first.tier.maintenance)] >= 5
    # Whose polls hang does not rely on them.
    hosts.rounds(4, 11.0)
    assert listed[id(second.tier.maintenance)] >= 1


def test_files_that_were_copied_or_removed_by_hand_are_announced_by_the_janitor(
    hosts: Hosts,
) -> None:
    first, second = hosts.make(), hosts.make()
    hosts.settle()
    first.write(1)
    hosts.announce()
    copied = Path(hosts.path(1)).with_name(make_object(2)[0].key.hex() + ".kv")
    copied.write_bytes(Path(hosts.path(1)).read_bytes())
    os.unlink(hosts.path(1))
    for _ in range(4):
        hosts.rounds(1, 11.0)
        hosts.announce()
    assert second.tier.contains(make_object(2)[0])
    assert not second.tier.contains(make_object(1)[0])


@pytest.mark.parametrize("which", ["the writer's log", "the leader's log"])
@pytest.mark.parametrize("damage", ["deleted", "cut", "noise"])
def test_a_scan_finds_what_a_damaged_log_has_lost(hosts: Hosts, which: str, damage: str) -> None:
    first, second, third = hosts.make(), hosts.make(), hosts.make()
    hosts.settle()
    hosts.announce()
    hosts.store(second, 1)
    hosts.announce()
    hosts.rounds(2)
    hosts.announce()
    leaders = which == "the leader's log"
    path = (
        term_path(first.root, first.janitor_term)
        if leaders
        else second.tier.maintenance.writer.path
    )
    assert path is not None
    hosts.store(second, 2)
    # Written to the log, and not read by anybody yet.
    second.tier.announcement_log.run_once()
    if leaders:
        first.tier.announcement_log.run_once()
    DAMAGES[damage][0](path / ANNOUNCEMENTS)
    hosts.rounds(2)
    hosts.announce()
    assert sum(hosts.lost(first).values()) + sum(hosts.lost(third).values()) >= 1
    for _ in range(6):
        hosts.rounds(1, 11.0)
        hosts.announce()
    for host in (first, third):
        assert host.tier.contains(make_object(2)[0])
        assert host.tier.contains(make_object(1)[0])
    hosts.store(second, 3)
    hosts.announce()
    for host in (first, third):
        assert host.tier.contains(make_object(3)[0])
    assert third.tier._announcements.complete


def test_a_new_leader_passes_on_what_the_last_one_had_not(hosts: Hosts) -> None:
    first, second, third = hosts.make(), hosts.make(), hosts.make()
    hosts.settle()
    hosts.store(third, 1)
    third.tier.announcement_log.run_once()
    first.tier.maintenance.release()
    hosts.hosts.remove(first)
    hosts.rounds(3)
    assert second.is_janitor
    hosts.settle()
    assert second.tier.contains(make_object(1)[0])
    hosts.store(second, 2)
    hosts.announce()
    assert third.tier.contains(make_object(2)[0])


def test_the_log_of_a_dead_writer_is_removed_with_its_directory(hosts: Hosts) -> None:
    first, second = hosts.make(), hosts.make()
    hosts.settle()
    hosts.store(second, 1)
    hosts.announce()
    path = second.tier.maintenance.writer.path
    assert path is not None
    assert (path / ANNOUNCEMENTS).exists()
    hosts.hosts.remove(second)
    hosts.rounds(14)
    hosts.announce()
    assert not path.exists()
    assert not first.tier.announcement_log._readers
    # It comes back under another name, and goes on.
    hosts.hosts.append(second)
    hosts.settle()
    hosts.store(second, 2)
    hosts.announce()
    assert first.tier.contains(make_object(2)[0])
    assert not hosts.lost(first)


def test_no_writer_announces_under_a_janitor_that_sets_no_bytes_aside(hosts: Hosts) -> None:
    first, second = hosts.make(), hosts.make()
    hosts.settle()
    hosts.store(second, 1)
    hosts.announce()
    path = second.tier.maintenance.writer.path
    assert path is not None
    first.tier.configure(TierLimits(MIB))
    hosts.rounds(2)
    hosts.announce()
    assert not (path / ANNOUNCEMENTS).exists()
    assert not second.tier._announcements.complete
    hosts.store(second, 2)
    hosts.announce()
    assert not first.tier.contains(make_object(2)[0])
    for _ in range(3):
        hosts.rounds(1, 11.0)
    assert first.tier.contains(make_object(2)[0])


def test_a_writer_of_an_earlier_release_makes_the_others_scan(hosts: Hosts) -> None:
    first, second, third = hosts.make(), hosts.make(), hosts.make()
    hosts.settle()
    hosts.announce()
    second.tier._announcements.enabled = False
    second.tier.maintenance.writer.announced = None
    second.tier.maintenance.writer._document.pop("log")
    hosts.rounds(3)
    hosts.announce()
    assert not third.tier._announcements.complete
    hosts.store(second, 1)
    for _ in range(3):
        hosts.rounds(1, 11.0)
    assert third.tier.contains(make_object(1)[0])
    assert first.tier.contains(make_object(1)[0])


def test_a_planted_announcement_is_a_miss_when_it_is_read(hosts: Hosts) -> None:
    first, second = hosts.make(), hosts.make()
    hosts.settle()
    hosts.announce()
    frames = encode_frames([entry(7), entry(8, 0)], 5, 0, None)
    path = term_path(first.root, first.janitor_term)
    planter = LogWriter(first.tier._announcements.written(True, path))
    planter.append(path / ANNOUNCEMENTS, 8, MODES, frames)
    second.tier.announcement_log.run_once()
    ref, payload, _ = make_object(7)
    assert second.tier.contains(ref)
    with pytest.raises(TierMissError):
        second.tier.read(ref, buffer(payload.nbytes))
    assert not second.tier.contains(ref)


def test_where_objects_carry_tags_a_planted_announcement_is_not_accepted(hosts: Hosts) -> None:
    first, second, third = (hosts.make(keys=KEYS) for _ in range(3))
    hosts.settle()
    hosts.store(third, 1)
    hosts.announce()
    assert second.tier.contains(make_object(1)[0])
    path = term_path(first.root, first.janitor_term) / ANNOUNCEMENTS
    planter = LogWriter(first.tier._announcements.written(True, path.parent))
    for keys in (None, OTHER_KEYS):
        frames = encode_frames(
            [entry(7), Announcement(NAMESPACE, make_object(1)[0].key, 0)], 5, 0, keys
        )
        planter.append(path, 256, MODES, frames)
    second.tier.announcement_log.run_once()
    assert not second.tier.contains(make_object(7)[0])
    assert second.tier.contains(make_object(1)[0])
    assert hosts.lost(second)["unkeyed"] == 1
    assert hosts.lost(second)["wrong_tag"] == 1
