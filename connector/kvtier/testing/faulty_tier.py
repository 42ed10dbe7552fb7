"""A wrapper that makes any tier slow, hanging, failing, lying or full, by a plan that may change at any time.

The faults are those of storage: what the wrapped tier would have seen below itself. Wrong bytes are put where a read delivers them
*before* verification only by changing the storage itself (``damage.py``); this wrapper's ``corrupt`` raises what a verifying tier raises,
and leaves other bytes in the caller's memory, as a read that failed may.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtier.errors import TierCorruptError, TierMissError, TierNoSpaceError, TierUnavailableError
from kvtier.tiers.base import ObjectMeta, ObjectRef, OnChange, Tier, TierLimits, TierUsage
from kvtier.tiers.filesystem.io import tier_error

OPERATIONS = ("read", "write", "probe", "delete", "check", "maintain")
MAX_HANG_SECONDS = 3_600.0
"""Even a hang for ever ends, so that no test leaves a thread behind for good."""


@dataclass(frozen=True, slots=True)
class TierFault:
    """What happens to the operations named. ``after``: how many calls are left alone first; ``times``: how many are hit, None for all.

    ``kind``: "latency" (``seconds`` before the call), "hang" (until released), "unavailable", "corrupt", "vanished", "no_space", or
    "errno": whatever the file tier makes of the error number in ``number``.
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


class FaultyTier(Tier):
    """``inner`` under ``fault``. ``calls`` counts operations by name, ``hanging`` those that hang at this moment."""

    def __init__(self, inner: Tier, sleep: Callable[[float], None] = time.sleep) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities
        self.calls: dict[str, int] = dict.fromkeys(OPERATIONS, 0)
        self.hanging = 0
        self._sleep = sleep
        self._lock = threading.Lock()
        self._fault: TierFault | None = None
        self._seen = 0
        self._released = threading.Event()

    def set_fault(self, fault: TierFault | None) -> None:
        """Replaces the plan; whatever hangs is let go."""
        with self._lock:
            self._released.set()
            self._released = threading.Event()
            self._fault, self._seen = fault, 0

    def _strike(self, operation: str) -> None:
        with self._lock:
            self.calls[operation] += 1
            fault, released = self._fault, self._released
            if fault is None or operation not in fault.operations:
                return
            self._seen += 1
            hit = self._seen > fault.after and (
                fault.times is None or self._seen <= fault.after + fault.times
            )
            if not hit:
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
                f"{self.name}: {operation}, as planned",
            )
        else:
            raise _ERRORS[fault.kind](f"{self.name}: {operation} fails as planned ({fault.kind})")

    def open(self, on_change: OnChange) -> None:
        """Never struck: a daemon under test has to start."""
        self.inner.open(on_change)

    def close(self) -> None:
        """Lets go of what hangs and closes."""
        self.set_fault(None)
        self.inner.close()

    def configure(self, limits: TierLimits) -> None:
        """Passed on."""
        self.inner.configure(limits)

    def contains(self, ref: ObjectRef) -> bool:
        """Passed on."""
        return self.inner.contains(ref)

    def keys(self, namespace: str) -> Iterator[bytes]:
        """Passed on."""
        return self.inner.keys(namespace)

    def usage(self) -> TierUsage:
        """Passed on."""
        return self.inner.usage()

    def touch(self, ref: ObjectRef) -> None:
        """Passed on."""
        self.inner.touch(ref)

    def probe(self, ref: ObjectRef) -> bool:
        """Struck as "probe"."""
        self._strike("probe")
        return self.inner.probe(ref)

    def read(self, ref: ObjectRef, into: memoryview) -> ObjectMeta:
        """Struck as "read"."""
        try:
            self._strike("read")
        except TierCorruptError:
            into[:] = b"\xa5" * into.nbytes
            raise
        return self.inner.read(ref, into)

    def write(self, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> None:
        """Struck as "write"."""
        self._strike("write")
        self.inner.write(ref, payload, meta)

    def delete(self, ref: ObjectRef) -> None:
        """Struck as "delete"."""
        self._strike("delete")
        self.inner.delete(ref)

    def maintain(self) -> None:
        """Struck as "maintain"."""
        self._strike("maintain")
        self.inner.maintain()

    def check(self) -> None:
        """Struck as "check"."""
        self._strike("check")
        self.inner.check()

    def describe_namespace(self, namespace: str, text: str) -> None:
        """Passed on to tiers that keep descriptions."""
        describe = getattr(self.inner, "describe_namespace", None)
        if describe is not None:
            describe(namespace, text)
