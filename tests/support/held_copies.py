"""A CPU copy engine whose copies run when a test calls ``move``: a GPU's delay without a clock.

``HeldCopyEngine`` drains: ``synchronize`` runs every copy. ``UndrainedCopyEngine`` only reports
that it did, as a worker would that reattaches without waiting for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from kvtier.transfer.codec import Codec
from kvtier.transfer.cpu import CpuCopyEngine
from kvtier.transfer.engine import Copy, CopyHandle, Direction


class HeldCopyEngine(CpuCopyEngine):
    """Copies run in ``move``, or at once while ``open``.

    Any thread may use ``move`` and ``submitted``.
    """

    kind = "held"

    def __init__(
        self, kv_caches: Mapping[str, object], codec: Codec, in_flight_bytes: int = 1 << 40
    ) -> None:
        super().__init__(kv_caches, codec, in_flight_bytes)
        self._mutex = threading.RLock()
        self._held: list[tuple[CopyHandle, tuple[Copy, ...]]] = []
        self._fail: str = ""
        self.open = True
        self.submitted: list[tuple[Direction, tuple[Copy, ...], object | None]] = []
        self.drains = 0
        self.can_order = False
        """Whether kernels can be ordered behind copies, as on a GPU."""
        self.ordered: list[tuple[CopyHandle, ...]] = []

    @property
    def can_order_kernels(self) -> bool:
        return self.can_order

    def order_kernels(self, handles: Sequence[CopyHandle]) -> None:
        self.ordered.append(tuple(handles))

    def hold(self) -> None:
        """Delays further copies until ``move``."""
        self.open = False

    def fail(self, message: str) -> None:
        """Makes the next poll of a copy fail with ``message``."""
        self._fail = message

    def move(self, count: int | None = None) -> None:
        """Runs the oldest ``count`` submissions, or all."""
        with self._mutex:
            due = self._held[: len(self._held) if count is None else count]
            del self._held[: len(due)]
            for handle, copies in due:
                for copy in copies:
                    self._move(copy, handle.direction)

    @property
    def held(self) -> int:
        """Submissions that wait."""
        with self._mutex:
            return len(self._held)

    def _start(self, handle: CopyHandle, copies: Sequence[Copy], after: object | None) -> None:
        with self._mutex:
            self.submitted.append((handle.direction, tuple(copies), after))
            self._held.append((handle, tuple(copies)))
            if self.open:
                self.move()

    def _ready(self, handle: CopyHandle) -> bool:
        with self._mutex:
            if self._fail:
                message, self._fail = self._fail, ""
                # A device that has failed runs nothing of it afterwards.
                self._held = [each for each in self._held if each[0] is not handle]
                raise RuntimeError(message)
            return all(held is not handle for held, _ in self._held)

    def _drain(self) -> None:
        self.drains += 1
        self.move()


class UndrainedCopyEngine(HeldCopyEngine):
    """Reports that no copy runs while copies still run."""

    kind = "undrained"

    def _drain(self) -> None:
        self.drains += 1
