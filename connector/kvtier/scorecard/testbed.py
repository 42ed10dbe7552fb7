"""The testbed of the scorecard: one real tier daemon whose file tier is on storage that can be made
to fail, and one stub engine that checks every byte.

The RAM tier holds a part of what is stored, so loads come from files. The engine loads and stores
at a steady pace. Each load carries its deadline to the daemon, and its wait is measured here.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvtier.config.models import BreakerSettings, IsolationSettings, Live, Selection
from kvtier.harness.file_writers import bytes_at_once
from kvtier.harness.stub_engine import StubEngine
from kvtier.harness.tierd_testbed import (
    TierdOptions,
    TierdTestbed,
    environment,
    wait_for,
)
from kvtier.store.types import RAM_BITS

MIB = 1 << 20
OBJECT_BYTES = 64 << 10
KEYS = 56
MEMORY_BYTES = 2 * MIB
CAPACITY_BYTES = 24 * MIB
BUDGET_SECONDS = 0.5
"""How long a load may wait, on a machine that is not slow."""
START_SECONDS = 600.0
"""A daemon that is started serves after a second; on an emulated machine it may take minutes."""
FILL_SECONDS = 300.0
"""A slow machine needs several attempts to write what little RAM keeps for a short time only."""
FILL_OBJECTS = 8
"""How many are stored before their writes are awaited."""
BREAKER = BreakerSettings(failure_threshold=5, period_seconds=2)
PAUSE_SECONDS = 0.01
SAMPLE_SECONDS = 0.25


@dataclass(slots=True)
class Measurements:
    """What was measured during a fault. Waits in seconds; ``budget_seconds``: how long a load may
    wait; ``over_budget_bytes``: above the file tier's capacity.
    """

    loads: int = 0
    loaded: int = 0
    stores: int = 0
    budget_seconds: float = BUDGET_SECONDS
    longest_wait: float = 0.0
    longest_wait_breaker_open: float | None = None
    over_budget_bytes: int = 0
    crashes: int = 0
    wrong: int = 0
    recovery_seconds: float | None = None
    notes: list[str] = field(default_factory=list)


class SkewedTestbed(TierdTestbed):
    """A testbed whose daemon has a wall clock that can be moved. ``faults_file``: the control file
    of its wrapped secondary tiers, None if they are not wrapped.
    """

    def __init__(
        self,
        directory: Path,
        files: Path,
        faults_file: Path | None,
        lmcache_url: str = "",
        volumes: tuple[Path, ...] = (),
    ) -> None:
        super().__init__(
            directory,
            TierdOptions(
                memory_bytes=MEMORY_BYTES,
                file_bytes=CAPACITY_BYTES,
                files=files,
                persistence="Process",
                lmcache_url=lmcache_url,
                volumes=volumes,
            ),
        )
        self._faults_file = faults_file

    def start_tierd(
        self, fencing: bool = True, tiers: bool = True, seconds: float = START_SECONDS
    ) -> int:
        """Starts the daemon with a clock that ``skew_file`` moves."""
        command = [
            sys.executable,
            "-m",
            "kvtier.scorecard.skewed_tierd",
            "--skew",
            str(self.skew_file),
        ]
        command += ["--faults", str(self._faults_file)] if self._faults_file is not None else []
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
        """The file that holds the offset of the clock: seconds, as text."""
        return self.directory / "skew"


class FaultTestbed:
    """One tierd, its storage and one stub engine, for one fault.

    ``files``: the directory of the file tier as tierd sees it. ``below``: the same directory
    without the faults. ``lmcache_url``: the tier is an lmcache tier instead. ``volumes``: the tier
    has these directories instead of ``files``.
    """

    def __init__(
        self,
        directory: Path,
        files: Path,
        below: Path,
        faults_file: Path | None = None,
        isolation: IsolationSettings | None = None,
        *,
        lmcache_url: str = "",
        volumes: tuple[Path, ...] = (),
    ) -> None:
        self.below = below
        self.stored_bytes: Callable[[], int] = lambda: bytes_at_once(below)
        """Bytes that the storage holds, by its own word."""
        self.tierd = SkewedTestbed(directory, files, faults_file, lmcache_url, volumes)
        if isolation is not None:
            self.tierd.change(isolation=isolation)
        self.patience = 1.0
        """What is longer on a slow machine: deadlines of loads, and how long they are tried."""
        self._generation = 1
        self.retune(breaker=BREAKER, selection=Selection.WEIGHTED)
        self.pid = self.tierd.start_tierd()
        self.engine: StubEngine = self.tierd.engine(strict=True)
        self._next_key = KEYS
        self._next_load = 0

    # Steps.

    @property
    def budget_seconds(self) -> float:
        """How long a load may wait."""
        return BUDGET_SECONDS * self.patience

    def retune(self, **changes: object) -> None:
        """Replaces live values."""
        self._generation += 1
        self.tierd.live = self.tierd.live.model_copy(
            update={"generation": self._generation, **changes}
        )
        self.tierd.retune(self.tierd.live)

    def live(self) -> Live:
        """The values that were written last."""
        return self.tierd.live

    def wait(self, condition: object, what: str, seconds: float = 60.0) -> bool:
        """Steps the engine until ``condition``; reports on standard error if it does not hold in
        time.
        """
        return self.engine.wait_for(condition, seconds) or self._report_timeout(what)

    def _report_timeout(self, what: str) -> bool:
        sys.stderr.write(f"timeout: {what}\n")
        return False

    def in_file(self, number: int) -> bool:
        """Whether the engine knows that the chunk is in a file."""
        return bool(self.engine.holds(number) & ~RAM_BITS)

    def in_ram(self, number: int) -> bool:
        """Whether the engine knows that the chunk is in RAM."""
        return bool(self.engine.holds(number) & RAM_BITS)

    def store(self, number: int, seconds: float = 2.0) -> bool:
        """Stores one chunk. False if it was dropped."""
        return self.engine.can_store and self.engine.store(number, seconds)

    def fill(self) -> None:
        """Stores until every chunk of the rotation is in a file. Raises ``TimeoutError``."""
        deadline = time.monotonic() + FILL_SECONDS * self.patience
        self.wait(lambda: self.engine.can_store, "a session")
        turn = 0
        while missing := [number for number in range(KEYS) if not self.in_file(number)]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(missing)} of {KEYS} chunks did not reach the file tier: "
                    f"{self.tierd.status()}"
                )
            # Others each time: what stays in RAM after its write failed is displaced by them.
            start = turn * FILL_OBJECTS % len(missing)
            chosen = (missing + missing)[start : start + min(FILL_OBJECTS, len(missing))]
            turn += 1
            for number in chosen:
                self.wait(lambda: self.engine.can_store, "a free slot", 2 * self.patience)
                if not self.in_ram(number):
                    self.store(number, 2 * self.patience)
            self.engine.wait_for(
                lambda chosen=chosen: all(self.in_file(n) for n in chosen), self.patience
            )

    def stream(self, seconds: float, measurements: Measurements) -> None:
        """Loads and stores for ``seconds``, in any state of the daemon."""
        end = time.monotonic() + seconds
        measurements.budget_seconds = self.budget_seconds
        with Sampler(self, measurements) as sampler:
            while time.monotonic() < end:
                self._next_load = (self._next_load + 1) % KEYS
                started, open_before = time.monotonic(), sampler.breaker_open
                loaded = self.engine.load([self._next_load], self.budget_seconds)
                taken = time.monotonic() - started
                measurements.loads += 1
                measurements.loaded += loaded
                measurements.longest_wait = max(measurements.longest_wait, taken)
                if open_before and sampler.breaker_open and not self.in_ram(self._next_load):
                    measurements.longest_wait_breaker_open = max(
                        measurements.longest_wait_breaker_open or 0.0, taken
                    )
                if (
                    not loaded
                    and not self.in_ram(self._next_load)
                    and self.store(self._next_load, self.budget_seconds)
                ):
                    measurements.stores += 1
                elif self._next_load % 4 == 0:
                    self._next_key += 1
                    measurements.stores += self.store(self._next_key, self.budget_seconds)
                time.sleep(PAUSE_SECONDS)

    def recover(self, seconds: float = 120.0) -> float | None:
        """Loads and stores until a chunk was stored and written, and one was loaded from a file.
        Returns how long that took; None if it did not succeed.
        """
        started = time.monotonic()
        while time.monotonic() - started < seconds * self.patience:
            self._next_key += 1
            number = self._next_key
            self.engine.step()
            if not self.store(number, 2 * self.patience):
                self.engine.wait_for(lambda: self.engine.can_store, 0.5)
                continue
            if not self.engine.wait_for(lambda n=number: self.in_file(n), 2 * self.patience):
                continue
            other = next((n for n in range(KEYS) if self.in_file(n) and not self.in_ram(n)), None)
            if other is not None and self.engine.load([other], self.budget_seconds) == 1:
                return time.monotonic() - started
            if other is None:
                # The tier is empty: store something to load.
                for filler in range(number + 1, number + 40):
                    self.store(filler, self.budget_seconds)
                self._next_key = number + 40
                if self.in_file(number) and self.engine.load([number], self.budget_seconds) == 1:
                    return time.monotonic() - started
        return None

    def daemon_is_serving(self) -> bool:
        """Whether the daemon that was started last is serving."""
        return self.tierd.tierd_pid() == self.pid and bool(self.tierd.status())

    def start_daemon(self) -> None:
        """Starts a new daemon, as a supervisor does after the last one has ended."""
        self.pid = self.tierd.start_tierd(tiers=False)

    def tier_state(self) -> str:
        """State of the file tier, from the daemon's status."""
        tiers = self.tierd.status().get("tiers", [])
        return next((str(tier["state"]) for tier in tiers if tier["name"] == "disk"), "")

    def close(self) -> None:
        """Ends daemon and engine."""
        self.tierd.close()


class Sampler:
    """Samples the directory's size and the breaker in a thread while a stream runs."""

    def __init__(self, testbed: FaultTestbed, measurements: Measurements) -> None:
        self._testbed, self._measurements = testbed, measurements
        self.breaker_open = False
        self._opened: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scorecard-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            capacity = max(tier.capacity_bytes or 0 for tier in self._testbed.live().tiers.values())
            over = self._testbed.stored_bytes() - capacity
            self._measurements.over_budget_bytes = max(self._measurements.over_budget_bytes, over)
            state = self._testbed.tier_state()
            # Open for a while: the schedulers have been notified.
            self.breaker_open = state == "BreakerOpen" and self._open_for_a_while()
            if state != "BreakerOpen":
                self._opened = None

    def _open_for_a_while(self) -> bool:
        if self._opened is None:
            self._opened = time.monotonic()
        return time.monotonic() - self._opened > 2 * SAMPLE_SECONDS
