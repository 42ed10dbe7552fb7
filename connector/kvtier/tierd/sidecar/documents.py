"""The structural document of a pod's life: the first good one is kept in the run directory and never replaced.

The document comes from an annotation, which anybody who may edit the pod can change; a tierd that was restarted must not build
other tiers over the same pool than the engine was told of.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigurationError
from kvtier.tierd.rundir import replace_atomically
from kvtier.topology.loading import STRUCTURAL_FILE, load_structural
from kvtier.topology.models import Structural
from kvtier.topology.writing import document_text


@dataclass(frozen=True, slots=True)
class First:
    """The document in force and the file that holds it; or ``problem``: why there is none yet."""

    structural: Structural | None
    path: Path
    problem: str = ""


def first_document(topology_directory: Path, run_directory: Path) -> First:
    """What was kept, else what the topology directory holds, which is kept from here on. Never raises for what files hold."""
    kept = run_directory / STRUCTURAL_FILE
    unreadable = ""
    if kept.exists():
        try:
            return First(load_structural(kept), kept)
        except ConfigurationError as error:
            unreadable = f"; what was kept is not readable either: {error}"
    try:
        structural = load_structural(topology_directory / STRUCTURAL_FILE)
    except ConfigurationError as error:
        return First(None, kept, f"{error}{unreadable}")
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        replace_atomically(kept, document_text(structural).encode(), 0o644)
    except OSError as error:
        return First(None, kept, f"the run directory cannot be written: {error}")
    return First(structural, kept)
