"""What a tierd leaves in the run directory for the one after it, beside the pool itself.

::

    slots            the slot table (kvtier/store/records.py)
    namespaces/      <namespace>.json, its canonical text, for each namespace whose objects the table may name

With ``persistence: Process`` there is neither, and what an earlier life left goes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvtier.chunks.namespace import digest
from kvtier.store.records import SlotTable, TableIdentity
from kvtier.tierd.pool import PoolFile
from kvtier.tierd.rundir import open_shared, replace_atomically

TABLE_NAME = "slots"
NAMESPACES_NAME = "namespaces"
_SUFFIX = ".json"

_log = logging.getLogger("kvtier.tierd")


def open_table(run_directory: Path, mode: int, pool: PoolFile, topology: str, persists: bool) -> SlotTable | None:
    """The slot table of this pool with what can be taken over; None where nothing shall be, or the table cannot be had.

    ``topology``: digest of the structural document. Reads the whole table: a thread of its own may do it.
    """
    path = run_directory / TABLE_NAME
    try:
        if not persists:
            path.unlink(missing_ok=True)
            _forget_namespaces(run_directory, set())
            return None
        identity = TableIdentity(pool.bytes, os.stat(pool.path).st_ino, topology)
        descriptor = open_shared(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            table = SlotTable(descriptor, identity, _namespaces(run_directory))
        except OSError:
            os.close(descriptor)
            raise
        _forget_namespaces(run_directory, {record.namespace for record in table.recovered})
    except OSError as error:
        _log.error("%s: %s; what is in RAM will not outlive this process", path, error)
        return None
    if table.recovered or table.refused:
        _log.info("%d objects of the last tierd are in the pool; not taken over: %s", len(table), dict(table.refused))
    return table


def describe_namespace(run_directory: Path, mode: int, namespace: str, text: str) -> None:
    """Notes what a namespace stands for, before an object of it is noted."""
    directory = run_directory / NAMESPACES_NAME
    try:
        directory.mkdir(exist_ok=True)
        replace_atomically(directory / f"{namespace}{_SUFFIX}", text.encode(), mode)
    except OSError as error:
        _log.warning(
            "%s: %s; what is stored in namespace %s does not outlive this process", directory, error, namespace
        )


def _namespaces(run_directory: Path) -> set[str]:
    """Namespaces whose texts are there and are theirs."""
    found = set()
    for path in (run_directory / NAMESPACES_NAME).glob(f"*{_SUFFIX}"):
        try:
            text = path.read_text()
        except (OSError, ValueError) as error:
            _log.warning("%s: %s", path, error)
            continue
        if digest(text) == path.name.removesuffix(_SUFFIX):
            found.add(digest(text))
    return found


def _forget_namespaces(run_directory: Path, but: set[str]) -> None:
    for path in (run_directory / NAMESPACES_NAME).glob(f"*{_SUFFIX}"):
        if path.name.removesuffix(_SUFFIX) not in but:
            path.unlink(missing_ok=True)
