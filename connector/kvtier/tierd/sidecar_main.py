"""``python -m kvtier.tierd.sidecar run|drain``: process 1 of the sidecar's container, and what its preStop hook calls.

Exit status of ``run``: 0 it was told to end, 2 wrong usage. Nothing else ends it. Of ``drain``: 0 draining has begun, 1 it could not be asked for.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier import __version__
from kvtier.config.models import HttpEndpoint
from kvtier.tierd.sidecar import SidecarOptions, SidecarSupervisor, request_drain
from kvtier.tierd.tier_factory import DATA_BYTES

LOG_FORMAT = "%(asctime)s %(levelname)s kvtier.sidecar[%(process)d] %(message)s"
TOPOLOGY_DIRECTORY = Path("/etc/kvtier/topology")
RUN_DIRECTORY = Path("/run/kvtier")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="kvtier-sidecar", description="KVTier's tier daemon as a sidecar."
    )
    found.add_argument("--version", action="version", version=__version__)
    commands = found.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run", help="process 1 of the container: starts tierd, and another when it is gone"
    )
    run.add_argument("--topology", type=Path, default=TOPOLOGY_DIRECTORY, metavar="DIR")
    run.add_argument("--run-directory", type=Path, default=RUN_DIRECTORY, metavar="DIR")
    run.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="/status and /metrics want the bearer token that it holds",
    )
    run.add_argument(
        "--data-bytes",
        type=_positive,
        default=DATA_BYTES,
        metavar="N",
        help="what tierd may allocate beside the pool",
    )
    run.add_argument(
        "--port",
        type=int,
        default=HttpEndpoint().port,
        metavar="N",
        help="where to answer while there is no document",
    )
    run.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    drain = commands.add_parser(
        "drain", help="for preStop: takes no more stores, writes what is pending"
    )
    drain.add_argument("--run-directory", type=Path, default=RUN_DIRECTORY, metavar="DIR")
    return found


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise ValueError(text)
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    given = parser().parse_args(arguments)
    level = getattr(given, "log_level", "info").upper()
    logging.basicConfig(level=level, format=LOG_FORMAT, stream=sys.stderr)
    if given.command == "drain":
        try:
            request_drain(given.run_directory)
        except OSError as error:
            logging.getLogger("kvtier.sidecar").error("draining cannot be asked for: %s", error)
            return 1
        return 0
    return SidecarSupervisor(
        SidecarOptions(
            topology_directory=given.topology.absolute(),
            run_directory=given.run_directory.absolute(),
            token_file=None if given.token_file is None else given.token_file.absolute(),
            data_bytes=given.data_bytes,
            port=given.port,
            log_level=given.log_level,
        )
    ).run()


if __name__ == "__main__":
    sys.exit(main())
