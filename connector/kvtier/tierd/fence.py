"""Which workers a tierd has to wait for before it touches the pool of its predecessor.

Each attached worker has a small file in ``sessions/``: written before it is welcomed, removed when it said ``Bye`` or is proven gone.
A new tierd finds those whose workers may still be copying into slots that it knows nothing about. It is *fenced* until each of
them has said that every epoch up to the file's is drained, or is provably gone, or, where processes cannot be seen, for
``BLIND_SECONDS`` (DATAPATH 4).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.tierd.process import Fate, ProcessIdentity
from kvtier.tierd.rundir import replace_atomically

BLIND_SECONDS = 60.0
"""How long a process that cannot be seen is waited for. Copies last milliseconds; a frozen container thaws or is killed."""
_TEMPORARY_PREFIX = "."

_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class AttachedWorker:
    """A worker rank in the epoch in which it was attached."""

    engine: str
    rank: int
    epoch: int
    process: ProcessIdentity


class SessionFiles:
    """The files in ``sessions/``. Owner's thread only; the directory is memory-backed, so these calls are short."""

    def __init__(self, directory: Path, mode: int) -> None:
        self._directory = directory
        self._mode = mode

    def _path(self, worker: AttachedWorker) -> Path:
        text = f"{worker.engine}\0{worker.rank}\0{worker.epoch}\0{worker.process}"
        return self._directory / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"

    def add(self, worker: AttachedWorker) -> None:
        """Raises ``OSError``; then the worker must not be welcomed."""
        document = {
            "engine": worker.engine,
            "rank": worker.rank,
            "epoch": worker.epoch,
            "pid": worker.process.pid,
            "processStart": worker.process.start,
            "pidNamespace": worker.process.pid_namespace,
            "lock": worker.process.lock,
        }
        replace_atomically(self._path(worker), json.dumps(document).encode(), self._mode)

    def remove(self, worker: AttachedWorker) -> None:
        """Nothing of this worker's epoch needs waiting for any more."""
        try:
            self._path(worker).unlink(missing_ok=True)
        except OSError as error:
            # The next tierd waits for somebody who is not there, and finds out.
            _log.warning("a session file could not be removed: %s", error)

    def read(self) -> list[AttachedWorker]:
        """All of them. One that cannot be read stands for a worker that cannot be seen."""
        found = []
        for path in sorted(self._directory.glob("*.json")):
            if path.name.startswith(_TEMPORARY_PREFIX):
                continue
            try:
                document = json.loads(path.read_bytes())
                process = ProcessIdentity(
                    int(document["pid"]),
                    int(document["processStart"]),
                    str(document["pidNamespace"]),
                    str(document.get("lock", "")),
                )
                worker = AttachedWorker(str(document["engine"]), int(document["rank"]), int(document["epoch"]), process)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.error("%s: %s; its worker is waited for as long as for one that cannot be seen", path, error)
                worker = AttachedWorker(path.name, -1, 0, ProcessIdentity(0, 0, ""))
            if self._path(worker) != path:
                # Not written by this code; what it stands for is waited for, and then it goes.
                path.unlink(missing_ok=True)
            found.append(worker)
        return found


class Fence:
    """The workers of earlier epochs that have not drained. Owner's thread only."""

    def __init__(
        self,
        files: SessionFiles,
        now: float,
        fate: Callable[[ProcessIdentity], Fate],
        blind_seconds: float = BLIND_SECONDS,
    ) -> None:
        self._files = files
        self._fate = fate
        self._deadline = now + blind_seconds
        self.waiting = files.read()

    @property
    def closed(self) -> bool:
        """Whether anybody still has to be waited for."""
        return bool(self.waiting)

    def hello(self, worker: AttachedWorker, drained_epoch: int) -> None:
        """A worker attaches and says up to which epoch it has drained."""
        self._resolve(
            lambda other: (
                other.engine == worker.engine
                and other.rank == worker.rank
                and other.process == worker.process
                and drained_epoch >= other.epoch
            )
        )

    def check(self, now: float) -> None:
        """Looks which of them are provably gone, or have been waited for long enough."""
        if not self.waiting:
            return

        def over(worker: AttachedWorker) -> bool:
            fate = self._fate(worker.process)
            return fate is Fate.GONE or (fate is Fate.UNKNOWN and now >= self._deadline)

        self._resolve(over)

    def _resolve(self, over: Callable[[AttachedWorker], bool]) -> None:
        left = []
        for worker in self.waiting:
            if over(worker):
                self._files.remove(worker)
            else:
                left.append(worker)
        self.waiting = left
