"""Commands for the directories of a file tier, when it has several volumes.

A volume that cannot be read does not keep the command from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.text import Text

from kvtier.cli.console import console, error_console, print_json
from kvtier.cli.directory import size_text
from kvtier.errors import KVTierError

Found = TypeVar("Found")


def each_directory(
    directories: Sequence[Path],
    run: Callable[[Path], Found],
    to_json: Callable[[Found], dict[str, Any]] | None,
    show: Callable[[Found], None],
) -> tuple[list[Found], int]:
    """Runs a command for each directory, and prints its results. ``to_json``: None for people.

    Returns the results, and how many directories failed. Of a single directory the error is raised
    as it is, and its JSON is the whole output.
    """
    found: list[Found] = []
    documents: list[dict[str, Any]] = []
    failed = 0
    for directory in directories:
        try:
            result = run(directory)
        except (KVTierError, OSError) as error:
            if len(directories) == 1:
                raise
            failed += 1
            documents.append({"directory": str(directory), "error": str(error)})
            error_console().print(Text(f"{directory}: {error}", style="red"))
            continue
        found.append(result)
        if to_json is not None:
            documents.append({"directory": str(directory), **to_json(result)})
            continue
        if len(directories) > 1:
            console().print(Text(f"\n{directory}", style="bold"))
        show(result)
    if to_json is not None:
        single = len(directories) == 1
        print_json(to_json(found[0]) if single else {"directories": documents})
    return found, failed


def show_shares(sizes: Sequence[int]) -> None:
    """Prints how the bytes of a tier are divided among its volumes."""
    whole = sum(sizes)
    if len(sizes) > 1 and whole:
        shares = ", ".join(f"{100 * size / whole:.0f}%" for size in sizes)
        console().print(Text(f"\n{len(sizes)} volumes: {size_text(whole)}, shares {shares}"))
