"""The testbed of tierd: a topology, real tierd processes and stub engines, for tests that kill and
stop them.

Everything is below one directory and one run directory in ``/dev/shm``; ``close`` ends every
process and removes the run directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import kvtier
from kvtier.config.models import (
    Daemon,
    FileSystemTierDocument,
    HttpEndpoint,
    Live,
    LiveTier,
    LMCacheTierDocument,
    MemoryTierDocument,
    PolicyIdentity,
    Selection,
    Structural,
    TierDocument,
    TierVolumeDocument,
    Topology,
)
from kvtier.config.writer import write, write_live
from kvtier.harness.stub_engine import StubEngine
from kvtier.harness.stub_worker import StubEngineOptions
from kvtier.processes import has_exited, process_start

WAIT_SECONDS = 60.0
"""The limit of short waits. It is generous, because tests share the machine."""
_WITHOUT_FENCE = """
import sys
from pathlib import Path
from kvtier.tierd.__main__ import run
from kvtier.tierd.daemon import DaemonOptions
sys.exit(run(DaemonOptions(Path(sys.argv[1]), fencing=False)))
"""


def environment() -> dict[str, str]:
    """This process's environment, with the package it runs from in the path."""
    package = str(Path(kvtier.__file__).resolve().parent.parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]),
    }


def wait_for(
    condition: Callable[[], object], what: str, timeout_seconds: float = WAIT_SECONDS
) -> None:
    """Waits until ``condition()`` is true. Raises ``TimeoutError`` that names ``what``."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out after {timeout_seconds:g} s: {what}")
        time.sleep(0.02)


class StubEngineProcess:
    """A stub engine in a child process, and its last output."""

    def __init__(
        self, topology: Path, log: Path, *arguments: str, prefix: Sequence[str] = ()
    ) -> None:
        self._output = log.with_suffix(".jsonl")
        with log.open("ab") as errors, self._output.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    *prefix,
                    sys.executable,
                    "-m",
                    "kvtier.harness.stub_engine",
                    "--topology",
                    str(topology),
                    *arguments,
                ],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def seen(self) -> dict[str, Any]:
        """The last whole line it wrote; empty before the first."""
        lines = self._output.read_bytes().split(b"\n")[:-1]
        return dict(json.loads(lines[-1])) if lines else {}

    def number(self, name: str) -> int:
        """One number of the last line."""
        return int(self.seen().get(name, 0))

    def wait_more(self, name: str, by: int = 1) -> None:
        """Waits until a number has grown."""
        before = self.number(name)
        wait_for(
            lambda: self.number(name) >= before + by,
            f"{name} of the stub engine grows from {before} by {by}: {self.seen()}",
        )

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    def stop(self) -> dict[str, Any]:
        """Terminates it. Returns its last counters."""
        self.process.terminate()
        self.process.wait(WAIT_SECONDS)
        return self.seen()

    def kill(self) -> None:
        """Kills it and waits."""
        self.process.kill()
        self.process.wait(WAIT_SECONDS)


@dataclass(frozen=True, slots=True)
class TierdOptions:
    """The settings of a topology that tests vary.

    ``daemon``: with ``SIDECAR`` the test starts tierd, with ``ENGINE`` the stub engine does.
    ``file_bytes``: capacity of the file tier; None for no file tier. ``files``: directory of the
    file tier, by default below the testbed's. ``run_directory``: by default in ``/dev/shm``.
    ``lmcache_url``: an lmcache tier takes the place of the file tier. ``volumes``: directories of
    the file tier, if it has several; the capacity is divided equally.
    """

    daemon: Daemon = Daemon.SIDECAR
    memory_bytes: int = 4 << 20
    file_bytes: int | None = None
    run_directory: Path | None = None
    persistence: Literal["Process", "Pod"] = "Pod"
    files: Path | None = None
    lmcache_url: str = ""
    volumes: tuple[Path, ...] = ()


class TierdTestbed:
    """One directory with a topology, the tierd processes that serve it, and their stub engines."""

    def __init__(self, directory: Path, options: TierdOptions | None = None) -> None:
        options = options or TierdOptions()
        self.directory = directory
        self.topology_directory = directory / "topology"
        self.files = options.files or directory / "tier"
        self.run_directory = (
            options.run_directory or Path("/dev/shm") / f"kvtier-test-{uuid.uuid4().hex[:12]}"
        )
        self.log = directory / "tierd.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._engines: list[StubEngineProcess] = []
        self._stub_engines: list[StubEngine] = []
        tiers: list[TierDocument] = [
            MemoryTierDocument(
                name="ram", capacity_bytes=options.memory_bytes, persistence=options.persistence
            )
        ]
        live = {"ram": LiveTier()}
        if options.file_bytes is not None:
            self.files.mkdir(parents=True, exist_ok=True)
            tiers.append(
                LMCacheTierDocument(name="disk", url=options.lmcache_url)
                if options.lmcache_url
                else FileSystemTierDocument(
                    name="disk",
                    path="" if options.volumes else str(self.files),
                    volumes=tuple(
                        TierVolumeDocument(name=path.name, path=str(path))
                        for path in options.volumes
                    ),
                    sharing="Node",
                    read_threads=2,
                    write_threads=2,
                )
            )
            each = options.file_bytes // max(len(options.volumes), 1)
            live["disk"] = LiveTier(
                capacity_bytes=options.file_bytes,
                volume_capacity_bytes={path.name: each for path in options.volumes},
            )
        self.live = Live(generation=1, selection=Selection.WEIGHTED, min_load_tokens=0, tiers=live)
        self.topology = Topology(
            structural=Structural(
                policy=PolicyIdentity(namespace="test", name=directory.name),
                content_hash="test",
                daemon=options.daemon,
                run_directory=str(self.run_directory),
                tiers=tiers,
                http=HttpEndpoint(port=0),
                live=self.live,
            ),
            live=self.live,
        )
        write(self.topology_directory, self.topology)

    def change(self, **changes: Any) -> None:
        """Replaces structural.json, for the next tierd."""
        structural = self.topology.structural.model_copy(update=changes)
        self.topology = Topology(structural=structural, live=self.live)
        write(self.topology_directory, self.topology)

    def retune(self, live: Live) -> None:
        """Replaces live.json."""
        write_live(self.topology_directory, live)

    def start_tierd(
        self, fencing: bool = True, tiers: bool = True, seconds: float = WAIT_SECONDS
    ) -> int:
        """Starts tierd and waits until it serves and, with ``tiers``, until those are scanned.
        Returns its process id.
        """
        command = [sys.executable, "-m", "kvtier.tierd", "--topology", str(self.topology_directory)]
        if not fencing:
            command = [sys.executable, "-c", _WITHOUT_FENCE, str(self.topology_directory)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        wait_for(
            lambda: self.tierd_pid() == process.pid and self._open(tiers),
            "tierd serves, and its tiers are scanned",
            seconds,
        )
        return process.pid

    def _open(self, tiers: bool) -> bool:
        status = self.status()
        known = not tiers or all(tier["state"] != "Unknown" for tier in status.get("tiers", ()))
        return bool(status.get("started")) and known

    def kill_tierd(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the serving tierd and waits until it has exited."""
        pid = self.tierd_pid()
        os.kill(pid, number)
        for process in self._processes:
            if process.pid == pid:
                process.wait(WAIT_SECONDS)
        wait_for(lambda: _has_exited(pid), "tierd exits")

    def tierd_pid(self) -> int:
        """Process id of the tierd that serves or served last; 0: none yet."""
        return int(self._address().get("pid", 0))

    def _address(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.run_directory / "http.json").read_text()))
        except (OSError, ValueError):
            return {}

    def status(self) -> dict[str, Any]:
        """The document of /status; empty if tierd does not respond."""
        from kvtier.harness.engine_process import http_request

        address = self._address()
        if not address:
            return {}
        try:
            code, text = http_request(
                int(address["port"]), "GET", "/status", timeout_seconds=5, host=str(address["host"])
            )
        except OSError:
            return {}
        return dict(json.loads(text)) if code == 200 else {}

    def pool(self, use: str) -> int:
        """Bytes of the pool by use; -1 if tierd does not respond."""
        return int(self.status().get("pool", {}).get(use, -1))

    def counter(self, name: str, reason: str | None = None) -> int:
        """Sum of tierd's counters of this name."""
        counters = self.status().get("counters", [])
        return sum(
            c["value"] for c in counters if c["name"] == name and reason in (None, c["reason"])
        )

    def engine_process(self, *arguments: str, prefix: Sequence[str] = ()) -> StubEngineProcess:
        """Starts a stub engine in a child process. ``prefix``: a command that runs it, such as
        ``unshare``.
        """
        log = self.directory / f"engine-{len(self._engines)}.log"
        engine = StubEngineProcess(self.topology_directory, log, *arguments, prefix=prefix)
        self._engines.append(engine)
        return engine

    def engine(self, **options: Any) -> StubEngine:
        """A stub engine in this process, which attaches in the background."""
        engine = StubEngine(StubEngineOptions(run_directory=self.run_directory, **options))
        self._stub_engines.append(engine)
        engine.start()
        return engine

    def close(self) -> None:
        """Ends every process and removes the run directory."""
        for stub in self._stub_engines:
            stub.close(2.0)
        for engine in self._engines:
            if engine.process.poll() is None:
                engine.signal(signal.SIGCONT)
                engine.kill()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait(WAIT_SECONDS)
        pid = self.tierd_pid()
        if pid not in (0, os.getpid()) and not _has_exited(pid):
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: _has_exited(pid), "tierd exits")
        shutil.rmtree(self.run_directory, ignore_errors=True)


def _has_exited(pid: int) -> bool:
    start = process_start(pid)
    return not start or has_exited(pid, start)
