"""``kvtier-operator``: the command of the operator's image."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command."""
    sys.stderr.write("kvtier-operator: controller and webhook are not part of this build\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
