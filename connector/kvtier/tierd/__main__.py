"""``kvtier-tierd``, also ``python -m kvtier.tierd``: runs one tierd until it is stopped or no
engine needs it.

Exit status: 0 stopped, 1 cannot serve (see the log), 2 wrong usage, 3 another tierd runs in the run
directory.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier import __version__
from kvtier.errors import KVTierError
from kvtier.processes import ProcessIdentity, pid_namespace
from kvtier.tierd.daemon import DRAIN_SECONDS, EXIT_CANNOT_SERVE, DaemonOptions, TierDaemon
from kvtier.tierd.tier_factory import WrapTier

TOKEN_VARIABLE = "KVTIER_TOKEN_FILE"  # noqa: S105  (a name)
"""For a tierd that an engine starts in a pod, whose command line cannot be set."""
LOG_FORMAT = "%(asctime)s %(levelname)s kvtier.tierd[%(process)d] %(message)s"


def parser() -> argparse.ArgumentParser:
    """The daemon's command line."""
    found = argparse.ArgumentParser(prog="kvtier-tierd", description="Runs KVTier's tier daemon.")
    found.add_argument(
        "--topology",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory with structural.json and live.json",
    )
    found.add_argument(
        "--run-directory",
        type=Path,
        metavar="DIR",
        help="run directory (default: the one in the structural document)",
    )
    found.add_argument(
        "--spawned-by-engine", action="store_true", help="exit once no engine is attached"
    )
    found.add_argument(
        "--spawner",
        type=_process,
        metavar="PID:START",
        help="process that started tierd: its id, and its start time in clock ticks since boot",
    )
    found.add_argument(
        "--structural",
        type=Path,
        metavar="FILE",
        help="structural document (default: structural.json in the topology directory)",
    )
    found.add_argument(
        "--token-file",
        type=Path,
        default=os.environ.get(TOKEN_VARIABLE) or None,
        metavar="FILE",
        help="file with the bearer token that /status and /metrics require "
        f"(default: ${TOKEN_VARIABLE})",
    )
    found.add_argument(
        "--data-bytes",
        type=int,
        metavar="N",
        help="memory limit in bytes, not counting the host pool (default: no limit)",
    )
    found.add_argument(
        "--drain-seconds",
        type=float,
        default=DRAIN_SECONDS,
        metavar="S",
        help="seconds for writing pending stores at shutdown (default: %(default)s)",
    )
    found.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    found.add_argument("--version", action="version", version=__version__)
    return found


def _process(text: str) -> ProcessIdentity:
    pid, _, start = text.partition(":")
    return ProcessIdentity(int(pid), int(start), pid_namespace())


def run(options: DaemonOptions) -> int:
    """Runs a daemon in this process, whose main thread this must be; returns the exit status."""
    try:
        daemon = TierDaemon(options)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: daemon.stop())
        signal.signal(signal.SIGUSR1, lambda *_: daemon.drain())
        return daemon.run()
    except (KVTierError, OSError) as error:
        logging.getLogger("kvtier.tierd").error("%s", error)
        return EXIT_CANNOT_SERVE


def main(arguments: Sequence[str] | None = None, wrap_tier: WrapTier | None = None) -> int:
    """Runs the command. ``wrap_tier`` wraps each secondary tier (``kvtier.testing``)."""
    given = parser().parse_args(arguments)
    logging.basicConfig(level=given.log_level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    return run(
        DaemonOptions(
            topology_directory=given.topology.absolute(),
            run_directory=None if given.run_directory is None else given.run_directory.absolute(),
            spawned_by_engine=given.spawned_by_engine,
            spawner=given.spawner,
            wrap_tier=wrap_tier,
            drain_seconds=given.drain_seconds,
            structural=None if given.structural is None else given.structural.absolute(),
            token_file=None if given.token_file is None else given.token_file.absolute(),
            data_bytes=given.data_bytes,
            owns_process=True,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
