"""A CPU copy engine whose copies move when a test says so: a GPU's lateness without a clock.

``HeldCopyEngine`` drains properly: ``synchronize`` moves everything. ``UndrainedCopyEngine`` only says so and moves
later: what a worker would do that told tierd "drained" without waiting for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from kvtier.transfer.codec import Codec
from kvtier.transfer.cpu import CpuCopyEngine
from kvtier.transfer.engine import Copy, CopyHandle, Direction


class HeldCopyEngine(CpuCopyEngine):
    """Nothing moves before ``move``, unless ``open``. ``move`` and ``submitted`` may be used by any thread."""

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

    def hold(self) -> None:
        """From here on copies wait for ``move``."""
        self.open = False

    def fail(self, message: str) -> None:
        """The next look at a copy fails with ``message``."""
        self._fail = message

    def move(self, count: int | None = None) -> None:
        """The oldest ``count`` submissions (all, if not given) are carried out."""
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
                raise RuntimeError(message)
            return all(held is not handle for held, _ in self._held)

    def _drain(self) -> None:
        self.drains += 1
        self.move()


class UndrainedCopyEngine(HeldCopyEngine):
    """Claims that nothing runs any more while it still does."""

    kind = "undrained"

    def _drain(self) -> None:
        self.drains += 1
