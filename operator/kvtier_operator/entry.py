"""Where the command ``kvtier-operator`` begins: it can be ended before it can do anything else.

The first process of a container is not ended by a signal that it does not handle, and importing the rest takes a second or more.
A pod that is told to go in that time would stay for its whole grace period of half a minute.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (the process's own if None) and returns the exit status."""
    signal.signal(signal.SIGTERM, _end)
    # The event loop's own handler replaces this one.
    # The Kubernetes client looks for a kubeconfig below HOME on import, which fails for a user
    # without a home directory; containers may run as any user.
    os.environ.setdefault("HOME", "/")
    from kvtier_operator import main as command

    return command.main(arguments)


def _end(number: int, frame: FrameType | None) -> None:
    """Nothing has begun that would have to be finished; an exception could be caught by what is being imported."""
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
