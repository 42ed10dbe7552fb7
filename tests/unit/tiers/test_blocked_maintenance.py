"""A call of the file system that does not return stops the maintenance that made it, and delays no
grant."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierNoSpaceError, TierUnavailableError
from kvtier.harness.file_writers import directory_bytes
from kvtier.testing.objects import make_object
from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem import FileSystemTier, maintenance

MIB = 1 << 20
PATIENCE_SECONDS = 60.0


class BlockedCalls:
    """Calls of ``os`` on the paths chosen do not return until ``release``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._released = threading.Event()
        self.blocked = threading.Event()
        self.threads: set[str] = set()

    def block(self, name: str, chosen: Callable[[str], bool]) -> None:
        call = getattr(os, name)

        def blocking(path: Any, *arguments: Any, **more: Any) -> Any:
            if isinstance(path, str | Path) and chosen(str(path)):
                self.threads.add(threading.current_thread().name)
                self.blocked.set()
                self._released.wait(PATIENCE_SECONDS)
            return call(path, *arguments, **more)

        self._monkeypatch.setattr(os, name, blocking)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockedCalls]:
    # The tests do not depend on how long a grant takes, only on whether it comes.
    monkeypatch.setattr(maintenance, "GRANT_SECONDS", PATIENCE_SECONDS / 2)
    blocked = BlockedCalls(monkeypatch)
    yield blocked
    blocked.release()


@pytest.fixture
def open_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., FileSystemTier]]:
    for module in ("janitor", "election"):
        monkeypatch.setattr(f"kvtier.tiers.filesystem.{module}.in_this_process", lambda _: False)
    opened: list[FileSystemTier] = []

    def make(limits: TierLimits | None = None) -> FileSystemTier:
        document = FileSystemTierDocument(
            name="disk", path=str(tmp_path / "tier"), sharing="Node", direct_io="Never"
        )
        tier = FileSystemTier(document, limits or TierLimits(64 * MIB))
        tier.open(lambda *_: None)
        opened.append(tier)
        return tier

    yield make
    for tier in opened:
        tier.close()


def scan_now(tier: FileSystemTier) -> None:
    tier.maintenance._scans._recount_due_at = float("-inf")
    tier.maintenance.request_recount()
    tier.maintenance._threads.wake("scans")


def write_with_new_grant(tier: FileSystemTier, seed: int) -> None:
    tier.maintenance.grants.revoke()
    tier.write(*make_object(seed))


def test_a_directory_that_is_being_recounted_grants_bytes(
    calls: BlockedCalls, open_tier: Callable[..., FileSystemTier], tmp_path: Path
) -> None:
    first, second = open_tier(), open_tier()
    for seed in range(8):
        first.write(*make_object(seed))
    root = str(tmp_path / "tier")
    calls.block("scandir", lambda path: path.startswith(root))
    scan_now(first)
    assert calls.blocked.wait(PATIENCE_SECONDS)
    assert first.maintenance.generation() % 2 == 1
    write_with_new_grant(first, 100)
    write_with_new_grant(second, 101)
    assert first.maintenance.generation() % 2 == 1
    assert {"kvtier-file-tier-scans"} <= calls.threads
    calls.release()
    # The count that went on meanwhile charges what was stored during it.
    janitor = first.maintenance.janitor
    assert janitor is not None
    first.maintain()
    assert (janitor.ledger.charge_bytes or 0) >= 10 * 12_288


def test_an_eviction_that_hangs_delays_no_grant_for_which_there_is_room(
    calls: BlockedCalls, open_tier: Callable[..., FileSystemTier]
) -> None:
    tier = open_tier(TierLimits(8 * MIB, 60, 50))
    calls.block("unlink", lambda path: path.endswith(".kv"))
    seed = 0
    while not calls.blocked.is_set():
        assert seed < 1_000
        tier.write(*make_object(seed))
        seed += 1
        tier.maintenance._threads.wake("evictions")
    for more in range(1_000, 1_020):
        write_with_new_grant(tier, more)
    assert calls.threads == {"kvtier-file-tier-evictions"}
    calls.release()
    tier.maintain()
    assert tier.usage().used_bytes <= 8 * MIB


def test_an_eviction_for_a_grant_happens_while_the_directory_is_recounted(
    calls: BlockedCalls, open_tier: Callable[..., FileSystemTier], tmp_path: Path
) -> None:
    tier = open_tier(TierLimits(2 * MIB, 100, 90))
    for seed in range(8):
        tier.write(*make_object(seed))
    root = str(tmp_path / "tier")
    calls.block("scandir", lambda path: path.startswith(root))
    scan_now(tier)
    assert calls.blocked.wait(PATIENCE_SECONDS)
    for seed in range(100, 400):
        tier.write(*make_object(seed))
    assert tier.maintenance.generation() % 2 == 1
    calls.release()
    assert 0 < directory_bytes(tmp_path / "tier") <= 2 * MIB


def test_a_store_fails_at_once_if_the_leases_cannot_be_renewed(
    calls: BlockedCalls, open_tier: Callable[..., FileSystemTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()

    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("kvtier.tiers.filesystem.record.rewrite", fails)
    with pytest.raises(TierUnavailableError, match="EIO"):
        write_with_new_grant(tier, 1)


def test_a_closed_tier_ends_its_threads(open_tier: Callable[..., FileSystemTier]) -> None:
    before = set(threading.enumerate())
    tier = open_tier()
    threads = [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith(("kvtier-file-tier", "kvtier-announcements"))
    ]
    assert len(threads) >= 4
    tier.close()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    with pytest.raises((TierUnavailableError, TierNoSpaceError)):
        write_with_new_grant(tier, 1)
