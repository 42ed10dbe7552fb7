"""A tier daemon whose wall clock is offset by the content of a file, which is read at every call:
``--skew FILE`` (seconds as text; no file: 0).

``--faults FILE`` wraps its secondary tiers as ``kvtier.testing.faulty_tierd`` does."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main() -> int:
    """Runs the daemon; its own options are passed on."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--skew", type=Path, required=True)
    parser.add_argument("--faults", type=Path)
    options, rest = parser.parse_known_args()
    real, real_ns = time.time, time.time_ns

    def skew() -> float:
        try:
            return float(options.skew.read_text())
        except (OSError, ValueError):
            return 0.0

    # Before any import of KVTier: default arguments are bound at import.
    time.time = lambda: real() + skew()
    time.time_ns = lambda: real_ns() + int(skew() * 1e9)
    from kvtier.tierd.__main__ import main as tierd_main

    if options.faults is None:
        return tierd_main(rest)
    from kvtier.testing.faulty_tierd import FaultFile, FileControlledTier

    faults = FaultFile(options.faults)
    return tierd_main(rest, lambda tier: FileControlledTier(tier, faults))


if __name__ == "__main__":
    sys.exit(main())
