"""Tiers of one directory that treat each other as processes of other hosts, without threads."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierNoSpaceError
from kvtier.testing.objects import NAMESPACE, make_object
from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem import FileSystemTier, maintenance
from kvtier.tiers.filesystem.scan_scheduler import ScanScheduler
from kvtier.tiers.filesystem.seal import Sealing
from kvtier.tiers.filesystem.walker import object_path
from kvtier.tiers.isolation_keys import KeySet

MIB = 1 << 20


class AnnouncingHost:
    """A tier with its own clock, whose maintenance and announcements the test runs."""

    def __init__(self, root: Path, limits: TierLimits, keys: KeySet | None = None) -> None:
        self.root = root
        self.now = 0.0
        self.changes: list[tuple[str, bytes, bool]] = []
        document = FileSystemTierDocument(
            name="disk", path=str(root), sharing="Cluster", direct_io="Never"
        )
        sealing = None if keys is None else Sealing(lambda: keys)
        self.tier = FileSystemTier(document, limits, clock=lambda: self.now, sealing=sealing)
        self.tier.maintenance.start_loop = lambda: None  # type: ignore[method-assign]
        self.tier.announcement_log.start = lambda: None  # type: ignore[method-assign]
        self.tier.open(lambda *change: self.changes.append(change))

    @property
    def is_janitor(self) -> bool:
        return self.tier.maintenance.janitor is not None

    @property
    def janitor_term(self) -> int:
        janitor = self.tier.maintenance.janitor
        assert janitor is not None
        return janitor.term

    def write(self, seed: int) -> None:
        self.tier.write(*make_object(seed))


class Hosts:
    """All tiers of one directory; the first one leads."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.hosts: list[AnnouncingHost] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(maintenance, "GRANT_SECONDS", 0.01)
        for module in ("janitor", "election"):
            monkeypatch.setattr(
                f"kvtier.tiers.filesystem.{module}.in_this_process", lambda _: False
            )

    def make(self, limits: TierLimits | None = None, keys: KeySet | None = None) -> AnnouncingHost:
        host = AnnouncingHost(self.root, limits or TierLimits(64 * MIB), keys)
        self.hosts.append(host)
        return host

    def rounds(self, count: int = 1, seconds: float = 1.0) -> None:
        """Rounds of maintenance of every tier."""
        for _ in range(count):
            for host in self.hosts:
                host.now += seconds
                host.tier.maintenance.run_once()

    def settle(self) -> None:
        """Until every tier knows of the logs of the others."""
        for _ in range(2):
            self.rounds(2)
            self.announce()

    def announce(self) -> None:
        """Rounds of announcements: to the leader, to its log, and to the others."""
        for _ in range(3):
            for host in self.hosts:
                host.tier.announcement_log.run_once()

    def store(self, host: AnnouncingHost, seed: int) -> None:
        """A write of any tier: requests a grant where it has none."""
        for _ in range(5):
            with contextlib.suppress(TierNoSpaceError):
                host.write(seed)
                return
            host.tier.maintenance.grants.request(12_288)
            self.rounds(2)
            host.tier.maintenance.grants._requests.clear()
        host.write(seed)

    def path(self, seed: int) -> str:
        return object_path(str(self.root), NAMESPACE, make_object(seed)[0].key)

    def lost(self, host: AnnouncingHost) -> Counter[str]:
        """Announcements that this tier has lost or not accepted, by reason."""
        return Counter(
            {
                reason: count
                for (name, reason), count in host.tier._announcements.counts().items()
                if name == "tier_announcements_lost"
            }
        )

    def count_scans(self) -> Counter[int]:
        """Counts scans that begin from now on, by the identity of their maintenance."""
        counts: Counter[int] = Counter()
        owners = {id(host.tier.maintenance._scans): host.tier.maintenance for host in self.hosts}
        begin = ScanScheduler._begin

        def counted(scans: ScanScheduler) -> object:
            counts[id(owners[id(scans)])] += 1
            return begin(scans)

        self._monkeypatch.setattr(ScanScheduler, "_begin", counted)
        return counts
