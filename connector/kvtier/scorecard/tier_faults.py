"""Storage faults without FUSE: the daemon's file tier is wrapped, and its calls are slow, hang or
fail.

The wrapper sits above the verification of the tier, so it cannot return wrong bytes from storage.
Those faults are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtier.files import replace_file

READ_CALLS = ("every", "open", "read")
WRITE_CALLS = ("every", "create", "write", "mkdir")
NO_SPACE = ("ENOSPC", "EDQUOT", "EROFS")


class UnsupportedFaultError(Exception):
    """The wrapper cannot inject this fault."""


class TierWrapper:
    """Has the interface of ``FaultyMount`` and controls ``kvtier.testing.faulty_tierd``."""

    means = "fault wrapper"

    def __init__(self, control: Path, only: str = "") -> None:
        """``only``: the one volume that fails."""
        self.control = control
        self._only = only

    def set(self, **faults: dict[str, Any]) -> None:
        """Replaces the faults. Raises ``UnsupportedFaultError`` for faults that change bytes."""
        content: dict[str, Any] = {"only": self._only} if self._only else {}
        for operation, calls in (("read", READ_CALLS), ("write", WRITE_CALLS)):
            chosen = next((faults[call] for call in calls if call in faults), None)
            if chosen is not None:
                content[operation] = _translated(chosen)
        if self._only and "write" in content:
            # The probe of a suspended volume.
            content["check"] = content["write"]
        replace_file(self.control, json.dumps(content).encode())

    def close(self) -> None:
        """Removes all faults."""
        self.set()


def _translated(fault: dict[str, Any]) -> dict[str, Any]:
    if "half" in fault or "flip" in fault:
        raise UnsupportedFaultError(
            "storage that returns wrong bytes requires FUSE; the rows on damaged files cover it"
        )
    translated: dict[str, Any] = {
        name: fault[name] for name in ("hang", "delay_seconds") if name in fault
    }
    if "errno" in fault:
        translated["no_space" if fault["errno"] in NO_SPACE else "fail"] = True
    return translated
