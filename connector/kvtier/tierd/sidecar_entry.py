"""Where the command ``kvtier-sidecar`` begins: it can be ended before it can do anything else.

Process 1 of a container is not ended by a signal that it does not handle, and importing the rest takes a moment. A pod that is deleted in that
moment would stay for its whole grace period.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with ``arguments`` (the process's own if None) and returns the exit status."""
    signal.signal(signal.SIGTERM, _end)
    # Once it keeps a tierd, its own handler takes this one's place.
    from kvtier.tierd.sidecar_main import main as command

    return command(arguments)


def _end(number: int, frame: FrameType | None) -> None:
    """Nothing has begun that would have to be finished; an exception could be caught by what is being imported."""
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
