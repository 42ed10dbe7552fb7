"""Builds images from ``images/*.Containerfile`` with buildah, without a daemon or a registry."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.imagebuild import base, packages, sbom
from tools.imagebuild.base import BuildError, run
from tools.imagebuild.packages import ROOT, Package

IMAGES = ("operator", "payload")
NEEDED = {"buildah": "buildah", "mmdebstrap": "mmdebstrap", "dpkg-deb": "dpkg"}
"""Debian package by command."""
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
BASE = "localhost/kvtier-base"
BUILD_SECONDS = 3600
KEPT = 7 * 24 * 3600.0
"""Seconds after which the base image is built again, with newer Debian packages."""


@dataclass(frozen=True, slots=True)
class Built:
    """``digest``: of the manifest, as a registry computes it. ``archive``: an OCI archive."""

    name: str
    architecture: str
    digest: str
    archive: Path


def missing() -> str:
    """Why images cannot be built on this machine; empty if they can."""
    if os.geteuid() != 0:
        return "images are built as root (buildah with chroot isolation)"
    lacking = [package for command, package in NEEDED.items() if shutil.which(command) is None]
    return f"missing Debian packages: {' '.join(lacking)}" if lacking else ""


def own_architecture() -> str:
    """The architecture of this machine, as images name it."""
    machine = platform.machine()
    return MACHINES.get(machine, machine)


def cache_directory() -> Path:
    """What is kept between builds, outside of the checkout."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvtier" / "images"


def _base_key() -> str:
    """What the base image depends on in this checkout."""
    return hashlib.sha256(Path(base.__file__).read_bytes()).hexdigest()


class Builder:
    """Builds into ``out``. ``home`` holds everything that is only needed while building."""

    def __init__(self, home: Path, out: Path, tag: str, repository: str) -> None:
        self._home, self._out = home, out
        self._tag, self._repository = tag, repository
        self._debian: dict[str, tuple[base.Debian, ...]] = {}
        home.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)

    def reference(self, name: str) -> str:
        """The name of an image."""
        return f"{self._repository}/{name}:{self._tag}"

    def base(self, architecture: str) -> str:
        """The name of the base image in buildah's store. It is built if there is none, or if it is
        a week old and the packages can be downloaded. Raises ``BuildError``.
        """
        name = f"{BASE}:{architecture}"
        if architecture in self._debian:
            return name
        kept = self._kept_base(architecture)
        if kept is not None and time.time() - self._record(architecture).stat().st_mtime < KEPT:
            self._debian[architecture] = kept
            return name
        try:
            found = base.build(architecture, self._home)
        except BuildError:
            if kept is None:
                raise
            self._debian[architecture] = kept
            return name
        context = self._home / f"context-{architecture}"
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir()
        found.archive.rename(context / "root.tar")
        (context / "Containerfile").write_text("FROM scratch\nADD root.tar /\n")
        self._bud(name, architecture, context / "Containerfile", context)
        shutil.rmtree(context)
        record = {"key": _base_key(), "packages": [asdict(each) for each in found.packages]}
        self._record(architecture).write_text(json.dumps(record))
        self._debian[architecture] = found.packages
        return name

    def _build_base(self, architecture: str) -> str:
        """The base image for build stages of images of this architecture: it runs here, under the
        name of the other, because a build uses images of one architecture only.
        """
        own = self.base(own_architecture())
        if architecture == own_architecture():
            return own
        name, container = f"localhost/kvtier-build:{architecture}", f"kvtier-build-{architecture}"
        self._buildah("from", "--pull-never", f"--name={container}", own)
        try:
            self._buildah("config", f"--arch={architecture}", container)
            self._buildah("commit", "--quiet", "--timestamp=0", container, name)
        finally:
            self._buildah("rm", container)
        return name

    def _record(self, architecture: str) -> Path:
        return self._home / f"base-{architecture}.json"

    def _kept_base(self, architecture: str) -> tuple[base.Debian, ...] | None:
        """The packages of the base image in the store; None if there is none like it."""
        try:
            record = json.loads(self._record(architecture).read_text())
            self._buildah("inspect", "--type=image", f"{BASE}:{architecture}")
        except (OSError, ValueError, BuildError):
            return None
        if record.get("key") != _base_key():
            return None
        return tuple(base.Debian(**each) for each in record["packages"])

    def image(self, name: str, architecture: str) -> Built:
        """Builds one of ``IMAGES``. Raises ``BuildError``."""
        installed = self._install(name, architecture)
        local = self._build(name, architecture, {})
        return self._export(name, architecture, local, installed)

    def lmcache(self, architecture: str) -> Built:
        """Builds the variant of the sidecar, after its payload image. Raises ``BuildError``."""
        name = packages.LMCACHE
        below = self._install("payload", architecture)
        installed = self._install(name, architecture)
        payload = f"localhost/kvtier-payload:{architecture}"
        local = self._build(name, architecture, {"PAYLOAD_IMAGE": payload})
        return self._export(name, architecture, local, below + installed)

    def clean(self) -> None:
        """Removes from the store what is not a base image: what this build made, and what builds
        that were killed left. Raises ``BuildError``.
        """
        self._buildah("rm", "--all")
        found = self._buildah("images", "--all", "--noheading", "--format", "{{.ID}} {{.Name}}")
        lines = [line.split() for line in found.decode().splitlines()]
        kept = {image for image, name in lines if name == BASE}
        unwanted = sorted({image for image, _ in lines} - kept)
        if unwanted:
            self._buildah("rmi", "--force", *unwanted)

    def _install(self, name: str, architecture: str) -> tuple[Package, ...]:
        target = self._home / f"packages-{name}-{architecture}"
        return packages.install(name, architecture, target)

    def _build(self, name: str, architecture: str, arguments: dict[str, str]) -> str:
        local = f"localhost/kvtier-{name}:{architecture}"
        arguments = {
            "PYTHON_IMAGE": self.base(architecture),
            "BUILD_IMAGE": self._build_base(architecture),
            **arguments,
        }
        target = self._home / f"packages-{name}-{architecture}"
        extra = [f"--build-context=packages={target}"]
        extra += [f"--build-arg={key}={value}" for key, value in sorted(arguments.items())]
        self._bud(local, architecture, ROOT / f"images/{name}.Containerfile", ROOT, *extra)
        return local

    def _bud(self, local: str, architecture: str, file: Path, context: Path, *extra: str) -> None:
        # Everything is on this machine; nothing is pulled. Time stamps are 0.
        options = (
            "--isolation=chroot",
            "--network=host",
            "--pull-never",
            "--timestamp=0",
            "--identity-label=false",
            "--os=linux",
            f"--arch={architecture}",
            f"--tag={local}",
            f"--file={file}",
        )
        self._buildah("bud", *options, *extra, str(context), seconds=BUILD_SECONDS)

    def _export(
        self, name: str, architecture: str, local: str, installed: tuple[Package, ...]
    ) -> Built:
        stem = f"kvtier-{name}-{architecture}"
        archive, digest_file = self._out / f"{stem}.tar", self._home / f"{stem}.digest"
        archive.unlink(missing_ok=True)
        reference = self.reference(name)
        target = f"oci-archive:{archive}:{reference}"
        self._buildah("push", "--quiet", f"--digestfile={digest_file}", local, target)
        digest = digest_file.read_text().strip()
        bill = sbom.document(reference, digest, self._debian[architecture], installed)
        (self._out / f"{stem}.spdx.json").write_text(bill)
        return Built(name, architecture, digest, archive)

    def _buildah(self, *words: str, seconds: float = BUILD_SECONDS) -> bytes:
        store = ("--root", self._home / "store", "--runroot", self._home / "run")
        return run("buildah", *store, "--storage-driver", "vfs", *words, seconds=seconds)


def inputs_digest(tag: str) -> str:
    """What the content of the images depends on in this checkout."""
    found = hashlib.sha256(tag.encode())
    roots = ("connector/kvtier", "operator/kvtier_operator", "images", "tools/imagebuild")
    files = [path for root in roots for path in (ROOT / root).rglob("*")]
    for path in sorted([*files, ROOT / "constraints.txt"]):
        if path.is_file() and "__pycache__" not in path.parts:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"{path.relative_to(ROOT)} {content}\n".encode())
    return found.hexdigest()
