"""A tier daemon whose lower tiers misbehave on demand.

    python -m kvtier.testing.faulty_tierd --topology DIR --faults FILE

Everything is the real daemon; only its lower tiers are wrapped. ``FILE`` is JSON, looked at before every call of a tier, and may be absent
(no faults): ``{"read": {...}, "write": {...}}``, each with any of

* ``fail``: every call raises "unavailable"; ``no_space``: it raises "no space";
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
from pathlib import Path
from typing import Any

from kvtier.errors import TierNoSpaceError, TierUnavailableError
from kvtier.testing.faulty_tier import FaultyTier
from kvtier.tierd.__main__ import main as tierd_main
from kvtier.tiers.base import Tier

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


class FileControlledTier(FaultyTier):
    """A real tier of a daemon, struck as the file says. ``read`` and ``write`` may be named there."""

    def __init__(self, inner: Tier, faults: FaultFile) -> None:
        super().__init__(inner)
        self._faults = faults

    def _strike(self, operation: str) -> None:
        faults, call = self._faults.of(operation)
        if faults.get("hang"):
            while self._faults.hangs(operation):
                time.sleep(LOOK_SECONDS)
            raise TierUnavailableError(f"{operation} hung")
        time.sleep(float(faults.get("delay_seconds", 0)))
        if faults.get("no_space"):
            raise TierNoSpaceError(f"{operation} finds no space on purpose")
        if faults.get("fail") or call > int(faults.get("fail_after", call)):
            raise TierUnavailableError(f"{operation} fails on purpose")


def main() -> int:
    """Runs the daemon; its own options are passed on."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--faults", type=Path, required=True)
    options, rest = parser.parse_known_args()
    faults = FaultFile(options.faults)
    return tierd_main(rest, lambda tier: FileControlledTier(tier, faults))


if __name__ == "__main__":
    sys.exit(main())
