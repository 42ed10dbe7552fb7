"""Maintenance of one directory by two tiers whose clocks the tests control."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.tier_files import bytes_below

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierMissError, TierNoSpaceError, TierUnavailableError
from kvtier.testing.objects import NAMESPACE, buffer, make_object
from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem import FileSystemTier, io, maintenance, tier
from kvtier.tiers.filesystem.election import HEARTBEAT_SECONDS, LEASE_SECONDS
from kvtier.tiers.filesystem.layout import writers_path
from kvtier.tiers.filesystem.walker import object_path

MIB = 1 << 20
DAY = 86_400.0


class Host:
    """A tier with its own monotonic clock and without a maintenance loop."""

    def __init__(self, root: Path, limits: TierLimits, start: float = 0.0) -> None:
        self.now = start
        self.changes: list[tuple[str, bytes, bool]] = []
        document = FileSystemTierDocument(
            name="disk", path=str(root), sharing="Node", direct_io="Never"
        )
        self.tier = FileSystemTier(document, limits, clock=lambda: self.now)
        self.tier.maintenance.start_loop = lambda: None  # type: ignore[method-assign]
        self.tier.announcement_log.start = lambda: None  # type: ignore[method-assign]
        self.tier.open(lambda *change: self.changes.append(change))

    @property
    def is_janitor(self) -> bool:
        return self.tier.maintenance.janitor is not None

    def run_round(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.tier.maintenance.run_once()

    def write(self, seed: int) -> None:
        self.tier.write(*make_object(seed))


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    """Creates tiers that treat each other as processes of other hosts."""
    monkeypatch.setattr(maintenance, "GRANT_SECONDS", 0.2)
    monkeypatch.setattr("kvtier.tiers.filesystem.janitor.in_this_process", lambda _: False)
    monkeypatch.setattr("kvtier.tiers.filesystem.election.in_this_process", lambda _: False)

    def make(limits: TierLimits | None = None, start: float = 0.0) -> Host:
        return Host(tmp_path / "tier", limits or TierLimits(64 * MIB), start)

    return make


def write_with(writer: Host, janitor: Host, seed: int) -> None:
    """A write of a tier that does not lead: it requests a grant, receives it, and writes."""
    try:
        writer.write(seed)
    except TierNoSpaceError:
        writer.tier.maintenance.grants.request(12_288)
        writer.run_round()
        janitor.run_round()
        writer.run_round()
        writer.tier.maintenance.grants._requests.clear()
        writer.write(seed)


def test_the_first_process_leads_and_grants_bytes_to_the_second(
    hosts: Callable[..., Host],
) -> None:
    first, second = hosts(), hosts(start=5_000.0)
    assert first.is_janitor
    assert not second.is_janitor
    with pytest.raises(TierNoSpaceError, match="no grant"):
        second.write(1)
    write_with(second, first, 1)
    ref, payload, meta = make_object(1)
    assert first.tier.probe(ref)
    into = buffer(payload.nbytes)
    assert first.tier.read(ref, into) == meta
    assert into == payload


def test_a_silent_janitor_is_replaced_and_loses_leadership(
    hosts: Callable[..., Host],
) -> None:
    first, second = hosts(), hosts()
    first.write(1)
    for _ in range(int(LEASE_SECONDS) - 1):
        second.run_round()
    assert not second.is_janitor
    for _ in range(3):
        second.run_round()
    assert second.is_janitor
    assert first.is_janitor  # not noticed yet
    first.run_round()
    assert not first.is_janitor
    second.write(2)
    assert second.tier.probe(make_object(1)[0])


def test_a_silent_writer_is_fenced_with_its_partial_file_and_registers_again(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    first, second = hosts(), hosts()
    write_with(second, first, 1)
    half = Path(second.tier.maintenance.writer.new_working_path())
    half.write_bytes(bytes(4_096))
    name = second.tier.maintenance.writer.name
    for _ in range(int(LEASE_SECONDS) + 2):
        first.run_round()
    assert not half.exists()
    assert name not in os.listdir(writers_path(tmp_path / "tier"))
    # Its own clock stood still, so its lease seems valid.
    with pytest.raises(TierNoSpaceError, match="fenced this process"):
        second.write(2)
    assert not second.tier.contains(make_object(2)[0])
    second.run_round()
    assert second.tier.maintenance.writer.name != name
    write_with(second, first, 2)


def test_a_writer_with_an_expired_lease_publishes_nothing(hosts: Callable[..., Host]) -> None:
    first, second = hosts(), hosts()
    write_with(second, first, 1)
    second.now += LEASE_SECONDS + 1
    with pytest.raises(TierNoSpaceError, match="the grant expired"):
        second.write(2)
    second.run_round()
    second.write(2)


def test_a_jump_of_the_clock_fences_no_process(hosts: Callable[..., Host]) -> None:
    first, second = hosts(), hosts()
    for _ in range(5):
        first.run_round(10_000.0)
        second.run_round(0.01)
    assert first.is_janitor
    assert not second.is_janitor
    second.run_round(10_000.0)
    assert not second.is_janitor
    assert (
        first.tier.maintenance.writer.revocations == 0 == second.tier.maintenance.writer.revocations
    )


def test_scans_find_objects_of_other_processes_and_their_eviction(
    hosts: Callable[..., Host],
) -> None:
    first, second = hosts(), hosts()
    for seed in range(10):
        first.write(seed)
    assert second.tier.usage().objects == 0
    for _ in range(3):
        second.run_round(11.0)
    assert second.tier.usage().objects == 10
    assert {key for _, key, present in second.changes if present} == {
        make_object(seed)[0].key for seed in range(10)
    }
    first.tier.delete(make_object(3)[0])
    first.tier.delete(make_object(4)[0])
    ref, payload, _ = make_object(3)
    with pytest.raises(TierMissError):
        second.tier.read(ref, payload)
    assert not second.tier.contains(ref)
    for _ in range(8):
        second.run_round(11.0)
    assert not second.tier.contains(make_object(4)[0])
    assert second.changes[-1] == (NAMESPACE, make_object(4)[0].key, False)
    assert second.tier.usage().objects == 8


def test_the_janitor_evicts_least_recently_used_objects_of_all_writers(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    first = hosts(TierLimits(MIB, 90, 80))
    second = hosts(TierLimits(MIB, 90, 80))
    for seed in range(30):
        write_with(second, first, seed)
        path = object_path(str(tmp_path / "tier"), NAMESPACE, make_object(seed)[0].key)
        os.utime(path, (seed, seed))
    os.utime(
        object_path(str(tmp_path / "tier"), NAMESPACE, make_object(0)[0].key)
    )  # a hit, by anybody
    for _ in range(3):
        first.run_round(11.0)
    assert first.tier.usage().objects == 30
    for seed in range(100, 140):
        first.write(seed)
    left = {path.stem for path in (tmp_path / "tier").rglob("*.kv")}
    assert make_object(0)[0].key.hex() in left
    assert make_object(1)[0].key.hex() not in left


@pytest.mark.parametrize("work", ["evicting", "retiring"])
def test_a_janitor_renews_its_lease_during_a_long_removal(
    hosts: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    first, second = hosts(), hosts()
    for seed in range(60):
        first.write(seed)
    for _ in range(3):
        second.run_round(11.0)
        first.run_round()
    janitor = first.tier.maintenance.janitor
    assert janitor is not None
    remove = janitor._remove
    taken: list[bytes] = []

    def slowly(namespace: str, key: bytes) -> int:
        taken.append(key)
        first.now += 0.5
        second.run_round(0.5)
        return remove(namespace, key)

    monkeypatch.setattr(janitor, "_remove", slowly)
    if work == "evicting":
        janitor.evict(first.tier.usage().used_bytes)
    else:
        janitor.remove_namespace(NAMESPACE)
    assert len(taken) == 60
    first.run_round()
    second.run_round()
    assert first.tier.maintenance.janitor is janitor
    assert not second.is_janitor


def write_all(host: Host, seeds: range) -> None:
    for seed in seeds:
        host.write(seed)


def test_a_file_that_cannot_be_removed_does_not_block_eviction(
    hosts: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = hosts(TierLimits(MIB))
    for seed in range(20):
        first.write(seed)
    refs = [make_object(seed)[0] for seed in (0, 1, 2)]
    stuck = {object_path(str(tmp_path / "tier"), ref.namespace, ref.key) for ref in refs}
    unlink = os.unlink

    def fails(path: Any, **options: Any) -> None:
        if path in stuck:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", fails)
    write_all(first, range(100, 300))
    for seed in (0, 1, 2):
        ref, payload, meta = make_object(seed)
        assert first.tier.read(ref, buffer(payload.nbytes)) == meta
    # Where nothing at all can be removed, it is the tier that does not work.
    stuck.update(str(path) for path in (tmp_path / "tier" / NAMESPACE).rglob("*.kv"))
    with pytest.raises(TierUnavailableError, match="EPERM"):
        write_all(first, range(300, 500))


def test_a_namespace_that_cannot_be_removed_does_not_block_writers(
    hosts: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = hosts(TierLimits(64 * MIB, retention_seconds=int(3 * DAY)))
    first.write(1)
    for path in (tmp_path / "tier" / NAMESPACE).rglob("*"):
        os.utime(path, (1.0, 1.0))
    os.utime(tmp_path / "tier" / NAMESPACE, (1.0, 1.0))

    unlink = os.unlink

    def fails(path: Any, **options: Any) -> None:
        if str(path).endswith(".kv"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", fails)
    for _ in range(4):
        first.run_round(4_000.0)
    assert first.tier.usage().objects == 1
    first.write(2)


def test_a_lowered_capacity_is_reached_in_the_next_round_including_grants(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    first, second = hosts(), hosts()
    for seed in range(100):
        write_with(second, first, seed)
    for host in (first, second):
        host.tier.configure(TierLimits(400_000))
    for _ in range(3):
        second.run_round()
        first.run_round()
    first.tier.maintain()
    used = bytes_below(tmp_path / "tier", ".kv")
    assert 0 < used <= 400_000
    janitor = first.tier.maintenance.janitor
    assert janitor is not None
    assert (janitor.ledger.charge_bytes or 0) <= 400_000


def test_a_new_janitor_inherits_the_ledger_without_a_count(
    hosts: Callable[..., Host],
) -> None:
    first, second = hosts(), hosts()
    for seed in range(10):
        first.write(seed)
    for _ in range(3):
        first.run_round()
        second.run_round()
    while not second.is_janitor:
        second.run_round()
    janitor = second.tier.maintenance.janitor
    assert janitor is not None
    assert (janitor.ledger.charge_bytes or 0) >= 10 * 12_288
    second.write(20)


def test_a_janitor_that_resigns_is_replaced_at_once(hosts: Callable[..., Host]) -> None:
    first, second = hosts(), hosts()
    first.write(1)
    first.tier.maintenance.release()
    second.run_round()
    assert second.is_janitor
    second.write(2)
    second.run_round()
    janitor = second.tier.maintenance.janitor
    assert janitor is not None
    assert len(os.listdir(writers_path(second.tier._root))) == 1


def test_unused_namespaces_are_removed_after_their_retention(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    first = hosts(TierLimits(64 * MIB, retention_seconds=int(3 * DAY)))
    root, old, idle = tmp_path / "tier", "a" * 32, "b" * 32
    for namespace in (old, idle, NAMESPACE):
        ref, payload, meta = make_object(1)
        first.tier.write(type(ref)(namespace, ref.key), payload, meta)
        (root / namespace / "identity.json").write_text(
            '{"model": "m"}'
        )  # by a process that has exited
        for path in [*(root / namespace).rglob("*.kv"), root / namespace / "identity.json"]:
            os.utime(path, (1.0, 1.0)) if namespace != NAMESPACE else None
    again = hosts(TierLimits(64 * MIB, retention_seconds=int(3 * DAY)))
    again.tier.describe_namespace(
        idle, '{"model": "m"}'
    )  # an engine attached, and has done nothing yet
    for _ in range(4):
        first.run_round(4_000.0)
    assert not (root / old).exists()
    assert (root / idle / "identity.json").exists()
    assert first.tier.usage().objects == 2
    assert (old, make_object(1)[0].key, False) in first.changes


def test_a_clock_that_jumps_ahead_removes_no_namespace_in_use(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    first = hosts(TierLimits(64 * MIB, retention_seconds=int(3 * DAY)))
    first.tier.describe_namespace(NAMESPACE, '{"model": "m"}')
    first.write(1)
    for path in (tmp_path / "tier" / NAMESPACE).rglob("*"):
        os.utime(path, (1.0, 1.0))  # as it looks after the jump
    for _ in range(4):
        first.run_round(4_000.0)
    assert first.tier.usage().objects == 1


def test_an_idle_engine_keeps_its_namespace_on_other_hosts(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    first, idle = hosts(), hosts()
    for each in (first, idle):
        each.tier.describe_namespace(NAMESPACE, '{"model": "m"}')
    identity = tmp_path / "tier" / NAMESPACE / "identity.json"
    os.utime(identity, (1.0, 1.0))
    idle.tier.maintain()
    assert identity.stat().st_mtime == 1.0
    idle.now += 4_000.0
    idle.tier.maintain()
    assert identity.stat().st_mtime > 1.0
    assert first.is_janitor


def test_enospc_in_one_process_makes_the_janitor_of_another_evict(
    hosts: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hosts(), hosts()
    for seed in range(40):
        first.write(seed)
    write_with(second, first, 100)

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(io, "write_file", no_space)
        with pytest.raises(TierNoSpaceError, match="EDQUOT"):
            second.write(101)
    first.run_round()
    assert first.tier.usage().objects == 38
    second.write(101)


def test_a_directory_that_was_replaced_is_not_filled(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    first = hosts()
    first.write(1)
    root = tmp_path / "tier"
    root.rename(tmp_path / "away")
    root.mkdir()
    with pytest.raises(TierNoSpaceError):
        first.write(2)
    with pytest.raises(TierUnavailableError, match="another directory"):
        first.run_round()
    assert os.listdir(root) == []
    root.rmdir()
    (tmp_path / "away").rename(root)
    first.run_round()
    first.write(3)


@pytest.mark.parametrize(
    "place",
    ["writers/README", "janitor-77", "writers/link", "janitor-1/ledger", "janitor-1/sub/sub"],
)
def test_foreign_files_in_the_control_directory_are_removed(
    hosts: Callable[..., Host], tmp_path: Path, place: str
) -> None:
    first = hosts()
    first.write(1)
    first.tier.maintenance.release()
    path = tmp_path / "tier" / ".kvtier" / place
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    if place.endswith(("README", "77")):
        path.touch()
    elif place.endswith("link"):
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink(missing_ok=True)
        path.mkdir(parents=True)
    second = hosts()
    for _ in range(30):
        second.run_round()
    assert second.is_janitor
    second.write(2)
    assert second.tier.usage().objects == 2
    assert not os.path.lexists(path)
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_a_deleted_control_directory_is_recreated_and_counted(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    first = hosts()
    first.write(1)
    shutil.rmtree(tmp_path / "tier" / ".kvtier")
    for _ in range(3):
        first.run_round()
    assert first.is_janitor
    first.write(2)
    janitor = first.tier.maintenance.janitor
    assert janitor is not None
    assert (janitor.ledger.base_bytes or 0) >= 2 * 12_288


def test_a_hit_updates_the_file_time_at_most_once_an_hour(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    first = hosts()
    first.write(1)
    ref, payload, _ = make_object(1)
    path = object_path(str(tmp_path / "tier"), NAMESPACE, ref.key)
    before = os.stat(path).st_mtime_ns
    first.tier.read(ref, payload)
    assert os.stat(path).st_mtime_ns == before
    os.utime(path, (1_000.0, 1_000.0))
    first.tier.read(ref, payload)
    assert os.stat(path).st_mtime > 1_000.0 + tier.TOUCH_SECONDS


def test_a_count_with_unreadable_names_is_discarded(
    hosts: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hosts()
    for seed in range(10):
        first.write(seed)
    first.run_round()
    janitor = first.tier.maintenance.janitor
    assert janitor is not None
    charged = janitor.ledger.charge_bytes
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("/00/00"):
            raise OSError(errno.EIO, "Input/output error")
        return scandir(path)

    janitor.request_recount()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        for _ in range(4):
            first.run_round(11.0)
    assert janitor.ledger.charge_bytes == charged
    assert janitor.recount_requested
    assert first.tier.usage().objects == 10


def test_a_store_and_a_load_make_one_open_each(
    hosts: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hosts()
    first.write(1)
    calls: list[str] = []
    this = threading.get_ident()  # tiers of other tests may be at work still
    names = (
        "open",
        "mkdir",
        "rename",
        "unlink",
        "stat",
        "lstat",
        "utime",
        "listdir",
        "scandir",
        "rmdir",
        "close",
    )
    for name in names:
        original = getattr(os, name)
        monkeypatch.setattr(
            os,
            name,
            lambda *a, _name=name, _call=original, **k: (
                calls.append(_name) if threading.get_ident() == this else None,
                _call(*a, **k),
            )[1],
        )
    first.write(2)
    assert calls == ["open", "close", "rename"]
    calls.clear()
    ref, payload, _ = make_object(2)
    first.tier.read(ref, payload)
    assert calls == ["open", "close"]


@pytest.mark.parametrize("seen_first", ["as a writer", "as the leader"])
def test_missing_records_are_recreated(
    hosts: Callable[..., Host], tmp_path: Path, seen_first: str
) -> None:
    host = hosts()
    host.write(1)
    for path in (tmp_path / "tier").iterdir():
        shutil.rmtree(path)
    if seen_first == "as the leader":
        # An eviction or a count noticed the loss before the writer's record was rewritten.
        host.tier.maintenance._lose_leadership()
    for _ in range(3):
        host.run_round()
    assert host.is_janitor
    host.write(2)
    ref, payload, _ = make_object(2)
    into = buffer(payload.nbytes)
    host.tier.read(ref, into)
    assert into == payload


def test_pauses_are_multiplied_by_the_pace(tmp_path: Path) -> None:
    document = FileSystemTierDocument(name="slow", path=str(tmp_path / "tier"), sharing="Node")
    clock = [0.0]
    tier = FileSystemTier(document, TierLimits(64 * MIB), clock=lambda: clock[0], pace=4.0)
    for kind in ("leases", "evictions", "scans"):
        assert tier.maintenance.pause_seconds(kind) == 4 * HEARTBEAT_SECONDS
    tier.maintenance.wake()
    assert tier.maintenance.pause_seconds("leases") == 4 * maintenance.BUSY_SECONDS
    assert tier.maintenance.pause_seconds("scans") == 4 * HEARTBEAT_SECONDS
