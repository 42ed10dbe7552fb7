"""The sidecar's supervisor as a real process: what tierd does never ends it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.ports import reserved_port
from tests.support.processes import held_by_the_kernel

from kvtier.config.writer import document_text
from kvtier.files import replace_file
from kvtier.harness.engine_process import http_request
from kvtier.harness.tierd_testbed import (
    WAIT_SECONDS,
    TierdOptions,
    TierdTestbed,
    environment,
    wait_for,
)
from kvtier.scorecard.mount import faulty_mount, unavailable
from kvtier.tierd.sidecar_supervisor import DRAIN_NAME

Start = Callable[..., "Sidecar"]
END_SECONDS = 20.0
"""It is a second and a half, and what a busy machine adds; a test must not fail for the latter. The
kubelet kills a container after 30 s, and what hangs here does not end."""


class Sidecar:
    """``kvtier-sidecar run`` over the files of a testbed."""

    def __init__(self, testbed: TierdTestbed, *arguments: str, umask: int = 0o077) -> None:
        self.testbed = testbed
        self._log = (testbed.directory / "sidecar.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvtier.tierd.sidecar", "run",
             "--topology", str(testbed.topology_directory),
             "--run-directory", str(testbed.run_directory), *arguments],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stderr=self._log,
            umask=umask,
        )  # fmt: skip

    def wait_serving(self, other_than: int = 0) -> int:
        """Waits until a tierd serves; its process id."""
        try:
            wait_for(
                lambda: (
                    self.testbed.tierd_pid() not in (0, other_than)
                    and self.testbed.status().get("started")
                ),
                "tierd serves",
            )
        except TimeoutError as error:
            raise TimeoutError(f"{error}; the sidecar said: {self.log()}") from None
        return self.testbed.tierd_pid()

    def log(self) -> str:
        return (self.testbed.directory / "sidecar.log").read_text()

    def end(self) -> float:
        """SIGTERM; how many seconds it took."""
        start = time.monotonic()
        self.process.terminate()
        assert self.process.wait(WAIT_SECONDS) == 0
        return time.monotonic() - start

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()


@pytest.fixture
def testbed(tmp_path: Path) -> Iterator[TierdTestbed]:
    made = TierdTestbed(tmp_path, TierdOptions(file_bytes=64 << 20))
    yield made
    made.close()


@pytest.fixture
def start(testbed: TierdTestbed) -> Iterator[Start]:
    started: list[Sidecar] = []

    def begin(*arguments: str, **options: Any) -> Sidecar:
        started.append(Sidecar(testbed, *arguments, **options))
        return started[-1]

    yield begin
    for sidecar in started:
        sidecar.close()


def test_a_killed_tierd_is_restarted_with_the_same_pool_and_the_next_epoch(
    testbed: TierdTestbed, start: Start
) -> None:
    sidecar = start()
    pid = sidecar.wait_serving()
    engine = testbed.engine_process("--keys", "30")
    engine.wait_more("loaded", 5)
    pool, epoch = (testbed.run_directory / "pool").stat().st_ino, testbed.status()["epoch"]
    os.kill(pid, signal.SIGKILL)
    sidecar.wait_serving(other_than=pid)
    assert sidecar.process.poll() is None
    assert (testbed.run_directory / "pool").stat().st_ino == pool
    wait_for(lambda: testbed.status().get("epoch", 0) > epoch, "the epoch rises")
    wait_for(
        lambda: engine.number("attached") >= 2 and engine.seen()["usable"],
        "the engine attaches again",
    )
    engine.wait_more("loaded", 5)
    assert engine.stop()["wrong"] == 0


def test_the_sidecar_exits_within_two_seconds_even_if_tierd_hangs(
    testbed: TierdTestbed, start: Start
) -> None:
    sidecar = start()
    os.kill(sidecar.wait_serving(), signal.SIGSTOP)
    assert sidecar.end() < END_SECONDS
    assert "killing tierd" in sidecar.log()


def test_a_tierd_in_a_hung_mount_is_replaced_and_does_not_delay_the_exit(
    tmp_path: Path,
) -> None:
    if unavailable():
        pytest.skip(unavailable())
    with contextlib.ExitStack() as stack:
        try:
            mount = stack.enter_context(faulty_mount(tmp_path / "fuse"))
        except OSError as error:
            pytest.skip(f"no FUSE mount can be made here: {error}")
        testbed = TierdTestbed(
            tmp_path, TierdOptions(file_bytes=64 << 20, files=mount.path / "tier")
        )
        stack.callback(testbed.close)
        sidecar = Sidecar(testbed)
        stack.callback(sidecar.close)
        stack.callback(mount.release)
        pid = sidecar.wait_serving()
        engine = testbed.engine()
        assert engine.wait("can_store", WAIT_SECONDS)
        wait_for(
            lambda: testbed.status()["tiers"][1]["state"] == "Healthy", "the file tier is open"
        )
        mount.hang("write")
        assert engine.store(1)
        wait_for(
            lambda: testbed.status()["pendingStores"] and mount.holds("write"), "a write hangs"
        )
        os.kill(pid, signal.SIGKILL)
        sidecar.wait_serving(other_than=pid)
        wait_for(lambda: held_by_the_kernel(pid), "a thread is held by the kernel")
        assert engine.wait_for(lambda: engine.seen.attached == 2, WAIT_SECONDS)
        assert engine.wait("can_store", WAIT_SECONDS)
        assert engine.store(2)
        assert sidecar.end() < END_SECONDS


def test_a_draining_tierd_drops_stores_and_serves_loads(
    testbed: TierdTestbed, start: Start
) -> None:
    sidecar = start()
    sidecar.wait_serving()
    engine = testbed.engine()
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.store(1)
    assert engine.wait_for(lambda: engine.holds(1), WAIT_SECONDS)
    command = [
        sys.executable,
        "-m",
        "kvtier.tierd.sidecar",
        "drain",
        "--run-directory",
        str(testbed.run_directory),
    ]
    subprocess.run(command, env=environment(), check=True, timeout=WAIT_SECONDS)
    wait_for(
        lambda: "Draining" in [each["type"] for each in testbed.status()["conditions"]], "it drains"
    )
    wait_for(lambda: not testbed.status()["pendingStores"], "what was pending is written")
    assert engine.load([1]) == 1
    engine.store(2)
    wait_for(
        lambda: testbed.counter("reservations_while_stopping") > 0, "a reservation is turned down"
    )
    assert sidecar.end() < END_SECONDS
    assert len(list(testbed.files.rglob("*.kv"))) == 1


def test_a_drain_request_of_a_previous_container_is_ignored(
    testbed: TierdTestbed, start: Start
) -> None:
    testbed.run_directory.mkdir(parents=True)
    (testbed.run_directory / DRAIN_NAME).touch()
    start().wait_serving()
    assert not (testbed.run_directory / DRAIN_NAME).exists()
    assert not testbed.status()["conditions"]


def _answers(port: int) -> bool:
    try:
        return bool(http_request(port, "GET", "/healthz", timeout_seconds=WAIT_SECONDS))
    except OSError:
        return False


def test_the_sidecar_waits_for_a_valid_document_and_reports_why(
    testbed: TierdTestbed, start: Start
) -> None:
    structural = testbed.topology_directory / "structural.json"
    good = structural.read_text()
    structural.write_text("{")
    with reserved_port() as port:
        sidecar = start("--port", str(port))
        wait_for(
            lambda: "waiting for a valid structural document" in sidecar.log(),
            "it says what is missing",
        )
        wait_for(lambda: _answers(port), "it answers")
        assert sidecar.process.poll() is None
        code, text = http_request(port, "GET", "/healthz", timeout_seconds=WAIT_SECONDS)
        assert (code, "structural.json" in text) == (503, True)
        status = json.loads(http_request(port, "GET", "/status", timeout_seconds=WAIT_SECONDS)[1])
        assert [each["type"] for each in status["conditions"]] == ["TopologyNotAccepted"]
        # In one step, as the kubelet: half a document would be another one that is not valid.
        replace_file(structural, good.encode(), 0o644)
        sidecar.wait_serving()
    assert sidecar.log().count("waiting for a valid structural document") == 1


def test_the_first_document_stays_in_force(testbed: TierdTestbed, start: Start) -> None:
    sidecar = start()
    pid = sidecar.wait_serving()
    changed = testbed.topology.structural.model_copy(
        update={"chunk_tokens": 512, "content_hash": "other"}
    )
    path = testbed.topology_directory / "structural.json"
    replace_file(path, document_text(changed).encode(), 0o644)
    wait_for(
        lambda: "StructuralChanged" in [each["type"] for each in testbed.status()["conditions"]],
        "it is reported",
    )
    os.kill(pid, signal.SIGKILL)
    sidecar.wait_serving(other_than=pid)
    assert testbed.status()["contentHash"] == "test"
    assert json.loads((testbed.run_directory / "structural.json").read_text())["chunkTokens"] == 256


def test_files_are_readable_for_every_user_with_any_umask(
    testbed: TierdTestbed, start: Start
) -> None:
    start(umask=0o077).wait_serving()
    for name in ("pool", "tierd.sock", "tierd.lock", "alive", "epoch"):
        assert (testbed.run_directory / name).stat().st_mode & 0o777 == 0o666, name


def test_the_memory_of_tierd_is_limited_to_its_container_without_the_pool(
    testbed: TierdTestbed, start: Start
) -> None:
    pid = start("--data-bytes", str(300 << 20)).wait_serving()
    limits = Path(f"/proc/{pid}/limits").read_text()
    line = next(line for line in limits.splitlines() if line.startswith("Max data size"))
    # 300 MiB, and a MiB of stack for 64 threads and the file tier's 4.
    assert line.split()[3] == str((300 + 64 + 4) << 20)
    assert not testbed.status()["conditions"]


def test_with_a_token_file_requests_without_the_token_are_rejected(
    testbed: TierdTestbed, start: Start, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    start("--token-file", str(token))
    wait_for(lambda: testbed.tierd_pid(), "it answers")
    port = json.loads((testbed.run_directory / "http.json").read_text())["port"]

    def ask(path: str, bearer: str = "") -> int:
        headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        return http_request(port, "GET", path, timeout_seconds=WAIT_SECONDS, headers=headers)[0]

    wait_for(lambda: ask("/healthz") == 200, "tierd is healthy")
    assert (ask("/status"), ask("/metrics"), ask("/status", "x")) == (401, 401, 401)
    token.write_text("first\n")
    wait_for(lambda: ask("/status", "first") == 200, "the token is read")
    assert ask("/status") == ask("/metrics", "other") == 401
    token.write_text("another\n")
    wait_for(lambda: ask("/metrics", "another") == 200, "the changed token is read")
    assert ask("/status", "first") == 401
