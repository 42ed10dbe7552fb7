"""tierd in a container of its own: process 1 there starts it, restarts it and ends it.

If the *container* restarted, the pages of the host pool would stay charged to the pod and not to the new container, whose limit would
guard nothing any more; so nothing that tierd does ends this process. ``docs/sidecar.md`` tells the whole life.

The structural document of a pod's life: the first good one is kept in the run directory and never replaced.

The document comes from an annotation, which anybody who may edit the pod can change; a tierd that was restarted must not build
other tiers over the same pool than the engine was told of.

Answers on tierd's address while there is no tierd: what is waited for, and why.

Without it, an unreadable document would look like a pod that cannot be reached.

Process 1 of the sidecar's container.

::

    no document ──good one──▶ starting ──▶ running ──tierd ended──▶ back-off ──▶ starting
         ▲ look again every second            │ SIGTERM, SIGINT: forwarded, two seconds in all
                                              ▼
                                             ended

It starts tierd and another one when it is gone (1 s, doubled up to 30 s, anew after a minute), kills one that does not go round any more,
reaps whatever becomes its child, and passes on what it is told. Nothing that tierd does ends it.
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
from kvtier.config.loader import STRUCTURAL_FILE, load_structural
from kvtier.config.models import HttpEndpoint, Structural
from kvtier.config.writer import document_text
from kvtier.errors import ConfigurationError
from kvtier.files import replace_file
from kvtier.processes import (
    Liveness,
    ProcessIdentity,
    liveness_of,
    main_thread_exited,
    pid_namespace,
    process_start,
)
from kvtier.tierd.http import HttpServer, Token, text_response
from kvtier.tierd.reporting import routes
from kvtier.tierd.run_directory import RunDirectory
from kvtier.tierd.status import Condition, Snapshot
from kvtier.tierd.supervisor import (
    FIRST_BACKOFF_SECONDS,
    LAST_BACKOFF_SECONDS,
    SETTLED_SECONDS,
    START_SECONDS,
    UNRESPONSIVE_SECONDS,
    daemon_environment,
)


@dataclass(frozen=True, slots=True)
class FirstDocument:
    """The document in force and the file that holds it; or ``problem``: why there is none yet."""

    structural: Structural | None
    path: Path
    problem: str = ""


def first_document(topology_directory: Path, run_directory: Path) -> FirstDocument:
    """What was kept, else what the topology directory holds, which is kept from here on. Never raises for what files hold."""
    kept = run_directory / STRUCTURAL_FILE
    unreadable = ""
    if kept.exists():
        try:
            return FirstDocument(load_structural(kept), kept)
        except ConfigurationError as error:
            unreadable = f"; what was kept is not readable either: {error}"
    try:
        structural = load_structural(topology_directory / STRUCTURAL_FILE)
    except ConfigurationError as error:
        return FirstDocument(None, kept, f"{error}{unreadable}")
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        replace_file(kept, document_text(structural).encode(), 0o644)
    except OSError as error:
        return FirstDocument(None, kept, f"the run directory cannot be written: {error}")
    return FirstDocument(structural, kept)


_log = logging.getLogger("kvtier.sidecar")


class PlaceholderServer:
    """``begin`` and ``end`` by the supervisor's thread; neither raises."""

    def __init__(self, token_file: Path | None, port: int) -> None:
        self._endpoint = HttpEndpoint(host="0.0.0.0", port=port)  # noqa: S104  (who asks is in other pods)
        self._token = None if token_file is None else Token(token_file)
        self._server: HttpServer | None = None
        self._snapshot = Snapshot()
        self._problem = ""

    def begin(self, structural: Structural | None, kind: str, problem: str) -> None:
        """Answers from here on, with ``problem`` as a condition of type ``kind``."""
        policy = (
            "" if structural is None else f"{structural.policy.namespace}/{structural.policy.name}"
        )
        content_hash = "" if structural is None else structural.content_hash
        self._problem = problem
        self._snapshot = Snapshot(
            version=__version__,
            policy=policy,
            content_hash=content_hash,
            conditions=(Condition(kind, problem),),
        )
        if self._server is not None:
            return
        endpoint = self._endpoint if structural is None else structural.http
        found = routes(
            lambda: self._snapshot,
            lambda: text_response(503, f"tierd does not run: {self._problem}"),
        )
        try:
            self._server = HttpServer(endpoint.host, endpoint.port, found, self._token)
        except OSError as error:
            _log.debug("http on %s port %d: %s", endpoint.host, endpoint.port, error)

    def end(self) -> None:
        """Gives the address back."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


DRAIN_NAME = "drain"
"""In the run directory: the preStop hook was called."""
LOOK_SECONDS = 1.0
POLL_SECONDS = 0.25
END_SECONDS = 1.5
"""From SIGTERM to SIGKILL of tierd: when the kubelet sends SIGTERM the engine has ended, and two seconds are left."""
DRAIN_SECONDS = 0.5
"""How long tierd itself writes after SIGTERM, unless preStop made it drain before."""
_ASLEEP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """See the command line. ``command``: instead of tierd, for tests."""

    topology_directory: Path
    run_directory: Path
    token_file: Path | None = None
    data_bytes: int = 0
    port: int = HttpEndpoint().port
    """Where to answer while there is no document that says it."""
    log_level: str = "info"
    command: Sequence[str] = ()


def request_drain(run_directory: Path) -> None:
    """Asks the supervisor to drain; returns at once. Raises ``OSError``."""
    replace_file(run_directory / DRAIN_NAME, b"", 0o666)


class SidecarSupervisor:
    """One supervisor. Everything but ``stop`` belongs to the main thread of the process."""

    def __init__(
        self, options: SidecarOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        self._run_directory = RunDirectory(options.run_directory, shared=True)
        self._stand_in = PlaceholderServer(options.token_file, options.port)
        self._child: subprocess.Popen[bytes] | None = None
        self._identity: ProcessIdentity | None = None
        self._first: FirstDocument | None = None
        self._problem = ""
        self._stop_requests = 0
        self._drain_told = False
        self._ignore_drain = False
        self._start_at = 0.0
        self._started_at = 0.0
        self._backoff = FIRST_BACKOFF_SECONDS
        self._beat = 0
        self._beat_at = 0.0
        self._had_beat = False
        self._last_turn = 0.0
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def child(self) -> int:
        """Process id of tierd; 0: none."""
        return 0 if self._child is None else self._child.pid

    def stop(self) -> None:
        """Asks for the end. Any thread, and signal handlers."""
        self._stop_requests += 1

    def run(self) -> int:
        """Until it is told to end. Returns 0."""
        previous = self._take_signals()
        try:
            self._forget_drain()
            self._last_turn = self._clock()
            while not self._stop_requests:
                self._turn()
                self._wait(POLL_SECONDS)
            self._end()
            return 0
        finally:
            self._give_signals_back(previous)
            self._stand_in.end()

    # Signals.

    def _take_signals(self) -> dict[int, object]:
        previous: dict[int, object] = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, lambda *_: self.stop())
        # Without a handler the signal would not end a wait; who has ended is found by looking.
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        previous[-1] = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return previous

    def _give_signals_back(self, previous: dict[int, object]) -> None:
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

    # The turn.

    def _turn(self) -> None:
        now = self._clock()
        self._reap(now)
        self._leave_to_kernel(now)
        if self._child is not None:
            self._watch(now)
            self._pass_on_drain()
        elif now >= self._start_at:
            self._start(now)
        self._last_turn = now

    def _reap(self, now: float) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._child is not None and pid == self._child.pid:
                self._ended(os.waitstatus_to_exitcode(status), now)

    def _leave_to_kernel(self, now: float) -> None:
        """A tierd that was killed while a thread of it hangs in a mount cannot be reaped before the mount answers. Nothing of it runs any
        more, so it is not waited for; it is reaped as a stranger, should that ever be."""
        child, identity = self._child, self._identity
        if (
            child is None
            or identity is None
            or not main_thread_exited(identity)
            or liveness_of(identity) is Liveness.GONE
        ):
            return
        _log.error(
            "a thread of tierd (process %d) hangs in the kernel and is left to it", child.pid
        )
        self._ended(-signal.SIGKILL, now)

    def _ended(self, code: int, now: float) -> None:
        if self._child is not None:
            self._child.returncode = code
        self._child = None
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        if now - self._started_at > SETTLED_SECONDS:
            self._backoff = FIRST_BACKOFF_SECONDS
        self._start_at = now + self._backoff
        _log.error("tierd has ended %s; another one is started in %g s", how, self._backoff)
        self._backoff = min(LAST_BACKOFF_SECONDS, self._backoff * 2)
        self._stand_in.begin(
            self._structural, "TierdNotRunning", f"tierd has ended {how} and is started again"
        )

    @property
    def _structural(self) -> Structural | None:
        return None if self._first is None else self._first.structural

    def _start(self, now: float) -> None:
        first = self._first
        if first is None or first.structural is None:
            first = self._first = first_document(
                self._options.topology_directory, self._options.run_directory
            )
        if first.structural is None:
            if first.problem != self._problem:
                self._problem = first.problem
                _log.error(
                    "no structural document yet, looked for again every second: %s", first.problem
                )
            self._stand_in.begin(None, "TopologyNotAccepted", first.problem)
            self._start_at = now + LOOK_SECONDS
            return
        self._stand_in.end()
        self._started_at = now
        self._beat, self._beat_at, self._had_beat = self._run_directory.last_beat(), now, False
        self._drain_told = False
        try:
            self._child = subprocess.Popen(
                self._command(first.path), stdin=subprocess.DEVNULL, env=environment()
            )
        except OSError as error:
            self._start_at = now + self._backoff
            self._backoff = min(LAST_BACKOFF_SECONDS, self._backoff * 2)
            _log.error("tierd cannot be started: %s", error)
            self._stand_in.begin(
                first.structural, "TierdNotRunning", f"tierd cannot be started: {error}"
            )
            return
        self._identity = ProcessIdentity(
            self._child.pid, process_start(self._child.pid), pid_namespace()
        )
        _log.info("started tierd (process %d) in %s", self._child.pid, self._options.run_directory)

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

    def _watch(self, now: float) -> None:
        """A tierd that does not go round any more serves nobody and is killed."""
        child = self._child
        if child is None:
            return
        if now - self._last_turn > _ASLEEP_SECONDS:
            # This process did not run; whether tierd did cannot be said.
            self._beat_at = now
        beat = self._run_directory.last_beat()
        if beat != self._beat:
            self._had_beat = True
            self._beat, self._beat_at = beat, now
        elif now - self._beat_at > (UNRESPONSIVE_SECONDS if self._had_beat else START_SECONDS):
            _log.error(
                "tierd (process %d) has not gone round for %.0f s and is killed",
                child.pid,
                now - self._beat_at,
            )
            self._signal(signal.SIGKILL)
            self._beat_at = now

    def _signal(self, number: signal.Signals) -> None:
        # Only this process reaps, so the id still is tierd's.
        if self._child is not None:
            os.kill(self._child.pid, number)

    # Ending.

    def _forget_drain(self) -> None:
        """A request that a former life of this container left behind."""
        try:
            (self._options.run_directory / DRAIN_NAME).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("an old request to drain cannot be removed: %s", error)
            self._ignore_drain = True

    def _pass_on_drain(self) -> None:
        # Before its first beat tierd may not know the signal yet.
        if self._drain_told or self._ignore_drain or not self._had_beat:
            return
        if (self._options.run_directory / DRAIN_NAME).exists():
            self._drain_told = True
            _log.info("the pod ends: tierd takes no more stores and writes what is pending")
            self._signal(signal.SIGUSR1)

    def _end(self) -> None:
        """tierd is told, and after ``END_SECONDS``, or when told twice, killed."""
        deadline = self._clock() + END_SECONDS
        self._reap(self._clock())
        self._stand_in.end()
        self._signal(signal.SIGTERM)
        killed = False
        while self._child is not None:
            now = self._clock()
            if not killed and (now >= deadline or self._stop_requests > 1):
                killed = True
                _log.warning(
                    "tierd (process %d) has not ended in %g s and is killed",
                    self.child,
                    END_SECONDS,
                )
                self._signal(signal.SIGKILL)
                deadline = now + POLL_SECONDS
            elif killed and now >= deadline:
                # A call into a dead mount does not end: the kernel keeps the container until it does.
                _log.error("tierd (process %d) does not die", self.child)
                return
            self._wait(min(POLL_SECONDS, max(0.0, deadline - now)))
            self._reap_last()

    def _reap_last(self) -> None:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            self._child = None
            return
        if self._child is not None and pid == self._child.pid:
            self._child.returncode = 0
            self._child = None


def environment() -> dict[str, str]:
    """tierd's environment. Arenas are per thread otherwise, and each keeps what it once needed."""
    return {**daemon_environment(), "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "4")}
