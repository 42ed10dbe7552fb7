"""Sidecar mode: process 1 of the sidecar's container starts and supervises tierd.

::

    no document ──document──▶ watchdog: start, watch, back off, restart
         │ retried every second        │ SIGTERM, SIGINT: forwarded; ended within two seconds
         ▼                             ▼
       (HTTP 503)                    ended

If the *container* restarted, the pages of the host pool would stay charged to the pod but not to
the new container, whose memory limit would then not cover them. Nothing that tierd does may
therefore end this process. See docs/sidecar.md.

Everything runs on the main thread, except ``SidecarSupervisor.stop``, which may be called from any
thread and from signal handlers.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier import __version__
from kvtier.config.host_ports import HOST_POD_VARIABLE
from kvtier.config.loader import STRUCTURAL_FILE, load_structural
from kvtier.config.models import HttpEndpoint, Structural
from kvtier.config.writer import document_text
from kvtier.errors import ConfigurationError
from kvtier.files import replace_file
from kvtier.listening import EVERY_ADDRESS
from kvtier.processes import (
    Liveness,
    ProcessIdentity,
    liveness_of,
    main_thread_exited,
    pid_namespace,
    process_start,
)
from kvtier.tierd.http import BearerToken, HttpServer, bind, text_response
from kvtier.tierd.reporting import routes
from kvtier.tierd.run_directory import RunDirectory
from kvtier.tierd.status import Snapshot, StatusCondition
from kvtier.tierd.watchdog import Watchdog, WatchdogTiming, tierd_environment

DRAIN_NAME = "drain"
"""File in the run directory: the preStop hook was called."""
TIMING = WatchdogTiming(poll=0.25, retry=1.0)
END_SECONDS = 1.5
"""From SIGTERM to SIGKILL of tierd: when the kubelet sends SIGTERM the engine has ended, and two
seconds are left."""
DRAIN_SECONDS = 0.5
"""How long tierd writes after SIGTERM, unless preStop made it drain before."""
_log = logging.getLogger("kvtier.sidecar")


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """The options of ``kvtier-sidecar run``. ``command``: runs instead of tierd, in tests."""

    topology_directory: Path
    run_directory: Path
    token_file: Path | None = None
    data_bytes: int = 0
    port: int = HttpEndpoint().port
    """HTTP port until a structural document sets one."""
    log_level: str = "info"
    command: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class FirstDocument:
    """The document in force and the file that holds it; or ``problem``: why there is none yet."""

    structural: Structural | None
    path: Path
    problem: str = ""


def first_document(topology_directory: Path, run_directory: Path) -> FirstDocument:
    """The structural document for the life of the pod.

    The first valid one is copied to the run directory and never replaced. It comes from an
    annotation that users may edit, and a restarted tierd must not build other tiers over the pool
    than those that the engine knows. Never raises for the content of files.
    """
    copy = run_directory / STRUCTURAL_FILE
    unreadable = ""
    if copy.exists():
        try:
            return FirstDocument(load_structural(copy), copy)
        except ConfigurationError as error:
            unreadable = f"; the copy in the run directory is unreadable as well: {error}"
    try:
        structural = load_structural(topology_directory / STRUCTURAL_FILE)
    except ConfigurationError as error:
        return FirstDocument(None, copy, f"{error}{unreadable}")
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        replace_file(copy, document_text(structural).encode(), 0o644)
    except OSError as error:
        return FirstDocument(None, copy, f"cannot write to the run directory: {error}")
    return FirstDocument(structural, copy)


def request_drain(run_directory: Path) -> None:
    """Asks the supervisor to drain tierd; returns at once. Raises ``OSError``."""
    replace_file(run_directory / DRAIN_NAME, b"", 0o666)


class PlaceholderServer:
    """Answers on tierd's address while tierd does not run. Otherwise an invalid document would look
    like an unreachable pod. ``start`` and ``stop`` never raise."""

    def __init__(self, token_file: Path | None, port: int) -> None:
        # Without a document the port is the default's, or one of the pod's if it shares the node's
        # network.
        if os.environ.get(HOST_POD_VARIABLE):
            port = 0
        self._endpoint = HttpEndpoint(host=EVERY_ADDRESS, port=port)
        self._token = None if token_file is None else BearerToken(token_file)
        self._server: HttpServer | None = None
        self._snapshot = Snapshot()
        self._problem = ""

    def start(self, structural: Structural | None, condition: str, problem: str) -> None:
        """Serves ``problem`` as a condition of type ``condition``, or replaces the condition that
        is served."""
        self._problem = problem
        self._snapshot = Snapshot(
            version=__version__,
            pod_uid=os.environ.get(HOST_POD_VARIABLE, ""),
            policy=""
            if structural is None
            else f"{structural.policy.namespace}/{structural.policy.name}",
            content_hash="" if structural is None else structural.content_hash,
            conditions=(StatusCondition(condition, problem),),
        )
        if self._server is not None:
            return
        endpoint = self._endpoint if structural is None else structural.http
        found = routes(
            lambda: self._snapshot,
            lambda: text_response(503, f"tierd is not running: {self._problem}"),
        )
        try:
            self._server = bind(endpoint, found, self._token)
        except OSError as error:
            _log.debug("cannot listen on %s port %d: %s", endpoint.host, endpoint.port, error)

    def stop(self) -> None:
        """Releases the address."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


class ChildReaper:
    """Reaps every child of process 1; descendants of tierd become its children when their parents
    exit."""

    def __init__(self) -> None:
        self._exit_codes: dict[int, int | None] = {}

    def watch(self, pid: int) -> None:
        """Records the exit code of this child, until ``forget``."""
        self._exit_codes[pid] = None

    def forget(self, pid: int) -> None:
        """The exit code is not needed further."""
        self._exit_codes.pop(pid, None)

    def exit_code(self, pid: int) -> int | None:
        """Of a watched child that was reaped; negative: the signal that killed it."""
        return self._exit_codes.get(pid)

    def reap(self) -> None:
        """Reaps all children that have exited."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._exit_codes:
                self._exit_codes[pid] = os.waitstatus_to_exitcode(status)


class ContainerProcess:
    """A tierd that is a child of this process. Raises ``OSError`` if it cannot be started."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], reaper: ChildReaper
    ) -> None:
        self._reaper = reaper
        self._popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        self.pid = self._popen.pid
        self._identity = ProcessIdentity(self.pid, process_start(self.pid), pid_namespace())
        self._exit_code: int | None = None
        reaper.watch(self.pid)

    @property
    def exit_description(self) -> str:
        """How it ended, as part of a sentence."""
        code = self._exit_code or 0
        return f"on signal {-code}" if code < 0 else f"with status {code}"

    def poll(self) -> bool:
        """Whether the program has ended."""
        if not self.reaped() and self._hangs_after_kill():
            # It cannot be reaped before the mount answers. The reaper collects it whenever that
            # happens.
            _log.error("not waiting for tierd (process %d): a thread hangs in the kernel", self.pid)
            self._end(-signal.SIGKILL)
        return self._exit_code is not None

    def reaped(self) -> bool:
        """Whether the process has ended and was reaped, which a thread that hangs in the kernel
        prevents."""
        if self._exit_code is None:
            code = self._reaper.exit_code(self.pid)
            if code is not None:
                self._end(code)
        return self._exit_code is not None

    def send_signal(self, number: signal.Signals) -> None:
        """Only this process reaps, so the id belongs to tierd until then."""
        if not self.reaped():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, unless it was reaped."""
        self.send_signal(signal.SIGKILL)

    def _hangs_after_kill(self) -> bool:
        return (
            main_thread_exited(self._identity) and liveness_of(self._identity) is not Liveness.GONE
        )

    def _end(self, code: int) -> None:
        self._exit_code = self._popen.returncode = code
        self._reaper.forget(self.pid)


class SidecarLauncher:
    """Starts tierd as a child of this process, once there is a structural document."""

    def __init__(
        self, options: SidecarOptions, placeholder: PlaceholderServer, reaper: ChildReaper
    ) -> None:
        self._options = options
        self._placeholder = placeholder
        self._reaper = reaper
        self._first: FirstDocument | None = None
        self._logged_problem = ""

    def prepare(self) -> None:
        """Does nothing: the sidecar has nothing to prepare."""

    def launch(self) -> ContainerProcess | None:
        """Starts tierd; None while there is no valid structural document."""
        first = self._first
        if first is None or first.structural is None:
            first = self._first = first_document(
                self._options.topology_directory, self._options.run_directory
            )
        if first.structural is None:
            if first.problem != self._logged_problem:
                self._logged_problem = first.problem
                _log.error("waiting for a valid structural document: %s", first.problem)
            self._placeholder.start(None, "TopologyNotAccepted", first.problem)
            return None
        # tierd listens on the same address.
        self._placeholder.stop()
        return ContainerProcess(self._command(first.path), _environment(), self._reaper)

    def on_heartbeat(self) -> None:
        """Does nothing: nothing in the sidecar waits for the first heartbeat."""

    def on_exit(self, process: ContainerProcess, delay_seconds: float) -> None:
        """Serves the problem as a condition until tierd runs again."""
        how = process.exit_description
        _log.error("tierd exited %s; restarting it in %g s", how, delay_seconds)
        self._start_placeholder(f"tierd exited {how} and is being restarted")

    def on_failure(self, error: Exception) -> None:
        """Serves the problem as a condition until tierd runs again."""
        _log.error("cannot start tierd: %s", error)
        self._start_placeholder(f"tierd cannot be started: {error}")

    def _start_placeholder(self, problem: str) -> None:
        structural = None if self._first is None else self._first.structural
        self._placeholder.start(structural, "TierdNotRunning", problem)

    def _command(self, structural: Path) -> list[str]:
        options = self._options
        if options.command:
            return list(options.command)
        found = [
            sys.executable, "-m", "kvtier.tierd",
            "--topology", str(options.topology_directory),
            "--structural", str(structural),
            "--run-directory", str(options.run_directory),
            "--drain-seconds", str(DRAIN_SECONDS),
            "--log-level", options.log_level,
        ]  # fmt: skip
        if options.token_file is not None:
            found += ["--token-file", str(options.token_file)]
        if options.data_bytes:
            found += ["--data-bytes", str(options.data_bytes)]
        return found


def _environment() -> dict[str, str]:
    """tierd's environment. By default malloc keeps an arena per thread, each as large as it once
    was."""
    return {**tierd_environment(), "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "4")}


class SidecarSupervisor:
    """Process 1. Belongs to the main thread, except ``stop``."""

    def __init__(
        self, options: SidecarOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._drain_file = options.run_directory / DRAIN_NAME
        self._placeholder = PlaceholderServer(options.token_file, options.port)
        self._reaper = ChildReaper()
        self._watchdog = Watchdog(
            SidecarLauncher(options, self._placeholder, self._reaper),
            RunDirectory(options.run_directory, shared=True),
            clock,
            TIMING,
        )
        self._stop_requests = 0
        self._drained: ContainerProcess | None = None
        """The tierd that the drain request was forwarded to."""
        self._ignore_drain = False
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def stop(self) -> None:
        """Requests the end; a second request kills tierd. For any thread and signal handlers."""
        self._stop_requests += 1

    def run(self) -> int:
        """Runs until ``stop`` or a signal. Returns 0."""
        previous = self._install_signal_handlers()
        try:
            self._remove_old_drain_request()
            while not self._stop_requests:
                self._reaper.reap()
                self._watchdog.step()
                self._forward_drain()
                self._wait(TIMING.poll)
            self._end()
            return 0
        finally:
            self._restore_signal_handlers(previous)
            self._placeholder.stop()

    # Signals.

    def _install_signal_handlers(self) -> dict[int, object]:
        previous: dict[int, object] = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, lambda *_: self.stop())
        # Without a handler the signal would not wake the loop, which reaps.
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        previous[-1] = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return previous

    def _restore_signal_handlers(self, previous: dict[int, object]) -> None:
        signal.set_wakeup_fd(int(str(previous.pop(-1))))
        for number, handler in previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _wait(self, seconds: float) -> None:
        readable, _, _ = select.select([self._reader], [], [], seconds)
        if readable:
            try:
                os.read(self._reader, 4096)
            except BlockingIOError:
                return

    # Draining and ending.

    def _remove_old_drain_request(self) -> None:
        """Removes a drain request that an earlier run of this container left."""
        try:
            self._drain_file.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("ignoring drain requests: cannot remove an old request: %s", error)
            self._ignore_drain = True

    def _forward_drain(self) -> None:
        process = self._watchdog.process
        # Before its first heartbeat tierd may not handle the signal.
        if process is None or not self._watchdog.has_heartbeat:
            return
        if process is self._drained or self._ignore_drain or not self._drain_file.exists():
            return
        self._drained = process
        _log.info("draining: tierd rejects new stores and writes pending stores")
        process.send_signal(signal.SIGUSR1)

    def _end(self) -> None:
        """Sends SIGTERM to tierd, and SIGKILL after ``END_SECONDS`` or a second request."""
        deadline = self._clock() + END_SECONDS
        self._placeholder.stop()
        self._reaper.reap()
        process = self._watchdog.process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        killed = False
        while not process.reaped():
            now = self._clock()
            if not killed and (now >= deadline or self._stop_requests > 1):
                killed = True
                _log.warning(
                    "killing tierd (process %d): it did not exit within %g s",
                    process.pid,
                    END_SECONDS,
                )
                process.kill()
                deadline = now + TIMING.poll
            elif killed and now >= deadline:
                # A thread hangs in a dead mount: the kernel keeps the container until the call
                # returns.
                _log.error("tierd (process %d) has not exited after SIGKILL", process.pid)
                return
            self._wait(min(TIMING.poll, max(0.0, deadline - now)))
            self._reaper.reap()
