"""Invalid records and foreign files in a shared directory never stop maintenance."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tiers.test_maintenance import MIB, Host, write_with
from tests.unit.tiers.test_maintenance import hosts as hosts

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierCorruptError
from kvtier.hashing import blake3_hex
from kvtier.testing.objects import buffer, make_object
from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem import FileSystemTier, maintenance, record
from kvtier.tiers.filesystem.election import LEASE_SECONDS, read_ledger, read_writer
from kvtier.tiers.filesystem.layout import (
    LEDGER,
    RECORD,
    Modes,
    offer_name,
    term_path,
    writers_path,
)
from kvtier.tiers.filesystem.walker import object_path

PATIENCE_SECONDS = 30.0
WRITER: dict[str, Any] = {
    "beat": 1, "ask": 0, "bytes": 0, "least": 0, "used": {}, "settled": {}, "closed": False,
    "full": 0, "recount": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"ask": None},
        {"bytes": "many"},
        {"least": -1},
        {"beat": True},
        {"full": 10**30},
        {"settled": []},
        {"settled": {"one": 1}},
        {"settled": {"1": None}},
        {"used": {"1": -1}},
        {"closed": 1},
    ],
    ids=str,
)
def test_a_writer_with_an_invalid_record_is_fenced(
    hosts: Callable[..., Host], tmp_path: Path, change: dict[str, Any]
) -> None:
    janitor, other = hosts(), hosts()
    folder = writers_path(tmp_path / "tier") / "writer"
    folder.mkdir()
    record.create(folder / RECORD, WRITER | change, Modes(0o640, 0o750, None))
    assert read_writer(tmp_path / "tier", "writer") is None
    for _ in range(int(LEASE_SECONDS) + 2):
        janitor.run_round()
        other.run_round()
    assert janitor.is_janitor
    assert not folder.exists()
    write_with(other, janitor, 1)


@pytest.mark.parametrize("kind", ["file", "pipe", "nested", "endless"])
def test_foreign_files_in_place_of_a_record_do_not_stop_the_janitor(
    hosts: Callable[..., Host], tmp_path: Path, kind: str
) -> None:
    janitor = hosts()
    place = writers_path(tmp_path / "tier") / "writer"
    if kind == "file":
        place.write_text("no directory")
    else:
        place.mkdir()
        if kind == "pipe":
            os.mkfifo(place / RECORD)
        elif kind == "nested":
            depth = 100_000
            record.create(place / RECORD, {}, Modes(0o640, 0o750, None))
            (place / RECORD).write_bytes(signed(b"[" * depth + b"]" * depth))
        else:
            (place / RECORD).touch()
            os.truncate(place / RECORD, 1 << 40)
    for _ in range(int(LEASE_SECONDS) + 2):
        janitor.run_round()
    assert janitor.is_janitor
    assert not place.exists()
    janitor.write(1)


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_lies_in_place_of_an_offer_is_replaced_and_does_not_block(
    hosts: Callable[..., Host], tmp_path: Path, kind: str
) -> None:
    janitor, other = hosts(), hosts()
    leader = janitor.tier.maintenance.janitor
    assert leader is not None
    elsewhere = tmp_path / "elsewhere"
    for number in range(1, 9):
        place = term_path(tmp_path / "tier", leader.term) / offer_name(
            other.tier.maintenance.writer.name, number
        )
        if kind == "pipe":
            os.mkfifo(place)
        else:
            place.symlink_to(elsewhere)
    write_with(other, janitor, 1)
    assert janitor.is_janitor
    assert not elsewhere.exists()


def signed(body: bytes) -> bytes:
    """A record with arbitrary content and a valid checksum."""
    empty = record._encoded({})
    digest = blake3_hex(body, empty.index(b" "))
    return f"{digest} {len(body):010d}\n".encode() + body


@pytest.mark.parametrize(
    "change",
    [
        {"writers": []},
        {"writers": {"w": {"answer": [1], "open": []}}},
        {"writers": {"w": {"answer": [1, 2], "open": None}}},
        {"quantum": "much"},
        {"recall": None},
        {"released": 0},
        {"holder": 3},
        {"base": -1},
    ],
    ids=str,
)
def test_a_janitor_with_an_invalid_ledger_is_replaced(
    hosts: Callable[..., Host], tmp_path: Path, change: dict[str, Any]
) -> None:
    first, second = hosts(), hosts()
    fence = first.tier.maintenance.janitor.term if first.tier.maintenance.janitor is not None else 0
    found = read_ledger(tmp_path / "tier", fence)
    assert found is not None
    record.rewrite(term_path(tmp_path / "tier", fence) / LEDGER, found | change)
    assert read_ledger(tmp_path / "tier", fence) is None
    for _ in range(int(LEASE_SECONDS) + 3):
        second.run_round()
    assert second.is_janitor
    second.write(1)


def test_a_pipe_in_place_of_an_object_is_corrupt_and_does_not_block(tmp_path: Path) -> None:
    document = FileSystemTierDocument(
        name="disk", path=str(tmp_path), sharing="Node", direct_io="Never"
    )
    tier = FileSystemTier(document, TierLimits(64 * MIB))
    tier.maintenance.start_loop = lambda: None  # type: ignore[method-assign]
    tier.announcement_log.start = lambda: None  # type: ignore[method-assign]
    tier.open(lambda *_: None)
    ref, payload, meta = make_object(1)
    tier.write(ref, payload, meta)
    path = object_path(str(tmp_path), ref.namespace, ref.key)
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(TierCorruptError):
        tier.read(ref, buffer(payload.nbytes))
    assert not os.path.lexists(path)
    assert not tier.contains(ref)


def test_the_maintenance_loop_survives_an_unexpected_exception(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = FileSystemTierDocument(
        name="disk", path=str(tmp_path), sharing="Node", direct_io="Never"
    )
    tier = FileSystemTier(document, TierLimits(64 * MIB))
    twice = threading.Semaphore(0)

    def failing_round() -> None:
        twice.release()
        tier.maintenance.wake()
        raise KeyError("beat")

    tier.open(lambda *_: None)
    tier.maintenance.run_leases = failing_round  # type: ignore[method-assign]
    tier.maintenance.wake()
    for _ in range(3):
        assert twice.acquire(timeout=PATIENCE_SECONDS)
    tier.close()
    assert [
        each.message
        for each in caplog.records
        if each.name == maintenance.__name__.rsplit(".", 1)[0]
    ].count("directory maintenance failed and will be retried") == 1
