"""The base image: Python and the libraries that it and binary packages need, from Debian.

mmdebstrap resolves and downloads Debian packages from the machine's own package sources, for any
architecture. Nothing of them is executed: their files go into one archive, without documentation,
locales, a shell or a package manager. The same packages give the same bytes. The layout is that of
``docker.io/library/python:3.11-slim-bookworm``, which the Containerfiles also accept.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUITE = "bookworm"
PYTHON = "3.11"
INCLUDED = (f"python{PYTHON}", "ca-certificates", "libstdc++6", "tzdata")
NOT_UNPACKED = frozenset({"debconf", "dpkg", "libacl1", "libmd0", "libselinux1", "openssl", "tar"})
"""Needed by maintainer scripts only, or a command."""
AUTHORITIES = "usr/share/ca-certificates/"
LEFT_OUT = re.compile(
    r"usr/share/(?!doc/[^/]+/copyright$|zoneinfo/|ca-certificates/)"
    rf"|usr/lib/python{PYTHON}/(test|idlelib|lib2to3|tkinter|turtledemo|ensurepip|pydoc_data)/"
    r"|usr/(games|include|sbin)/|usr/lib/(mime|tmpfiles.d|valgrind)/|etc/(ca-certificates|kernel)/"
    r"|var/|usr/bin/(?!python)"
)
USER = 65532
DOWNLOAD_SECONDS = 600


class BuildError(Exception):
    """An image cannot be built. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Debian:
    """A Debian package in the base image. ``unpacked``: its files are there."""

    name: str
    version: str
    architecture: str
    sha256: str
    unpacked: bool


@dataclass(frozen=True, slots=True)
class Base:
    """``archive``: the root file system as a tar archive."""

    archive: Path
    packages: tuple[Debian, ...]


def run(*command: str | Path, seconds: float = 600, **environment: str) -> bytes:
    """Standard output of a command. Raises ``BuildError`` with the end of its messages."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=seconds,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-2000:]
        raise BuildError(f"{' '.join(words[:4])} ... failed: {said}")
    return done.stdout


def build(architecture: str, home: Path) -> Base:
    """Downloads the packages and writes ``home/base-ARCHITECTURE.tar``. Raises ``BuildError``."""
    root = home / f"debian-{architecture}"
    shutil.rmtree(root, ignore_errors=True)
    options = (
        "--quiet",
        "--variant=extract",
        f"--architectures={architecture}",
        f"--include={','.join(INCLUDED)}",
        "--format=directory",
        "--skip=cleanup/apt,download/empty",
    )
    run("mmdebstrap", *options, SUITE, root, seconds=DOWNLOAD_SECONDS, SOURCE_DATE_EPOCH="0")
    found = sorted((root / "var/cache/apt/archives").glob("*.deb"))
    if not found:
        raise BuildError("mmdebstrap kept no packages")
    tree, packages = _Tree(), []
    for path in found:
        package, control = _described(path)
        packages.append(package)
        if package.unpacked:
            _unpack(tree, path)
            # Scanners of images read this directory where there is no package manager.
            tree.add(f"var/lib/dpkg/status.d/{package.name}", control)
    _complete(tree)
    archive = home / f"base-{architecture}.tar"
    tree.write(archive)
    shutil.rmtree(root, ignore_errors=True)
    return Base(archive, tuple(packages))


def _described(path: Path) -> tuple[Debian, bytes]:
    """The package and its control file."""
    control = run("dpkg-deb", "--field", path)
    fields = dict(re.findall(r"^(\S+): (.*)$", control.decode(), re.MULTILINE))
    name = fields["Package"]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    unpacked = name not in NOT_UNPACKED
    return Debian(name, fields["Version"], fields["Architecture"], digest, unpacked), control


class _Tree:
    """Files of the archive by path, without a leading slash."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[tarfile.TarInfo, bytes]] = {}

    def add(self, path: str, content: bytes = b"", mode: int = 0o644, link: str = "") -> None:
        entry = tarfile.TarInfo(path)
        entry.mode, entry.size = mode, len(content)
        if link:
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, link, 0o777
        self.entries[path] = entry, content

    def folder(self, path: str, mode: int = 0o755) -> None:
        entry = tarfile.TarInfo(path)
        entry.type, entry.mode = tarfile.DIRTYPE, mode
        self.entries[path] = entry, b""

    def write(self, target: Path) -> None:
        for path in list(self.entries):
            for parent in Path(path).parents:
                if str(parent) != "." and str(parent) not in self.entries:
                    self.folder(str(parent))
        with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
            for _, (entry, content) in sorted(self.entries.items()):
                entry.mtime = entry.uid = entry.gid = 0
                entry.uname = entry.gname = ""
                tar.addfile(entry, io.BytesIO(content) if entry.isreg() else None)


def _unpack(tree: _Tree, path: Path) -> None:
    content = run("dpkg-deb", "--fsys-tarfile", path)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for entry in tar:
            name = entry.name.removeprefix("./").strip("/")
            if not name or entry.isdir() or LEFT_OUT.match(name):
                continue
            if entry.islnk():
                original = tar.getmember(entry.linkname)
                tree.add(name, _content(tar, original), original.mode)
            elif entry.issym():
                tree.add(name, link=entry.linkname)
            elif entry.isreg():
                # Nothing needs a setuid bit, and everything must be readable by any user.
                tree.add(name, _content(tar, entry), entry.mode & 0o755 | 0o444)


def _content(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(entry)
    return b"" if file is None else file.read()


def _complete(tree: _Tree) -> None:
    """Adds what maintainer scripts would, and the links by which Python is found."""
    users = f"root:x:0:0:root:/:/sbin/nologin\nkvtier:x:{USER}:{USER}:kvtier:/:/sbin/nologin\n"
    tree.add("etc/passwd", users.encode())
    tree.add("etc/group", f"root:x:0:\nkvtier:x:{USER}:\n".encode())
    tree.add("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    tree.add("etc/ssl/certs/ca-certificates.crt", b"".join(_authorities(tree)))
    for name in (f"python{PYTHON}", "python3", "python"):
        tree.add(f"usr/local/bin/{name}", link=f"/usr/bin/python{PYTHON}")
    # Debian's Python looks into dist-packages, others into site-packages.
    library = f"usr/local/lib/python{PYTHON}"
    tree.folder(f"{library}/site-packages")
    tree.add(f"{library}/dist-packages", link="site-packages")
    for folder in ("dev", "proc", "sys", "run", "opt", "home", "mnt"):
        tree.folder(folder)
    tree.folder("tmp", 0o1777)


def _authorities(tree: _Tree) -> Iterator[bytes]:
    for path in sorted(tree.entries):
        if path.startswith(AUTHORITIES):
            yield tree.entries[path][1].rstrip() + b"\n"
