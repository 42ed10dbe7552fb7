"""Writes the topology directory, one whole file at a time."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from kvtier.config.loader import LIVE_FILE, STRUCTURAL_FILE
from kvtier.config.models import Live, Topology
from kvtier.files import replace_file


def document_text(document: BaseModel) -> str:
    """The content of a document's file: JSON in the models' field order, so that equal documents
    have equal bytes."""
    return document.model_dump_json(by_alias=True, indent=2) + "\n"


def write(directory: Path | str, topology: Topology) -> None:
    """Writes both files atomically, making the directory if needed. Raises ``OSError``."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    write_live(target, topology.live)
    replace_file(target / STRUCTURAL_FILE, document_text(topology.structural).encode())


def write_live(directory: Path | str, live: Live) -> None:
    """Replaces ``live.json``. Raises ``OSError``."""
    replace_file(Path(directory) / LIVE_FILE, document_text(live).encode())
