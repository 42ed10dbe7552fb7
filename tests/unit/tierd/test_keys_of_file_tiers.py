"""tierd with ``isolation.keyDirectory``: suspended without keys, and keys that change."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.config.models import Encryption, IsolationSettings
from kvtier.harness.tierd_testbed import WAIT_SECONDS, TierdOptions, TierdTestbed, wait_for
from kvtier.tierd.daemon import DaemonOptions, TierDaemon
from kvtier.tiers import isolation_keys

MATERIAL = b"m" * 32


class KeyedTierd:
    """A tierd in this process, with a file tier and a Secret."""

    def __init__(self, directory: Path, encryption: Encryption = Encryption.NONE) -> None:
        self.case = TierdTestbed(directory / "case", TierdOptions(file_bytes=1 << 30))
        self.secret = directory / "secret"
        self.secret.mkdir()
        self.case.change(
            isolation=IsolationSettings(key_directory=str(self.secret), encryption=encryption)
        )
        self._daemon: TierDaemon | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._daemon = TierDaemon(DaemonOptions(self.case.topology_directory))
        self._thread = threading.Thread(target=self._daemon.run, daemon=True)
        self._thread.start()
        wait_for(lambda: self.case.status().get("started"), "tierd serves")

    def close(self) -> None:
        if self._daemon is not None and self._thread is not None:
            self._daemon.stop()
            self._daemon.stop()
            self._thread.join(WAIT_SECONDS)
        self.case.close()

    def disk(self) -> dict[str, Any]:
        return dict(self.case.status()["tiers"][1])

    def conditions(self) -> dict[str, str]:
        return {each["type"]: each["message"] for each in self.case.status()["conditions"]}

    def files(self) -> list[Path]:
        return sorted(self.case.files.rglob("*.kv"))


@pytest.fixture
def tierd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeyedTierd]:
    monkeypatch.setattr(isolation_keys, "POLL_SECONDS", 0.05)
    found = KeyedTierd(tmp_path)
    yield found
    found.close()


def test_without_the_secret_the_file_tier_is_suspended_and_ram_is_served(
    tierd: KeyedTierd,
) -> None:
    tierd.start()
    wait_for(lambda: tierd.disk()["state"] == "BreakerOpen", "the tier is suspended")
    assert tierd.disk()["cause"] == "key_missing"
    assert "suspended until their keys are available" in tierd.conditions()["KeyMissing"]
    engine = tierd.case.engine()
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.store(1)
    assert engine.wait_for(lambda: engine.holds(1), WAIT_SECONDS)
    assert engine.load([1]) == 1
    assert tierd.files() == []
    # Long before breaker.periodSeconds.
    (tierd.secret / "2026-11").write_bytes(MATERIAL)
    wait_for(lambda: tierd.disk()["state"] == "Healthy", "the tier is used")
    wait_for(lambda: "KeyMissing" not in tierd.conditions(), "the condition is gone")
    wait_for(tierd.files, "what RAM holds is written")
    assert b"2026-11" in tierd.files()[0].read_bytes()[144:176]


def test_keys_that_vanish_suspend_the_tier_and_remove_nothing(tierd: KeyedTierd) -> None:
    (tierd.secret / "a").write_bytes(MATERIAL)
    tierd.start()
    engine = tierd.case.engine()
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.store(1)
    wait_for(tierd.files, "the object is written")
    (tierd.secret / "a").unlink()
    wait_for(lambda: "KeyMissing" in tierd.conditions(), "the condition is there")
    assert engine.store(2)
    wait_for(lambda: tierd.disk()["state"] == "BreakerOpen", "the tier is suspended")
    assert len(tierd.files()) == 1
    (tierd.secret / "a").write_bytes(MATERIAL)
    wait_for(lambda: tierd.disk()["state"] == "Healthy", "the tier is used again")


def test_an_invalid_secret_is_a_condition_and_the_last_keys_stay(tierd: KeyedTierd) -> None:
    (tierd.secret / "a").write_bytes(MATERIAL)
    tierd.start()
    wait_for(lambda: tierd.disk()["state"] == "Healthy", "the tier is used")
    (tierd.secret / "current").write_text("b")
    wait_for(lambda: "KeyInvalid" in tierd.conditions(), "the condition is there")
    assert "must name a key of the Secret: a" in tierd.conditions()["KeyInvalid"]
    assert tierd.disk()["state"] == "Healthy"


def test_an_object_of_a_key_that_a_rotation_dropped_is_recomputed_and_stored_again(
    tierd: KeyedTierd,
) -> None:
    (tierd.secret / "a").write_bytes(MATERIAL)
    tierd.start()
    engine = tierd.case.engine()
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.store(1)
    wait_for(tierd.files, "the object is written")
    engine.close()
    tierd.close()
    shutil.rmtree(tierd.secret)
    tierd.secret.mkdir()
    (tierd.secret / "b").write_bytes(b"n" * 32)
    tierd.start()
    engine = tierd.case.engine()
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.wait_for(lambda: engine.holds(1), WAIT_SECONDS)
    assert engine.load([1]) == 0
    wait_for(
        lambda: tierd.case.counter("tier_reads_failed", "unknown_key") == 1, "the miss is counted"
    )
    (path,) = tierd.files()
    assert engine.wait_for(lambda: not engine.holds(1), WAIT_SECONDS)
    assert engine.store(1)
    wait_for(lambda: path.read_bytes()[144:145] == b"b", "the object is replaced")


def test_encryption_without_its_library_is_a_condition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers", None)
    tierd = KeyedTierd(tmp_path, Encryption.AES256GCM)
    try:
        tierd.start()
        assert "requires the Python package cryptography" in tierd.conditions()["TierNotServed"]
    finally:
        tierd.close()
