"""Entry point of the ``kvtier`` command.

Exit status: 0 success, 2 invalid input (a document, an option, a field), 1 any other error. The
commands ``verify``, ``faults``, ``plan`` and ``doctor`` document theirs. As ``kubectl-kvtier`` it
is a plug-in of kubectl: ``kubectl kvtier top``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvtier.errors import KVTierError

MISSING_PACKAGES = "the kvtier command needs packages that are not installed: install kvtier[cli]"
COMMAND_PACKAGES = "this command needs packages that are not installed: install kvtier[tierd]"
PLUGIN = "kubectl-kvtier"
OWN_PACKAGES = ("kvtier", "kvtier_operator")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit status. ``arguments`` default to the process's own."""
    try:
        from typer.main import get_command

        from kvtier.cli.app import app
        from kvtier.cli.inputs import CommandError
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in OWN_PACKAGES:
            raise
        print(f"{MISSING_PACKAGES} ({error})", file=sys.stderr)
        return 1
    try:
        get_command(app).main(args=arguments, prog_name=_program_name())
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in OWN_PACKAGES:
            raise
        print(f"kvtier: {COMMAND_PACKAGES} ({error})", file=sys.stderr)
        return 1
    except CommandError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 1
    except KVTierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 1
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


def _program_name() -> str:
    """As the user called it, for usage texts."""
    return "kubectl kvtier" if Path(sys.argv[0]).name == PLUGIN else "kvtier"


if __name__ == "__main__":
    sys.exit(main())
