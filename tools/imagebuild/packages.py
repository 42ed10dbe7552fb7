"""Third-party packages of an image, as a directory that the Containerfile copies."""

from __future__ import annotations

import email
import shutil
from dataclasses import dataclass
from pathlib import Path

from tools.imagebuild.base import PYTHON, BuildError, run

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = {"amd64": "x86_64-manylinux_2_28", "arm64": "aarch64-manylinux_2_28"}
"""Binary packages by architecture. The base image has a later C library."""
LMCACHE = "payload-lmcache"
NOT_KEPT = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")
INSTALL_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package as installed."""

    name: str
    version: str
    license: str


def install(image: str, architecture: str, target: Path) -> tuple[Package, ...]:
    """Installs ``images/IMAGE.txt`` in the versions of ``constraints.txt``. Raises
    ``BuildError``.
    """
    platform = PLATFORMS.get(architecture)
    if platform is None:
        raise BuildError(f"no packages for {architecture}: must be one of {', '.join(PLATFORMS)}")
    shutil.rmtree(target, ignore_errors=True)
    options = (
        "--quiet",
        # Lists are complete, except for that of the large variant.
        *((f"--override={ROOT / 'overrides.txt'}",) if image == LMCACHE else ("--no-deps",)),
        "--only-binary=:all:",
        "--link-mode=copy",
        "--no-compile-bytecode",
        f"--python-version={PYTHON}",
        f"--python-platform={platform}",
        f"--constraint={ROOT / 'constraints.txt'}",
        f"--requirement={ROOT / 'images' / f'{image}.txt'}",
    )
    command = (ROOT / "tools/uv", "pip", "install", "--target", target)
    run(*command, *options, seconds=INSTALL_SECONDS)
    shutil.rmtree(target / "bin", ignore_errors=True)
    (target / ".lock").unlink(missing_ok=True)
    for path in [*target.rglob("*.pyi"), *target.rglob("*.pyx"), *target.rglob("*.pxd")]:
        path.unlink()
    return tuple(map(_described, sorted(target.glob("*.dist-info"))))


def _described(directory: Path) -> Package:
    """Reads the metadata, and removes what says how it was installed."""
    for name in NOT_KEPT:
        (directory / name).unlink(missing_ok=True)
    found = email.message_from_string((directory / "METADATA").read_text(encoding="utf-8"))
    text = str(found["License-Expression"] or found["License"] or "").strip()
    return Package(str(found["Name"]), str(found["Version"]), text if "\n" not in text else "")
