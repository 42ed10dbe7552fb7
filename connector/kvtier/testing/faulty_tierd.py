"""A tier daemon whose secondary tiers fail on demand.

    python -m kvtier.testing.faulty_tierd --topology DIR --faults FILE

Everything is the real daemon; only its secondary tiers are wrapped. ``FILE`` is JSON, is read
before every call of a tier and may be absent (no faults): ``{"read": {...}, "write": {...}}``, with
``"only": NAME`` for a single tier or volume of a tier. Each operation has any of

* ``fail``: every call raises "unavailable"; ``no_space``: it raises "no space";
* ``fail_after``: that many calls since the file was last replaced succeed, later ones raise;
* ``delay_seconds``: every call takes that much longer, or with ``delay_after`` every one after
  that many since the file was last replaced;
* ``hang``: calls hang until the file is replaced by one without this key, and then raise.
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

POLL_SECONDS = 0.02


class FaultFile:
    """The current content of the control file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._faults: dict[str, Any] = {}
        self._calls: dict[str, int] = {}

    def of(self, operation: str) -> tuple[dict[str, Any], int]:
        """The faults of an operation, and the number of its calls since the file was replaced,
        including this one.
        """
        with self._lock:
            self._reload()
            self._calls[operation] = self._calls.get(operation, 0) + 1
            return self._faults.get(operation, {}), self._calls[operation]

    def concerns(self, name: str) -> bool:
        """Whether the faults are those of the tier or volume of this name."""
        with self._lock:
            self._reload()
            return self._faults.get("only", name) == name

    def hangs(self, operation: str) -> bool:
        """Whether calls of the operation hang."""
        with self._lock:
            self._reload()
            return bool(self._faults.get(operation, {}).get("hang"))

    def _reload(self) -> None:
        try:
            stat = self._path.stat()
            seen = (stat.st_ino, stat.st_mtime_ns)
            if seen != self._seen:
                self._faults = json.loads(self._path.read_text())
                self._seen, self._calls = seen, {}
        except FileNotFoundError:
            self._seen, self._faults = None, {}


class FileControlledTier(FaultyTier):
    """A tier of a daemon with the faults of a control file."""

    def __init__(self, inner: Tier, faults: FaultFile) -> None:
        super().__init__(inner)
        self._faults = faults

    def _inject(self, operation: str) -> None:
        if not self._faults.concerns(self.name):
            return
        faults, call = self._faults.of(operation)
        if faults.get("hang"):
            while self._faults.hangs(operation):
                time.sleep(POLL_SECONDS)
            raise TierUnavailableError(f"{operation} hung (injected)")
        if call > int(faults.get("delay_after", 0)):
            time.sleep(float(faults.get("delay_seconds", 0)))
        if faults.get("no_space"):
            raise TierNoSpaceError(f"no space for {operation} (injected)")
        if faults.get("fail") or call > int(faults.get("fail_after", call)):
            raise TierUnavailableError(f"{operation} failed (injected)")


def main() -> int:
    """Runs the daemon; its own options are passed on."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--faults", type=Path, required=True)
    options, rest = parser.parse_known_args()
    faults = FaultFile(options.faults)
    return tierd_main(rest, lambda tier: FileControlledTier(tier, faults))


if __name__ == "__main__":
    sys.exit(main())
