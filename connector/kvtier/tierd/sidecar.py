"""``kvtier-sidecar run|drain``, also ``python -m kvtier.tierd.sidecar``: process 1 of the sidecar's
container, and its preStop hook.

Exit status of ``run``: 0 after SIGTERM or SIGINT, 2 for wrong usage; nothing else ends it. Of
``drain``: 0 if draining was requested, 1 if it could not be.

Only ``main`` imports the rest of the package, after it has installed a handler for SIGTERM. The
kernel does not deliver a signal without a handler to process 1 of a container, and the imports take
a moment: a pod that is deleted in that moment would otherwise stay for its whole grace period.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

LOG_FORMAT = "%(asctime)s %(levelname)s kvtier.sidecar[%(process)d] %(message)s"
TOPOLOGY_DIRECTORY = Path("/etc/kvtier/topology")
RUN_DIRECTORY = Path("/run/kvtier")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with ``arguments`` (default: sys.argv); returns the exit status."""
    # The supervisor replaces this handler with its own.
    signal.signal(signal.SIGTERM, _exit)
    from kvtier.tierd.sidecar_supervisor import SidecarOptions, SidecarSupervisor, request_drain

    given = parser().parse_args(arguments)
    level = getattr(given, "log_level", "info").upper()
    logging.basicConfig(level=level, format=LOG_FORMAT, stream=sys.stderr)
    if given.command == "drain":
        try:
            request_drain(given.run_directory)
        except OSError as error:
            logging.getLogger("kvtier.sidecar").error("cannot request draining: %s", error)
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


def _exit(number: int, frame: FrameType | None) -> None:
    """Nothing has been started yet. An exception could be caught by a module that is being
    imported."""
    os._exit(0)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    from kvtier import __version__
    from kvtier.config.models import HttpEndpoint
    from kvtier.tierd.tier_factory import DATA_BYTES

    found = argparse.ArgumentParser(
        prog="kvtier-sidecar", description="Runs KVTier's tier daemon as a sidecar container."
    )
    found.add_argument("--version", action="version", version=__version__)
    commands = found.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run", help="run as process 1 of the container: start tierd and restart it when it exits"
    )
    run.add_argument(
        "--topology",
        type=Path,
        default=TOPOLOGY_DIRECTORY,
        metavar="DIR",
        help="directory with structural.json and live.json (default: %(default)s)",
    )
    _add_run_directory(run)
    run.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the bearer token that /status and /metrics require",
    )
    run.add_argument(
        "--data-bytes",
        type=_positive,
        default=DATA_BYTES,
        metavar="N",
        help="memory limit of tierd in bytes, not counting the host pool (default: %(default)s)",
    )
    run.add_argument(
        "--port",
        type=int,
        default=HttpEndpoint().port,
        metavar="N",
        help="HTTP port until the structural document is available (default: %(default)s)",
    )
    run.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    drain = commands.add_parser(
        "drain", help="preStop hook: reject new stores and write pending stores"
    )
    _add_run_directory(drain)
    return found


def _add_run_directory(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--run-directory",
        type=Path,
        default=RUN_DIRECTORY,
        metavar="DIR",
        help="run directory, shared with the engine (default: %(default)s)",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())
