"""What a load or a store is allowed to do to GPU memory, and what became of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.engines.common.jobs import BlockRun


class CopyGate:
    """Whether a job may still touch GPU blocks. Closing it waits for the copy that runs.

    LMCache may hang in a back end for longer than the engine can keep the blocks. What comes out of
    it after the gate was closed touches no block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True

    def run(self, copy: Callable[[], None]) -> bool:
        """Calls ``copy``, unless the gate is closed; returns whether it was called."""
        with self._lock:
            if not self._open:
                return False
            copy()
            return True

    @property
    def is_open(self) -> bool:
        """Whether a copy would run. Does not wait."""
        return self._open

    def close(self) -> None:
        """No copy of this job runs from now on. Idempotent."""
        with self._lock:
            self._open = False


@dataclass(slots=True)
class StoreTransfer:
    """One chunk to store. ``copied``: whether its bytes have left the GPU."""

    key: bytes
    store: int
    run: BlockRun
    fence: object | None = None
    gate: CopyGate = field(default_factory=CopyGate)
    copied: bool = False
    failure: str = ""


@dataclass(slots=True)
class LoadTransfer:
    """Chunks to load, in prefix order. ``loaded``: how many are in GPU memory, from the first.

    ``damaged``: chunks that came and did not verify. ``missing``: chunks that are not in the back
    end, or are there no more, since they did not verify.
    """

    keys: tuple[bytes, ...]
    stores: tuple[int, ...]
    runs: Sequence[BlockRun]
    fence: object | None = None
    gate: CopyGate = field(default_factory=CopyGate)
    loaded: int = 0
    damaged: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    failure: str = ""
