"""The watchdog that supervises tierd, in an engine process and in the sidecar alike.

::

    waiting ──launch──▶ running ──exited──▶ back-off ──▶ waiting
                           │ no heartbeat
                           └──▶ killed ──▶ exited

A failed start and an exit back off alike: 1 s, doubled up to 30 s, and 1 s again after a tierd that
ran for a minute. How tierd is launched, and what else depends on it, is the ``Launcher``'s. All
calls belong to one thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import kvtier
from kvtier.errors import ConfigurationError
from kvtier.tierd.run_directory import RunDirectory

_log = logging.getLogger("kvtier.tierd")


class SupervisedProcess(Protocol):
    """A tierd process that a launcher has started."""

    pid: int

    def poll(self) -> bool:
        """Whether the program has ended. A thread that hangs in the kernel does not delay this."""

    def kill(self) -> None:
        """Sends SIGKILL unless it has ended."""


Process = TypeVar("Process", bound=SupervisedProcess)


class Launcher(Protocol[Process]):
    """How tierd starts, and what follows from its state, in an engine or in the sidecar."""

    def prepare(self) -> None:
        """Prepares a step. Not called during back-off. Raises ``OSError`` or
        ``ConfigurationError``."""

    def launch(self) -> Process | None:
        """Starts tierd; None if it cannot be started at present, such as while another process
        starts it. Raises ``OSError``."""

    def on_heartbeat(self) -> None:
        """Called after the first heartbeat of tierd."""

    def on_exit(self, process: Process, delay_seconds: float) -> None:
        """Called when tierd has exited. The next one starts after ``delay_seconds``."""

    def on_failure(self, error: Exception) -> None:
        """Called when ``prepare`` or ``launch`` has raised ``error``."""


@dataclass(frozen=True, slots=True)
class WatchdogTiming:
    """The intervals and limits of a watchdog, in seconds."""

    poll: float = 0.5
    """Interval between steps; the owner of the watchdog waits for it."""
    unresponsive: float = 10.0
    start: float = 60.0
    """Until the first heartbeat: Python and its imports on a machine that is loading a model."""
    first_backoff: float = 1.0
    last_backoff: float = 30.0
    stable: float = 60.0
    """A tierd that ran for this long did not fail at its start, which resets the back-off."""
    retry: float = 0.0
    """After ``launch`` returned None."""
    suspended: float = 2.0
    """After such a gap between two steps this process did not run. Whether tierd did is unknown."""


DEFAULT_TIMING = WatchdogTiming()


class Watchdog(Generic[Process]):
    """Starts tierd, observes its heartbeat, kills it if it hangs, and starts the next one."""

    def __init__(
        self,
        launcher: Launcher[Process],
        run_directory: RunDirectory,
        clock: Callable[[], float] = time.monotonic,
        timing: WatchdogTiming = DEFAULT_TIMING,
    ) -> None:
        self._launcher = launcher
        self._run_directory = run_directory
        self._clock = clock
        self._timing = timing
        self._process: Process | None = None
        self._started_at = 0.0
        self._next_start_at = 0.0
        self._backoff_seconds = timing.first_backoff
        self._heartbeat = 0
        self._heartbeat_at = 0.0
        self._has_heartbeat = False
        self._last_step_at = clock()
        self._failing = False
        self.counters: dict[str, int] = {
            "spawned": 0,
            "spawn_failed": 0,
            "killed_unresponsive": 0,
            "exited": 0,
        }

    @property
    def process(self) -> Process | None:
        """The running tierd that this watchdog started."""
        return self._process

    @property
    def has_heartbeat(self) -> bool:
        """Whether the running tierd has sent a heartbeat."""
        return self._process is not None and self._has_heartbeat

    def step(self) -> None:
        """Checks the running tierd, or starts one if there is none. Never raises ``OSError``."""
        now = self._clock()
        try:
            if not self._failing or now >= self._next_start_at:
                self._launcher.prepare()
                self._failing = False
            self._check(now)
            self._launch_if_due(now)
            self._last_step_at = now
        except (OSError, ConfigurationError) as error:
            self.counters["spawn_failed"] += 1
            self._failing = True
            self._launcher.on_failure(error)
            self._back_off(self._clock())

    def _check(self, now: float) -> None:
        process = self._process
        if process is None:
            return
        if process.poll():
            self._exited(process, now)
            return
        if now - self._last_step_at > self._timing.suspended:
            self._heartbeat_at = now
        heartbeat = self._run_directory.last_heartbeat()
        if heartbeat != self._heartbeat:
            # Opening the lock file sets its time as well: only the holder of the lock sends
            # heartbeats.
            self._has_heartbeat = self._has_heartbeat or self._run_directory.is_daemon_running()
            self._heartbeat, self._heartbeat_at = heartbeat, now
            self._launcher.on_heartbeat()
            return
        timing = self._timing
        silent_seconds = now - self._heartbeat_at
        if silent_seconds > (timing.unresponsive if self._has_heartbeat else timing.start):
            _log.error(
                "killing tierd (process %d): no heartbeat for %.0f s",
                process.pid,
                silent_seconds,
            )
            self.counters["killed_unresponsive"] += 1
            process.kill()
            self._heartbeat_at = now

    def _exited(self, process: Process, now: float) -> None:
        self._process = None
        self.counters["exited"] += 1
        if now - self._started_at > self._timing.stable:
            self._backoff_seconds = self._timing.first_backoff
        self._launcher.on_exit(process, self._backoff_seconds)
        self._back_off(now)

    def _launch_if_due(self, now: float) -> None:
        if self._process is not None or now < self._next_start_at:
            return
        process = self._launcher.launch()
        if process is None:
            self._next_start_at = now + self._timing.retry
            return
        self._process = process
        self._started_at = now
        # Read after the launch, which opens the lock file and so changes its time.
        self._heartbeat = self._run_directory.last_heartbeat()
        self._heartbeat_at, self._has_heartbeat = now, False
        self.counters["spawned"] += 1
        _log.info("started tierd (process %d) in %s", process.pid, self._run_directory.path)

    def _back_off(self, now: float) -> None:
        self._next_start_at = now + self._backoff_seconds
        self._backoff_seconds = min(self._timing.last_backoff, self._backoff_seconds * 2)


def tierd_environment() -> dict[str, str]:
    """The environment of a tierd: this process's, with its own package first in the path."""
    package = str(Path(kvtier.__file__).resolve().parent.parent)
    path = [package] + [
        part
        for part in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if part and part != package
    ]
    # Safe path: a file of the working directory must not stand in for a module.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
