"""The connector as a directory that an engine's PYTHONPATH can name: the package, and the metadata by which vLLM finds
its plugin.

Nothing is installed and no package manager is asked; what is written depends only on what engines' images hold already.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import kvtier

ENTRY_POINTS = "[vllm.general_plugins]\nkvtier = kvtier.engines.vllm.plugin:register\n"
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def write(directory: Path | str) -> Path:
    """Writes the payload into ``directory`` (made if needed) and returns it, absolute.

    A payload that is there is replaced, package and metadata each by one rename. Raises ``OSError``.
    """
    target = Path(directory).absolute()
    target.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".kvtier-", dir=target))
    try:
        shutil.copytree(Path(kvtier.__file__).parent, staging / "kvtier", ignore=_LEFT_OUT)
        metadata = staging / f"kvtier-{kvtier.__version__}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: kvtier\nVersion: {kvtier.__version__}\n"
        )
        (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
        for other in target.glob("kvtier-*.dist-info"):
            if other.name != metadata.name:
                shutil.rmtree(other)
        _replace(staging / "kvtier", target / "kvtier", staging / "old-package")
        _replace(metadata, target / metadata.name, staging / "old-metadata")
        # Engines run as other users. A volume's root belongs to somebody else and is open to all already.
        mode = target.stat().st_mode
        if mode & 0o055 != 0o055:
            target.chmod(mode | 0o055)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _replace(new: Path, path: Path, old: Path) -> None:
    if path.exists():
        os.replace(path, old)
    os.replace(new, path)


def main() -> int:
    """``python -m kvtier.payload DIR``: for images without the command line's packages."""
    if len(sys.argv) != 2:
        print("usage: python -m kvtier.payload DIR", file=sys.stderr)
        return 2
    print(write(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
