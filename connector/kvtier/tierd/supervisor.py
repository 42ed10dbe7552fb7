"""Engine mode: an engine process starts tierd and supervises it.

Every EngineCore runs one ``Supervisor``. The one that finds the daemon's lock free and gets the
spawn lock starts tierd, in its own session and outside the engine's process tree, so that neither
Ctrl-C at the engine nor the engine's end hits it: tierd ends by itself when no session is left.
Only the process that started a tierd kills it when it hangs, because a process id alone does not
identify a process.

In mode ``Sidecar`` the sidecar's supervisor starts tierd, and nothing here does.
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

from kvtier.config.models import Daemon, Topology
from kvtier.processes import (
    ProcessIdentity,
    main_thread_exited,
    own_identity,
    pid_namespace,
    process_start,
)
from kvtier.tierd.run_directory import SESSIONS_NAME, FileLock, RunDirectory
from kvtier.tierd.watchdog import DEFAULT_TIMING, Watchdog, WatchdogTiming, tierd_environment

SPAWN_SECONDS = 5.0
KILL_SECONDS = 1.0
"""A shell takes milliseconds to print the id of the process that it started."""
_POLL_SECONDS = 0.02
_TO_STANDARD_ERROR = '"$@" >&2 & echo $!'
_DISCARDED = '"$@" >/dev/null & echo $!'


class DetachedProcess:
    """A program in its own session that is no descendant of this process. Raises ``OSError`` if it
    cannot be started.

    vLLM ends an engine by killing it with all its descendants. A daemon among them would die with
    its first engine: its pending writes would be lost, its run directory would stay, and other
    engines would lose their RAM tier. A shell therefore starts the program and exits, so that the
    kernel reparents it to the first process of the machine or container.

    ``to_standard_error``: the program writes to this process's standard error; otherwise its output
    is discarded.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], to_standard_error: bool = True
    ) -> None:
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(None, "program not found", command[0])
        shell = subprocess.Popen(
            [
                "/bin/sh",
                "-c",
                _TO_STANDARD_ERROR if to_standard_error else _DISCARDED,
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
            with contextlib.suppress(subprocess.TimeoutExpired):
                shell.wait(KILL_SECONDS)
            raise OSError(None, f"the shell did not start it: {error}", command[0]) from error
        self._identity = ProcessIdentity(self.pid, process_start(self.pid), pid_namespace())
        self.ended = False
        """Whether ``poll`` has observed the exit."""

    def poll(self) -> bool:
        """Whether the program has ended. A thread that hangs in the kernel executes nothing of it
        and is not waited for."""
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
        """Waits for the exit; whether the program exited within the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while not self.poll() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self.ended

    def _reap(self) -> None:
        """If this process is the first one of its container, the program has become its child."""
        try:
            os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return


_LINGERING_SECONDS = 1.0
"""How long another session must be there before this process leaves its tierd to it."""
_log = logging.getLogger("kvtier.tierd")


def daemon_command(topology_directory: Path, run_directory: Path) -> list[str]:
    """The command line of a tierd for this process."""
    me = own_identity()
    return [
        sys.executable, "-m", "kvtier.tierd",
        "--topology", str(topology_directory),
        "--run-directory", str(run_directory),
        "--spawned-by-engine",
        "--spawner", f"{me.pid}:{me.start}",
    ]  # fmt: skip


class EngineLauncher:
    """Starts tierd outside the engine's process tree, unless another process has started or is
    starting it."""

    def __init__(
        self, run_directory: RunDirectory, command: Sequence[str], stop: threading.Event
    ) -> None:
        self._run_directory = run_directory
        self._command = command
        self._stop = stop
        self._spawn_lock: FileLock | None = None

    def prepare(self) -> None:
        """Joins the run directory again if it was removed."""
        self._run_directory.rejoin()

    def launch(self) -> DetachedProcess | None:
        """Holds the spawn lock until the first heartbeat. None: a tierd runs or another process
        starts one."""
        run = self._run_directory
        if self._stop.is_set() or run.is_daemon_running():
            return None
        self._spawn_lock = run.try_spawn_lock()
        if self._spawn_lock is None:
            return None
        if run.is_daemon_running():
            self.release_spawn_lock()
            return None
        # Readers of the engine's standard output expect the engine's output alone.
        return DetachedProcess(self._command, tierd_environment(), _has_descriptor(sys.stderr))

    def on_heartbeat(self) -> None:
        """Releases the spawn lock, because tierd holds the daemon's lock now."""
        self.release_spawn_lock()

    def on_exit(self, process: DetachedProcess, delay_seconds: float) -> None:
        """Releases the spawn lock, so that any engine may start the next tierd."""
        _log.info("tierd (process %d) exited", process.pid)
        self.release_spawn_lock()

    def on_failure(self, error: Exception) -> None:
        """Releases the spawn lock, so that any engine may try."""
        _log.error("cannot start tierd in %s: %s", self._run_directory.path, error)
        self.release_spawn_lock()

    @property
    def holds_spawn_lock(self) -> bool:
        """Whether this process is starting tierd."""
        return self._spawn_lock is not None

    def release_spawn_lock(self) -> None:
        """Releases the spawn lock, if this process holds it."""
        lock, self._spawn_lock = self._spawn_lock, None
        if lock is not None:
            lock.close()


class Supervisor:
    """Ensures that a tierd runs. ``ensure`` and ``stop`` may be called from any thread, each once.

    Raises ``ConfigurationError`` for a run directory whose name is too long.
    """

    def __init__(
        self,
        topology_directory: Path | str,
        topology: Topology,
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        timing: WatchdogTiming = DEFAULT_TIMING,
    ) -> None:
        structural = topology.structural
        self._enabled = structural.daemon is Daemon.ENGINE
        self._run_directory = RunDirectory(structural.run_directory, shared=not self._enabled)
        self._clock = clock
        self._timing = timing
        self._stop = threading.Event()
        self._launcher = EngineLauncher(
            self._run_directory,
            command
            or daemon_command(Path(topology_directory).absolute(), self._run_directory.path),
            self._stop,
        )
        self._watchdog = Watchdog(self._launcher, self._run_directory, clock, timing)
        self._thread: threading.Thread | None = None

    @property
    def counters(self) -> Mapping[str, int]:
        """Counters of the watchdog."""
        return self._watchdog.counters

    @property
    def child(self) -> int:
        """Process id of the running tierd that this supervisor started; 0: none."""
        process = self._watchdog.process
        return 0 if process is None or process.ended else process.pid

    def ensure(self) -> None:
        """Joins the run directory and starts a tierd if none runs; does not wait until it serves.

        Logs and retries what fails with ``OSError``. Raises ``ConfigurationError`` for a directory
        that other users may write to: this process must not talk to a tierd there.
        """
        if not self._enabled or self._thread is not None:
            return
        with contextlib.suppress(OSError):
            self._run_directory.rejoin()
        self._watchdog.step()
        self._thread = threading.Thread(target=self._run, name="kvtier-supervisor", daemon=True)
        self._thread.start()

    def abandon(self, timeout_seconds: float) -> None:
        """Ends supervision and the tierd that this process has started: no engine will attach."""
        self._stop.set()
        child = self.child
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        self.stop(timeout_seconds)

    def stop(self, timeout_seconds: float) -> None:
        """Ends supervision when the engine ends, and removes the run directory if no other process
        uses it.

        The sessions of this engine must be closed. Waits for its own tierd to end, unless other
        engines use it.
        """
        deadline = self._clock() + timeout_seconds
        self._stop.set()
        thread = self._thread
        if thread is None:
            return
        thread.join(max(0.1, timeout_seconds))
        self._launcher.release_spawn_lock()
        process = self._watchdog.process
        used_since: float | None = None
        while process is not None and not process.poll() and (now := self._clock()) < deadline:
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

    def _run(self) -> None:
        while not self._stop.wait(self._timing.poll):
            self._watchdog.step()


def _has_descriptor(stream: object) -> bool:
    fileno = getattr(stream, "fileno", None)
    if fileno is None:
        return False
    try:
        return int(fileno()) >= 0
    except (OSError, ValueError):
        return False
