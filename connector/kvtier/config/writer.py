"""Writing the topology directory, whole files at a time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pydantic import BaseModel

from kvtier.config.loader import LIVE_FILE, STRUCTURAL_FILE
from kvtier.config.models import Live, Topology


def document_text(document: BaseModel) -> str:
    """A document as its file holds it: JSON, fields in the models' order, so that equal documents are equal bytes."""
    return document.model_dump_json(by_alias=True, indent=2) + "\n"


def write(directory: Path | str, topology: Topology) -> None:
    """Writes both files, making the directory if needed. A reader sees the old or the new file, never a half. Raises
    ``OSError``.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    write_live(target, topology.live)
    replace_file(target / STRUCTURAL_FILE, document_text(topology.structural).encode())


def write_live(directory: Path | str, live: Live) -> None:
    """Replaces ``live.json``. Raises ``OSError``."""
    replace_file(Path(directory) / LIVE_FILE, document_text(live).encode())


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file beside ``path`` and renames it over it, readable by all. Raises ``OSError``."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
