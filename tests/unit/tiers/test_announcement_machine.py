"""Announcements between three tiers of one directory, for any order of stores, removals, damages
and deaths: an index holds nothing that was never stored, a read returns the right bytes or a miss,
and in the end every tier knows exactly what the directory holds."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.tiers.announcing_hosts import AnnouncingHost, Hosts

from kvtier.errors import TierError, TierMissError
from kvtier.harness.file_writers import directory_bytes
from kvtier.testing.objects import NAMESPACE, buffer, make_object
from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem.announcement_format import Announcement, encode_frames
from kvtier.tiers.filesystem.announcement_ring import LogWriter
from kvtier.tiers.filesystem.layout import ANNOUNCEMENTS, CONTROL, Modes

SEEDS = st.integers(0, 11)
WHO = st.integers(0, 2)
CAPACITY_BYTES = 64 << 20
PLANTED = 1_000


def _cut(path: Path, generator: random.Random) -> None:
    os.truncate(path, generator.randrange(path.stat().st_size + 1))


def _garble(path: Path, generator: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(16):
        if data:
            data[generator.randrange(len(data))] = generator.randrange(256)
    path.write_bytes(bytes(data))


def _delete(path: Path, _: random.Random) -> None:
    path.unlink()


class AnnouncementMachine(RuleBasedStateMachine):
    """The machine."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvtier-machine-"))
        self.patch = pytest.MonkeyPatch()
        self.hosts = Hosts(self.directory / "tier", self.patch)
        self.stored: set[int] = set()
        for _ in range(3):
            self.hosts.make(TierLimits(CAPACITY_BYTES))
        self.hosts.settle()

    def host(self, who: int) -> AnnouncingHost:
        return self.hosts.hosts[who % len(self.hosts.hosts)]

    def logs(self) -> list[Path]:
        control = self.directory / "tier" / CONTROL
        found = [*control.glob(f"*/{ANNOUNCEMENTS}"), *control.glob(f"*/*/{ANNOUNCEMENTS}")]
        return sorted(found)

    @rule(who=WHO, seed=SEEDS)
    def store(self, who: int, seed: int) -> None:
        try:
            self.hosts.store(self.host(who), seed)
        except TierError:
            return
        self.stored.add(seed)

    @rule(who=WHO, seed=SEEDS)
    def delete(self, who: int, seed: int) -> None:
        self.host(who).tier.delete(make_object(seed)[0])

    @rule(seed=SEEDS)
    def remove_by_hand(self, seed: int) -> None:
        Path(self.hosts.path(seed)).unlink(missing_ok=True)

    @rule(who=WHO)
    def announce(self, who: int) -> None:
        self.host(who).tier.announcement_log.run_once()

    @rule(seconds=st.sampled_from((0.5, 1.0, 11.0)))
    def maintain(self, seconds: float) -> None:
        self.hosts.rounds(1, seconds)

    @rule(
        which=st.integers(0, 10),
        damage=st.sampled_from((_cut, _garble, _delete)),
        seed=st.integers(0, 1_000),
    )
    def damage(self, which: int, damage: object, seed: int) -> None:
        logs = self.logs()
        if logs:
            damage(logs[which % len(logs)], random.Random(seed))  # type: ignore[operator]

    @rule(which=st.integers(0, 10), number=st.integers(0, 400), present=st.booleans(), seed=SEEDS)
    def plant(self, which: int, number: int, present: bool, seed: int) -> None:
        """A block of a process that can write to the directory."""
        logs = self.logs()
        if not logs:
            return
        path = logs[which % len(logs)]
        key = make_object(PLANTED if present else seed)[0].key
        frames = encode_frames([Announcement(NAMESPACE, key, 12_288 * present)], 77, number, None)
        LogWriter(number).append(path, 32, Modes(0o640, 0o750, None), frames)

    @precondition(lambda self: len(self.hosts.hosts) > 1)
    @rule(who=WHO)
    def kill(self, who: int) -> None:
        self.hosts.hosts.remove(self.host(who))

    @precondition(lambda self: len(self.hosts.hosts) < 3)
    @rule()
    def join(self) -> None:
        self.hosts.make(TierLimits(CAPACITY_BYTES))

    @rule(who=WHO, seed=SEEDS)
    def read(self, who: int, seed: int) -> None:
        ref, payload, meta = make_object(seed)
        into = buffer(payload.nbytes)
        try:
            found = self.host(who).tier.read(ref, into)
        except TierMissError:
            return
        assert seed in self.stored
        assert found == meta
        assert into == payload

    @invariant()
    def the_directory_is_within_its_capacity(self) -> None:
        assert directory_bytes(self.directory / "tier") <= CAPACITY_BYTES

    @invariant()
    def only_what_was_stored_or_planted_is_indexed(self) -> None:
        known = {make_object(seed)[0].key for seed in (*self.stored, PLANTED)}
        for host in self.hosts.hosts:
            assert set(host.tier.keys(NAMESPACE)) <= known

    def teardown(self) -> None:
        try:
            # Time for a new leader, and for scans of what was lost.
            for _ in range(40):
                self.hosts.rounds(1, 1.0)
                self.hosts.announce()
            for _ in range(8):
                self.hosts.rounds(1, 11.0)
                self.hosts.announce()
            there = {seed for seed in range(12) if Path(self.hosts.path(seed)).exists()}
            for host in self.hosts.hosts:
                for seed in range(12):
                    ref = make_object(seed)[0]
                    if seed in there:
                        assert host.tier.contains(ref) or host.tier.probe(ref)
        finally:
            self.patch.undo()
            shutil.rmtree(self.directory, ignore_errors=True)


TestAnnouncements = AnnouncementMachine.TestCase
TestAnnouncements.settings = settings(
    max_examples=12,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
