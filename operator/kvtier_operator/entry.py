"""The entry point of ``kvtier-operator``: handles SIGTERM before anything else is imported.

The first process of a container ignores a signal without a handler, and imports take a second or
more. Without this handler, a pod that is deleted during that time would stay for its whole
termination grace period.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns the exit status. ``arguments``: those of the process if None."""
    signal.signal(signal.SIGTERM, _end)
    # The event loop replaces this handler once it runs.

    # The Kubernetes client determines the home directory on import, which fails for a user without
    # one. Containers may run as any user.
    os.environ.setdefault("HOME", "/")
    from kvtier_operator import main as command

    return command.main(arguments)


def _end(number: int, frame: FrameType | None) -> None:
    """Exits at once: nothing needs cleanup yet. An exception could be caught during an import."""
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
