"""A copy of ATOM's source for tests: named by a variable, kept in the user's cache, or fetched.

Nothing of it is part of this repository. The fetched commit is pinned by its hash, which git
verifies, and is kept in the user's cache directory under that hash.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "KVTIER_ATOM_SOURCE"
"""A directory with the package ``atom``, or a git repository of it. ``off``: no copy is used."""
REPOSITORY = "https://github.com/ROCm/ATOM.git"
COMMIT = "ffdf3bb5ddf8a15a64d521a2eeb3bc7438f9ac21"
MARKER = Path("atom", "model_engine", "scheduler.py")
FETCH_SECONDS = 45.0


class SourceUnavailableError(Exception):
    """No copy of ATOM's source can be had; the message says why."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """``cache``: the directory of fetched copies. ``seconds``: the deadline of a fetch."""

    cache: Path
    repository: str = REPOSITORY
    commit: str = COMMIT
    seconds: float = FETCH_SECONDS


def default_options() -> SourceOptions:
    """Returns the pinned commit, in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME", "") or str(Path.home() / ".cache")
    return SourceOptions(Path(home) / "kvtier" / "atom")


def atom_source(scratch: Path, options: SourceOptions | None = None) -> Path:
    """Returns a directory with the package ``atom``. Raises ``SourceUnavailableError``.

    ``scratch``: an empty directory, for the working tree of a repository that the variable names.
    """
    given = os.environ.get(VARIABLE, "").strip()
    if given == "off":
        raise SourceUnavailableError(f"{VARIABLE}=off")
    if given:
        return _given(Path(given), scratch)
    return _cached(options or default_options())


def _given(path: Path, scratch: Path) -> Path:
    if (path / MARKER).is_file():
        return path
    try:
        _unpack(path, "HEAD", scratch, time.monotonic() + FETCH_SECONDS)
    except SourceUnavailableError as error:
        raise SourceUnavailableError(
            f"{VARIABLE}: {path} holds neither the package nor a repository of it: {error}"
        ) from error
    return scratch


def _cached(options: SourceOptions) -> Path:
    """The pinned commit, fetched once. Processes that fetch it at the same time share the copy."""
    kept = options.cache / options.commit
    if (kept / MARKER).is_file():
        return kept
    if shutil.which("git") is None:
        raise SourceUnavailableError("git is not installed")
    try:
        options.cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="fetch-", dir=options.cache))
    except OSError as error:
        raise SourceUnavailableError(f"no cache directory: {error}") from error
    try:
        _fetch(options, work)
        # It fails if another process was faster: its copy is the same commit.
        with contextlib.suppress(OSError):
            (work / "tree").rename(kept)
    except OSError as error:
        raise SourceUnavailableError(f"{options.cache}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not (kept / MARKER).is_file():
        raise SourceUnavailableError(f"{kept} is no copy of ATOM's source: remove it")
    return kept


def _fetch(options: SourceOptions, work: Path) -> None:
    """Writes the commit's package to ``work / "tree"``."""
    deadline = time.monotonic() + options.seconds
    repository, tree = work / "repository", work / "tree"
    _run(["git", "init", "--quiet", "--bare", str(repository)], deadline)
    fetch = ["git", "-C", str(repository), "fetch", "--quiet", "--depth", "1", "--no-tags"]
    _run([*fetch, options.repository, options.commit], deadline)
    tree.mkdir()
    _unpack(repository, options.commit, tree, deadline)


def _unpack(repository: Path, commit: str, tree: Path, deadline: float) -> None:
    archive = tree.parent / f"{tree.name}.tar"
    command = ["git", "-C", str(repository), "archive", "--format", "tar", "--output", str(archive)]
    try:
        _run([*command, commit, "atom"], deadline)
        _run(["tar", "-x", "-f", str(archive), "-C", str(tree)], deadline)
    finally:
        archive.unlink(missing_ok=True)
    if not (tree / MARKER).is_file():
        raise SourceUnavailableError(f"commit {commit} has no {MARKER}")


def _run(command: Sequence[str], deadline: float) -> None:
    """Runs a command, which never asks for a password. At the deadline its processes are killed."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "", "LC_ALL": "C"}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise SourceUnavailableError(f"{command[0]}: not ended within the deadline") from error
    if process.returncode:
        said = errors.strip().splitlines()
        reason = said[-1] if said else f"{command[0]} ended with {process.returncode}"
        raise SourceUnavailableError(reason)
