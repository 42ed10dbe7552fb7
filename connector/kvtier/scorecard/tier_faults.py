"""Storage faults where no FUSE mount can be had: the daemon's own file tier is wrapped, and calls of it are late, hang or fail.

What a wrapper cannot be is storage that lies: it sits above the verification that has to find that out. Those faults are not played.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

READ_CALLS = ("every", "open", "read")
WRITE_CALLS = ("every", "create", "write", "mkdir")
NO_SPACE = ("ENOSPC", "EDQUOT", "EROFS")


class CannotPlayError(Exception):
    """The wrapper has no such fault."""


class TierWrapper:
    """Takes the words of ``FaultyMount.set`` and writes those of ``kvtier.testing.faulty_tierd.FaultFile``."""

    means = "fault wrapper"

    def __init__(self, control: Path) -> None:
        self.control = control

    def set(self, **faults: dict[str, Any]) -> None:
        """Replaces what goes wrong. Raises ``CannotPlayError`` for bytes that are to be changed."""
        content = {}
        for operation, calls in (("read", READ_CALLS), ("write", WRITE_CALLS)):
            chosen = next((faults[call] for call in calls if call in faults), None)
            if chosen is not None:
                content[operation] = _translated(chosen)
        fresh = self.control.with_suffix(".new")
        fresh.write_text(json.dumps(content))
        fresh.replace(self.control)

    def close(self) -> None:
        """Lets everything go."""
        self.set()


def _translated(fault: dict[str, Any]) -> dict[str, Any]:
    if "half" in fault or "flip" in fault:
        raise CannotPlayError(
            "storage that gives other bytes needs FUSE; the rows on damaged files do the same to files"
        )
    words: dict[str, Any] = {
        name: fault[name] for name in ("hang", "delay_seconds") if name in fault
    }
    if "errno" in fault:
        words["no_space" if fault["errno"] in NO_SPACE else "fail"] = True
    return words
