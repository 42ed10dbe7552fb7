"""The files that a killed tierd leaves in a run directory, for tests that modify them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvtier.store.slot_table import HEADER_BYTES, SlotRecord, SlotTable, TableIdentity
from kvtier.tierd.host_pool import TABLE_NAME
from kvtier.tierd.wire import POOL_NAME


def records(run_directory: Path) -> list[SlotRecord]:
    """The objects that the slot table names, oldest first. Changes nothing."""
    data = (run_directory / TABLE_NAME).read_bytes()
    header = data[:HEADER_BYTES]
    document = json.loads(header[header.index(b"{") : header.index(b"}") + 1])
    identity = TableIdentity(document["poolBytes"], document["poolInode"], document["topology"])
    copy = os.memfd_create("slots")
    os.write(copy, data)
    table = SlotTable(copy, identity)
    try:
        return table.recovered
    finally:
        table.close()


def flip(run_directory: Path, record: SlotRecord, position: int = 0) -> None:
    """One bit of this object's bytes in the pool is not what it was."""
    with (run_directory / POOL_NAME).open("r+b") as pool:
        pool.seek(record.offset + position)
        byte = pool.read(1)[0]
        pool.seek(record.offset + position)
        pool.write(bytes([byte ^ 1]))
