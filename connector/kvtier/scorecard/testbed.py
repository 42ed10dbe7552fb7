"""Where the scorecard plays: one real tier daemon, its file tier on storage that can be made to misbehave, one engine that checks every byte.

The RAM tier holds a part of what is stored, so loads come from files. The engine loads and stores at a steady pace; what a load may wait is given to
the daemon with it, and measured here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvtier.config.models import BreakerSettings, Live, Selection
from kvtier.harness.file_writers import directory_bytes
from kvtier.harness.stub_engine import StubEngine
from kvtier.harness.tierd_testbed import WAIT_SECONDS, TierdTestbed, environment, wait_for
from kvtier.store.types import RAM_BITS

MIB = 1 << 20
OBJECT_BYTES = 64 << 10
KEYS = 56
MEMORY_BYTES = 2 * MIB
CAPACITY_BYTES = 24 * MIB
BUDGET_SECONDS = 0.5
"""What a load may wait."""
BREAKER = BreakerSettings(failure_threshold=5, period_seconds=2)
PAUSE_SECONDS = 0.01
LOOK_SECONDS = 0.25


@dataclass(slots=True)
class Measurements:
    """What was seen while a fault was there. Seconds; ``over_budget_bytes`` above the file tier's capacity."""

    loads: int = 0
    loaded: int = 0
    stores: int = 0
    longest_wait: float = 0.0
    longest_wait_breaker_open: float | None = None
    over_budget_bytes: int = 0
    crashes: int = 0
    wrong: int = 0
    recovery_seconds: float | None = None
    notes: list[str] = field(default_factory=list)


class SkewedTestbed(TierdTestbed):
    """A case whose daemon's wall clock can be moved; ``faults_file``: and whose lower tiers are wrapped."""

    faults_file: Path | None = None

    def start_tierd(
        self, fencing: bool = True, tiers: bool = True, seconds: float = WAIT_SECONDS
    ) -> int:
        """Starts the daemon with a clock that ``skew`` moves."""
        command = [
            sys.executable,
            "-m",
            "kvtier.scorecard.skewed_tierd",
            "--skew",
            str(self.skew_file),
        ]
        command += ["--faults", str(self.faults_file)] if self.faults_file is not None else []
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*command, "--topology", str(self.topology_directory)],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        wait_for(
            lambda: self.tierd_pid() == process.pid and self._open(tiers), "tierd serves", seconds
        )
        return process.pid

    @property
    def skew_file(self) -> Path:
        """Seconds, as text."""
        return self.directory / "skew"


class FaultTestbed:
    """See the module's text. ``files``: the directory of the file tier as the daemon sees it; ``below``: the same bytes, seen past the faults."""

    def __init__(
        self, directory: Path, files: Path, below: Path, faults_file: Path | None = None
    ) -> None:
        self.below = below
        self.case = SkewedTestbed(
            directory,
            memory_bytes=MEMORY_BYTES,
            file_bytes=CAPACITY_BYTES,
            files=files,
            persistence="Process",
        )
        self.case.faults_file = faults_file
        self._generation = 1
        self.retune(breaker=BREAKER, selection=Selection.WEIGHTED)
        self.pid = self.case.start_tierd()
        self.engine: StubEngine = self.case.engine(strict=True)
        self._next_key = KEYS
        self._turn = 0

    # Steps.

    def retune(self, **changes: object) -> None:
        """Replaces live values."""
        self._generation += 1
        self.case.live = self.case.live.model_copy(
            update={"generation": self._generation, **changes}
        )
        self.case.retune(self.case.live)

    def live(self) -> Live:
        """The values that were written last."""
        return self.case.live

    def wait(self, condition: object, what: str, seconds: float = 60.0) -> bool:
        """Steps the engine until ``condition``; says so where it does not come."""
        return self.engine.wait_for(condition, seconds) or self._say(what)

    def _say(self, what: str) -> bool:
        sys.stderr.write(f"not in time: {what}\n")
        return False

    def filed(self, number: int) -> bool:
        """Whether the engine knows the chunk to be in a file."""
        return bool(self.engine.holds(number) & ~RAM_BITS)

    def in_ram(self, number: int) -> bool:
        """Whether the engine knows the chunk to be in RAM."""
        return bool(self.engine.holds(number) & RAM_BITS)

    def store(self, number: int, seconds: float = 2.0) -> bool:
        """One chunk; False: dropped."""
        return self.engine.can_store and self.engine.store(number, seconds)

    def fill(self) -> None:
        """Sees to it that every chunk of the rotation is in a file. Raises ``TimeoutError``."""
        deadline = time.monotonic() + 90
        self.wait(lambda: self.engine.can_store, "a session")
        while missing := [number for number in range(KEYS) if not self.filed(number)]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(missing)} of {KEYS} chunks cannot be brought into files: {self.case.status()}"
                )
            for number in missing[:8]:
                self.wait(lambda: self.engine.can_store, "a free slot", 2)
                if not self.in_ram(number):
                    self.store(number)
            self.engine.wait_for(lambda m=missing[:8]: all(self.filed(n) for n in m), 1.0)

    def stream(self, seconds: float, measured: Measurements) -> None:
        """Loads and stores for so long; the daemon may be anything meanwhile."""
        end = time.monotonic() + seconds
        with Sampler(self, measured) as sampler:
            while time.monotonic() < end:
                self._turn = (self._turn + 1) % KEYS
                begun, open_before = time.monotonic(), sampler.breaker_open
                loaded = self.engine.load([self._turn], BUDGET_SECONDS)
                taken = time.monotonic() - begun
                measured.loads += 1
                measured.loaded += loaded
                measured.longest_wait = max(measured.longest_wait, taken)
                if open_before and sampler.breaker_open and not self.in_ram(self._turn):
                    measured.longest_wait_breaker_open = max(
                        measured.longest_wait_breaker_open or 0.0, taken
                    )
                if not loaded and not self.in_ram(self._turn) and self.store(self._turn, 0.5):
                    measured.stores += 1
                elif self._turn % 4 == 0:
                    self._next_key += 1
                    measured.stores += self.store(self._next_key, 0.5)
                time.sleep(PAUSE_SECONDS)

    def recover(self, seconds: float = 120.0) -> float | None:
        """Until a chunk was stored, written and one was loaded from a file: how long that took; None: never."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            self._next_key += 1
            number = self._next_key
            self.engine.step()
            if not self.store(number):
                self.engine.wait_for(lambda: self.engine.can_store, 0.5)
                continue
            if not self.engine.wait_for(lambda n=number: self.filed(n), 2.0):
                continue
            other = next((n for n in range(KEYS) if self.filed(n) and not self.in_ram(n)), None)
            if other is not None and self.engine.load([other], BUDGET_SECONDS) == 1:
                return time.monotonic() - begun
            if other is None:
                # What the tier held is gone; something new in it is as good.
                for filler in range(number + 1, number + 40):
                    self.store(filler, 0.5)
                self._next_key = number + 40
                if self.filed(number) and self.engine.load([number], BUDGET_SECONDS) == 1:
                    return time.monotonic() - begun
        return None

    def is_daemon_running(self) -> bool:
        """Whether the daemon that was started last serves."""
        return self.case.tierd_pid() == self.pid and bool(self.case.status())

    def replace_daemon(self, number: int = signal.SIGKILL) -> None:
        """Ends the daemon by a signal and starts another one, as a supervisor does."""
        self.case.kill_tierd(number)
        self.pid = self.case.start_tierd(tiers=False)

    def state(self) -> str:
        """State of the file tier."""
        tiers = self.case.status().get("tiers", [])
        return next((str(tier["state"]) for tier in tiers if tier["name"] == "disk"), "")

    def close(self) -> None:
        """Ends daemon and engine."""
        self.case.close()


class Sampler:
    """Looks at the directory's size and at the breaker while a stream runs, on a thread of its own."""

    def __init__(self, stage: FaultTestbed, measured: Measurements) -> None:
        self._stage, self._measured = stage, measured
        self.breaker_open = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scorecard-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            capacity = max(tier.capacity_bytes or 0 for tier in self._stage.live().tiers.values())
            over = directory_bytes(self._stage.below) - capacity
            self._measured.over_budget_bytes = max(self._measured.over_budget_bytes, over)
            state = self._stage.state()
            # It was open for a while already: what the schedulers were told has reached them.
            self.breaker_open = state == "BreakerOpen" and self._since_open()
            if state != "BreakerOpen":
                self._opened = None

    _opened: float | None = None

    def _since_open(self) -> bool:
        if self._opened is None:
            self._opened = time.monotonic()
        return time.monotonic() - self._opened > 2 * LOOK_SECONDS


def alive(pid: int) -> bool:
    """Whether a process of this id runs (and is no zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def leave_nothing(pid: int) -> None:
    """Kills a process, if it is there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
