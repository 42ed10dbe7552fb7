"""A tier daemon whose lower tiers misbehave on demand.

    python -m kvtier.testing.faulty_tierd --topology DIR --faults FILE

Everything is the real daemon; only its lower tiers are wrapped. ``FILE`` is JSON, looked at before every call of a tier, and may be absent
(no faults): ``{"read": {...}, "write": {...}}``, each with any of

* ``fail``: every call raises "unavailable";
* ``fail_after``: so many calls succeed, counted since the file was last replaced, then they raise;
* ``delay_seconds``: calls take that much longer;
* ``hang``: calls end only when the file is replaced by one without this word, and then raise.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtier.errors import TierUnavailableError
from kvtier.tierd.__main__ import main as tierd_main
from kvtier.tiers.base import ObjectMeta, ObjectRef, OnChange, Tier, TierLimits, TierUsage

LOOK_SECONDS = 0.02


class FaultFile:
    """What the file says at this moment. May be used by any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._faults: dict[str, dict[str, Any]] = {}
        self._calls: dict[str, int] = {}

    def of(self, operation: str) -> tuple[dict[str, Any], int]:
        """The faults of an operation, and how many calls of it began since the file was replaced, this one included."""
        with self._lock:
            self._look()
            self._calls[operation] = self._calls.get(operation, 0) + 1
            return self._faults.get(operation, {}), self._calls[operation]

    def hangs(self, operation: str) -> bool:
        """Whether calls of an operation hang."""
        with self._lock:
            self._look()
            return bool(self._faults.get(operation, {}).get("hang"))

    def _look(self) -> None:
        try:
            stat = self._path.stat()
            seen = (stat.st_ino, stat.st_mtime_ns)
            if seen != self._seen:
                self._faults = json.loads(self._path.read_text())
                self._seen, self._calls = seen, {}
        except FileNotFoundError:
            self._seen, self._faults = None, {}


class FaultyTier(Tier):
    """A tier in front of a real one."""

    def __init__(self, inner: Tier, faults: FaultFile) -> None:
        self._inner = inner
        self._faults = faults
        self.name = inner.name
        self.capabilities = inner.capabilities

    def __getattr__(self, name: str) -> Any:
        """What a kind of tier has beyond the contract."""
        return getattr(self._inner, name)

    def _suffer(self, operation: str) -> None:
        faults, call = self._faults.of(operation)
        if faults.get("hang"):
            while self._faults.hangs(operation):
                time.sleep(LOOK_SECONDS)
            raise TierUnavailableError(f"{operation} hung")
        time.sleep(float(faults.get("delay_seconds", 0)))
        if faults.get("fail") or call > int(faults.get("fail_after", call)):
            raise TierUnavailableError(f"{operation} fails on purpose")

    def open(self, on_change: OnChange) -> None:
        """As the real tier."""
        self._inner.open(on_change)

    def close(self) -> None:
        """As the real tier."""
        self._inner.close()

    def configure(self, limits: TierLimits) -> None:
        """As the real tier."""
        self._inner.configure(limits)

    def contains(self, ref: ObjectRef) -> bool:
        """As the real tier."""
        return self._inner.contains(ref)

    def keys(self, namespace: str) -> Iterator[bytes]:
        """As the real tier."""
        return self._inner.keys(namespace)

    def usage(self) -> TierUsage:
        """As the real tier."""
        return self._inner.usage()

    def probe(self, ref: ObjectRef) -> bool:
        """As the real tier."""
        return self._inner.probe(ref)

    def read(self, ref: ObjectRef, into: memoryview) -> ObjectMeta:
        """Suffers, then reads."""
        self._suffer("read")
        return self._inner.read(ref, into)

    def write(self, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> None:
        """Suffers, then writes."""
        self._suffer("write")
        self._inner.write(ref, payload, meta)

    def delete(self, ref: ObjectRef) -> None:
        """As the real tier."""
        self._inner.delete(ref)

    def touch(self, ref: ObjectRef) -> None:
        """As the real tier."""
        self._inner.touch(ref)

    def maintain(self) -> None:
        """As the real tier."""
        self._inner.maintain()

    def check(self) -> None:
        """As the real tier."""
        self._inner.check()


def main() -> int:
    """Runs the daemon; its own options are passed on."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--faults", type=Path, required=True)
    options, rest = parser.parse_known_args()
    faults = FaultFile(options.faults)
    return tierd_main(rest, lambda tier: FaultyTier(tier, faults))


if __name__ == "__main__":
    sys.exit(main())
