"""The payload: the connector as a directory that an engine's ``PYTHONPATH`` can name.

A payload holds what an engine process and the tierd that it starts import, and the metadata by
which vLLM finds the plugin. The command, the scorecard and everything for tests stay out. Nothing
is installed and no package manager runs: the payload needs only packages that a stock engine image
has.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import kvtier

ENTRY_POINTS = "[vllm.general_plugins]\nkvtier = kvtier.engines.vllm.plugin:register\n"
ATOM_DIRECTORY = "kvtier-atom"
"""Directory of the payload that goes before it on the ``PYTHONPATH`` of an ATOM engine."""
SITE_CUSTOMIZE = '''"""Registers KVTier with ATOM (kvtier/engines/common/atom_plugin.py)."""

import importlib.machinery
import importlib.util
import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
others = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if spec is not None and spec.loader is not None:
    # The one of the image, which this one hides.
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
try:
    from kvtier.engines.common.atom_plugin import install

    install()
except ImportError as error:
    print(f"KVTier: not attached: {error}", file=sys.stderr)
'''
NOT_DELIVERED = frozenset({"cli", "harness", "payload", "scorecard", "testing"})
"""Top-level modules of ``kvtier`` that no engine imports."""
_NOT_SOURCE = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def write(directory: Path | str, *, include: Collection[str] = ()) -> Path:
    """Writes the payload into ``directory``, which is created if needed, and returns its absolute
    path.

    An existing payload is replaced; package and metadata are each replaced by one rename.
    ``include`` names modules of ``NOT_DELIVERED`` to deliver all the same, for engines that tests
    drive from the inside. Raises ``OSError``.
    """
    target = Path(directory).absolute()
    target.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".kvtier-", dir=target))
    try:
        _copy_package(staging / "kvtier", NOT_DELIVERED.difference(include))
        metadata = staging / f"kvtier-{kvtier.__version__}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: kvtier\nVersion: {kvtier.__version__}\n"
        )
        (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
        atom = staging / ATOM_DIRECTORY
        atom.mkdir()
        (atom / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
        for other in target.glob("kvtier-*.dist-info"):
            if other.name != metadata.name:
                shutil.rmtree(other)
        _replace_directory(target / "kvtier", staging / "kvtier", staging / "old-package")
        _replace_directory(target / ATOM_DIRECTORY, atom, staging / "old-atom")
        _replace_directory(target / metadata.name, metadata, staging / "old-metadata")
        # Engines run as arbitrary users. The root of a volume is owned by another user and already
        # world-readable.
        mode = target.stat().st_mode
        if mode & 0o055 != 0o055:
            target.chmod(mode | 0o055)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def main() -> int:
    """``python -m kvtier.payload DIR``: works without the packages that the ``kvtier`` command
    needs.
    """
    if len(sys.argv) != 2:
        print("usage: python -m kvtier.payload DIR", file=sys.stderr)
        return 2
    print(write(sys.argv[1]))
    return 0


def _copy_package(target: Path, excluded: Collection[str]) -> None:
    source = Path(kvtier.__file__).parent

    def ignored(directory: str, names: list[str]) -> set[str]:
        skipped = set(_NOT_SOURCE(directory, names))
        if Path(directory) == source:
            skipped |= {name for name in names if name.removesuffix(".py") in excluded}
        return skipped

    shutil.copytree(source, target, ignore=ignored)


def _replace_directory(path: Path, replacement: Path, backup: Path) -> None:
    if path.exists():
        os.replace(path, backup)
    os.replace(replacement, path)


if __name__ == "__main__":
    sys.exit(main())
