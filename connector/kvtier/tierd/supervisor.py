"""A process that is nobody's child.

vLLM ends an engine by killing it with all its descendants, so a daemon that is one of them dies with its first engine: whatever it
had to write is lost, its run directory stays, and other engines lose their RAM tier. A shell starts the program and
ends at once, so that the kernel gives the program to the machine's or container's first process.

Starts tierd where an engine has to (daemon mode ``Engine``), and starts another when it is gone.

Every EngineCore runs one of these. Whoever finds the daemon's lock free, and gets the spawn lock, starts tierd in a session of its own
and as nobody's child, so that neither a Ctrl-C at the engine nor its end hits it: it ends by itself when nobody is attached. A tierd that does not go round any
more is killed by the process that started it, and by nobody else, because a process id alone proves nothing.

In mode ``Sidecar`` nothing here does anything: the sidecar's own supervisor starts tierd.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import kvtier
from kvtier.config.models import Daemon, Topology
from kvtier.errors import ConfigurationError
from kvtier.processes import (
    ProcessIdentity,
    main_thread_exited,
    own_identity,
    pid_namespace,
    process_start,
)
from kvtier.tierd.run_directory import SESSIONS_NAME, FileLock, RunDirectory

SPAWN_SECONDS = 5.0
"""A shell takes milliseconds to say which process it started."""
_POLL_SECONDS = 0.02
_TO_STANDARD_ERROR = '"$@" >&2 & echo $!'
_TO_NOWHERE = '"$@" >/dev/null & echo $!'


class DetachedProcess:
    """A program in a session of its own. Raises ``OSError`` where it cannot be started.

    ``to_standard_error``: what it prints goes to this process's standard error, otherwise nowhere.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], to_standard_error: bool = True
    ) -> None:
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(None, "no such program", command[0])
        shell = subprocess.Popen(
            [
                "/bin/sh",
                "-c",
                _TO_STANDARD_ERROR if to_standard_error else _TO_NOWHERE,
                "sh",
                *command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd="/",
            env=dict(environment),
            start_new_session=True,
        )
        try:
            answer, _ = shell.communicate(timeout=SPAWN_SECONDS)
            self.pid = int(answer)
        except (subprocess.TimeoutExpired, ValueError) as error:
            shell.kill()
            shell.wait()
            raise OSError(None, f"the shell did not start it: {error}", command[0]) from error
        self._identity = ProcessIdentity(self.pid, process_start(self.pid), pid_namespace())
        self.ended = False
        """Whether ``poll`` has seen its end."""

    def poll(self) -> bool:
        """Whether it has ended. A thread that hangs in the kernel is not waited for: nothing of the program runs any more."""
        if not self.ended:
            self.ended = main_thread_exited(self._identity)
            if self.ended:
                self._reap()
        return self.ended

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if not self.poll():
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def wait(self, timeout_seconds: float) -> bool:
        """Waits for its end; whether it came within the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while not self.poll() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self.ended

    def _reap(self) -> None:
        """Where this process is the first one of its container, the program has become its child after all."""
        try:
            os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return


POLL_SECONDS = 0.5
UNRESPONSIVE_SECONDS = 10.0
START_SECONDS = 60.0
"""Until the first beat: Python and its imports on a machine that is loading a model."""
FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 30.0
SETTLED_SECONDS = 60.0
"""A tierd that lived this long did not fail at its start; the back-off begins anew."""
ASLEEP_SECONDS = 2.0
_LINGERING_SECONDS = 1.0
_log = logging.getLogger("kvtier.tierd")


def daemon_command(topology_directory: Path, run_directory: Path) -> list[str]:
    """What starts a tierd for this process."""
    me = own_identity()
    return [
        sys.executable, "-m", "kvtier.tierd",
        "--topology", str(topology_directory),
        "--run-directory", str(run_directory),
        "--spawned-by-engine",
        "--spawner", f"{me.pid}:{me.start}",
    ]  # fmt: skip


def daemon_environment() -> dict[str, str]:
    """The environment of a tierd: this process's, with the package it runs from first in the path."""
    package = str(Path(kvtier.__file__).resolve().parent.parent)
    path = [package] + [
        part
        for part in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if part and part != package
    ]
    # Safe path: a file of the working directory must not stand in for a module.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


class Supervisor:
    """Sees to it that a tierd lives. ``ensure`` and ``stop`` may be called from any thread, each once.

    Raises ``ConfigurationError`` for a run directory whose name is too long.
    """

    def __init__(
        self,
        topology_directory: Path | str,
        topology: Topology,
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        unresponsive_seconds: float = UNRESPONSIVE_SECONDS,
    ) -> None:
        structural = topology.structural
        self._enabled = structural.daemon is Daemon.ENGINE
        self._run_directory = RunDirectory(structural.run_directory, shared=not self._enabled)
        self._command = list(
            command or daemon_command(Path(topology_directory).absolute(), self._run_directory.path)
        )
        self._clock = clock
        self._unresponsive_seconds = unresponsive_seconds
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._child: DetachedProcess | None = None
        self._spawn_lock: FileLock | None = None
        self._spawned_at = 0.0
        self._spawn_at = 0.0
        self._backoff = FIRST_BACKOFF_SECONDS
        self._beat = 0
        self._beat_at = 0.0
        self._had_beat = False
        self._last_look = 0.0
        self._failing = False
        self.counters: dict[str, int] = {
            "spawned": 0,
            "spawn_failed": 0,
            "killed_unresponsive": 0,
            "exited": 0,
        }

    @property
    def child(self) -> int:
        """Process id of the tierd that this supervisor started and that lives; 0: none."""
        child = self._child
        return 0 if child is None or child.ended else child.pid

    def ensure(self) -> None:
        """Joins the run directory and starts a tierd if there is none; does not wait until it serves. Never raises ``OSError``:
        what fails is logged and tried again. Raises ``ConfigurationError`` where the directory is somebody else's, for then whatever serves there
        must not be talked to."""
        if not self._enabled or self._thread is not None:
            return
        self._last_look = self._clock()
        with contextlib.suppress(OSError):
            self._run_directory.rejoin()
        self._look()
        self._thread = threading.Thread(target=self._watch, name="kvtier-supervisor", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """The engine ends: looks after tierd no more, and removes the run directory if nobody else lives there.

        The sessions of this engine must have been closed. A tierd of its own that ends for that is waited for; one that others
        use is left to them.
        """
        deadline = self._clock() + timeout_seconds
        self._stop.set()
        thread = self._thread
        if thread is None:
            return
        thread.join(max(0.1, timeout_seconds))
        self._release_spawn_lock()
        child = self._child
        used_since: float | None = None
        while child is not None and not child.poll() and (now := self._clock()) < deadline:
            if not self._others_attached():
                used_since = None
            elif used_since is None:
                used_since = now
            elif now - used_since > _LINGERING_SECONDS:
                break
            time.sleep(0.02)
        if self._run_directory.leave():
            _log.info("removed %s", self._run_directory.path)

    def _others_attached(self) -> bool:
        try:
            return any(True for _ in os.scandir(self._run_directory.path / SESSIONS_NAME))
        except OSError:
            return False

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        try:
            now = self._clock()
            if not self._failing or now >= self._spawn_at:
                self._run_directory.rejoin()
                self._failing = False
            self._watch_child(now)
            self._start_if_needed(now)
            self._last_look = now
        except (OSError, ConfigurationError) as error:
            self.counters["spawn_failed"] += 1
            _log.error("tierd cannot be looked after in %s: %s", self._run_directory.path, error)
            self._release_spawn_lock()
            self._failing = True
            self._delay(self._clock())

    def _watch_child(self, now: float) -> None:
        child = self._child
        if child is None:
            return
        if child.poll():
            _log.info("tierd (process %d) has ended", child.pid)
            self._child = None
            self.counters["exited"] += 1
            self._release_spawn_lock()
            if now - self._spawned_at > SETTLED_SECONDS:
                self._backoff = FIRST_BACKOFF_SECONDS
            self._delay(now)
            return
        if now - self._last_look > ASLEEP_SECONDS:
            # This process did not run; whether tierd did cannot be said.
            self._beat_at = now
        beat = self._run_directory.last_beat()
        if beat != self._beat:
            self._had_beat = self._had_beat or self._run_directory.daemon_lives()
            self._beat, self._beat_at = beat, now
            self._release_spawn_lock()
        elif now - self._beat_at > (
            self._unresponsive_seconds if self._had_beat else START_SECONDS
        ):
            _log.error(
                "tierd (process %d) has not gone round for %.0f s and is killed",
                child.pid,
                now - self._beat_at,
            )
            self.counters["killed_unresponsive"] += 1
            child.kill()
            self._beat_at = now

    def _start_if_needed(self, now: float) -> None:
        if (
            self._child is not None
            or now < self._spawn_at
            or self._stop.is_set()
            or self._run_directory.daemon_lives()
        ):
            return
        self._spawn_lock = self._run_directory.try_spawn_lock()
        if self._spawn_lock is None:
            return
        if self._run_directory.daemon_lives():
            self._release_spawn_lock()
            return
        self._beat, self._beat_at, self._had_beat = self._run_directory.last_beat(), now, False
        self._spawned_at = now
        # Whatever reads the engine's standard output expects the engine's words there.
        self._child = DetachedProcess(
            self._command, daemon_environment(), _has_descriptor(sys.stderr)
        )
        self.counters["spawned"] += 1
        _log.info("started tierd (process %d) in %s", self._child.pid, self._run_directory.path)

    def _delay(self, now: float) -> None:
        self._spawn_at = now + self._backoff
        self._backoff = min(LAST_BACKOFF_SECONDS, self._backoff * 2)

    def _release_spawn_lock(self) -> None:
        lock, self._spawn_lock = self._spawn_lock, None
        if lock is not None:
            lock.close()


def _has_descriptor(stream: object) -> bool:
    fileno = getattr(stream, "fileno", None)
    if fileno is None:
        return False
    try:
        return int(fileno()) >= 0
    except (OSError, ValueError):
        return False
