"""A wrapper that makes any tier slow, hanging, failing, corrupt or full, by a fault that may change
at any time.

The faults are those of storage: what the wrapped tier would see from the storage below it. The
wrapper cannot put wrong bytes below the verification of a tier; only changing the storage itself
can (``damage.py``). Its ``corrupt`` raises what a verifying tier raises, and leaves other bytes in
the caller's memory, as a failed read may.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.errors import TierCorruptError, TierMissError, TierNoSpaceError, TierUnavailableError
from kvtier.tiers.base import ForwardingTier, ObjectMeta, ObjectRef, Payload, Tier
from kvtier.tiers.filesystem.io import tier_error
from kvtier.tiers.pieces import views_of

OPERATIONS = ("read", "write", "probe", "delete", "check", "maintain")
MAX_HANG_SECONDS = 3_600.0
"""Every hang ends, so that no test leaks a thread."""


@dataclass(frozen=True, slots=True)
class TierFault:
    """A fault of the named operations. It skips the first ``after`` calls and then affects
    ``times`` calls, None for all.

    ``kind``: "latency" (``seconds`` before the call), "hang" (until released), "unavailable",
    "corrupt", "vanished", "no_space", or "errno" (the error to which the file tier maps
    ``number``).
    """

    kind: str
    operations: tuple[str, ...] = ("read",)
    seconds: float = 0.0
    after: int = 0
    times: int | None = None
    number: int = errno.EIO


_ERRORS: dict[str, Callable[[str], Exception]] = {
    "unavailable": TierUnavailableError,
    "corrupt": TierCorruptError,
    "vanished": TierMissError,
    "no_space": TierNoSpaceError,
}
KINDS = ("latency", "hang", "errno", *_ERRORS)


class FaultyTier(ForwardingTier):
    """``inner`` with a fault. ``calls`` counts operations by name, ``hanging`` those that hang.

    Only ``OPERATIONS`` are faulty: ``open`` is not, because a daemon under test has to start.
    """

    def __init__(self, inner: Tier, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner)
        self.calls: dict[str, int] = dict.fromkeys(OPERATIONS, 0)
        self.hanging = 0
        self._sleep = sleep
        self._lock = threading.Lock()
        self._fault: TierFault | None = None
        self._seen = 0
        self._released = threading.Event()

    def set_fault(self, fault: TierFault | None) -> None:
        """Replaces the fault and releases hanging calls."""
        with self._lock:
            self._released.set()
            self._released = threading.Event()
            self._fault, self._seen = fault, 0

    def _inject(self, operation: str) -> None:
        with self._lock:
            self.calls[operation] += 1
            fault, released = self._fault, self._released
            if fault is None or operation not in fault.operations:
                return
            self._seen += 1
            affected = self._seen > fault.after and (
                fault.times is None or self._seen <= fault.after + fault.times
            )
            if not affected:
                return
            if fault.kind == "hang":
                self.hanging += 1
        if fault.kind == "latency":
            self._sleep(fault.seconds)
        elif fault.kind == "hang":
            released.wait(MAX_HANG_SECONDS)
            with self._lock:
                self.hanging -= 1
        elif fault.kind == "errno":
            raise tier_error(
                OSError(fault.number, os.strerror(fault.number)),
                f"{self.name}: {operation} (injected)",
            )
        else:
            raise _ERRORS[fault.kind](f"{self.name}: injected fault {fault.kind} in {operation}")

    def close(self) -> None:
        """Releases hanging calls and closes."""
        self.set_fault(None)
        self.inner.close()

    def probe(self, ref: ObjectRef) -> bool:
        """Operation "probe"."""
        self._inject("probe")
        return self.inner.probe(ref)

    def read(self, ref: ObjectRef, into: Payload) -> ObjectMeta:
        """Operation "read"."""
        try:
            self._inject("read")
        except TierCorruptError:
            for view in views_of(into):
                view[:] = b"\xa5" * view.nbytes
            raise
        return self.inner.read(ref, into)

    def write(self, ref: ObjectRef, payload: Payload, meta: ObjectMeta) -> None:
        """Operation "write"."""
        self._inject("write")
        self.inner.write(ref, payload, meta)

    def delete(self, ref: ObjectRef) -> None:
        """Operation "delete"."""
        self._inject("delete")
        self.inner.delete(ref)

    def maintain(self) -> None:
        """Operation "maintain"."""
        self._inject("maintain")
        self.inner.maintain()

    def check(self) -> None:
        """Operation "check"."""
        self._inject("check")
        self.inner.check()
