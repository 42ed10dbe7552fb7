"""Putting a whole file in its place: written in the writer's own directory, within a grant, then renamed.

A writer that was given up has no directory any more, so what it was writing cannot appear afterwards. The rename finds out whether the place's
directory is there; only where it is not, directories are made, and charged.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from kvtier.errors import TierNoSpaceError
from kvtier.tiers.filesystem.allowance import Taken
from kvtier.tiers.filesystem.direct import GONE
from kvtier.tiers.filesystem.keeper import Keeper
from kvtier.tiers.filesystem.layout import DIRECTORY_BYTES, Modes, make_directory

_ATTEMPTS = 4
"""Directories are removed when they are empty, by the janitor, at any moment: making and using one may have to be done again."""


def place(keeper: Keeper, root: Path, path: str, size_bytes: int, modes: Modes, write: Callable[[str], None]) -> None:
    """Has ``write`` make a file of ``size_bytes`` under a temporary name, and renames it to ``path`` below ``root``.

    Raises ``TierError`` and ``OSError``; then nothing is at ``path`` that was not there before.
    """
    taken = keeper.obtain(size_bytes)
    temporary = keeper.writer.working_path()
    used = size_bytes
    try:
        write(temporary)
        _rename(keeper, taken, root, temporary, path, modes)
    except BaseException as error:
        try:
            os.unlink(temporary)
            used = 0
        except FileNotFoundError:
            used = 0
        except OSError:
            # It is still there, and stays charged until a count or the end of this writer.
            pass
        if isinstance(error, OSError) and error.errno in GONE and not os.path.isdir(os.path.dirname(temporary)):
            _lost(keeper, root)
        raise
    finally:
        keeper.allowance.spend(taken, used)


def _lost(keeper: Keeper, root: Path) -> None:
    if not os.path.isdir(root):
        raise OSError(errno.ESTALE, "the tier's directory has vanished", str(root))
    keeper.wake()
    raise TierNoSpaceError(f"{root}: this process was taken for dead, and its grant has ended")


def _rename(keeper: Keeper, taken: Taken, root: Path, temporary: str, path: str, modes: Modes) -> None:
    for attempt in range(_ATTEMPTS):
        if not keeper.may_rename(taken):
            raise TierNoSpaceError(f"{root}: the grant ended before the file was whole")
        try:
            os.rename(temporary, path)
            return
        except OSError as error:
            if error.errno not in GONE or attempt == _ATTEMPTS - 1 or not os.path.exists(temporary):
                raise
        _make_directories(keeper, root, Path(path).parent, modes)


def _make_directories(keeper: Keeper, root: Path, directory: Path, modes: Modes) -> None:
    """Makes what is missing between ``root``, which must be there, and ``directory``."""
    below = directory.relative_to(root).parts
    taken = keeper.obtain(len(below) * DIRECTORY_BYTES)
    made = 0
    try:
        for count in range(1, len(below) + 1):
            with contextlib.suppress(FileNotFoundError):
                made += make_directory(root.joinpath(*below[:count]), modes)
    finally:
        keeper.allowance.spend(taken, made * DIRECTORY_BYTES)
