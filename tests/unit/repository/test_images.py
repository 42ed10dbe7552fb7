"""The container images: complete, reproducible, and usable by any user."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.cluster import images
from tools.imagebuild import builder

from kvtier import __version__
from kvtier.tiers.lmcache.wire import LMCACHE_VERSION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
NAMES = builder.IMAGES
NOT_IN_THE_OPERATOR = {"blake3", "numpy", "psutil", "pyzmq"}
PLACE = "opt/kvtier"
SERVER = "https://127.0.0.1:1"
KUBECONFIG = f"""
apiVersion: v1
kind: Config
current-context: a
contexts: [{{name: a, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: '{SERVER}'}}}}]
users: [{{name: u, user: {{token: x}}}}]
"""
READ_KUBECONFIG = """
import asyncio, os, pathlib
os.environ.setdefault("HOME", "/")  # as the command does
from kvtier_operator.kube.credentials import load
print(asyncio.run(load(pathlib.Path("/kubeconfig"))).server)
"""


def test_the_variant_with_lmcache_has_the_version_that_the_tier_requires() -> None:
    assert listed("payload-lmcache") == {"lmcache"}
    assert f"lmcache=={LMCACHE_VERSION}" in (ROOT / "constraints.txt").read_text().split()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"]["lmcache"] == [f"lmcache=={LMCACHE_VERSION}"]


def requirements(*wanted: str, without: frozenset[str] | set[str] = frozenset()) -> set[str]:
    """Names of all packages that are needed for ``wanted``, as installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(text) for text in (*project["dependencies"], *wanted)]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), tuple(sorted(requirement.extras))
        if name == "kvtier":
            waiting += [
                Requirement(text)
                for extra in extras
                for text in project["optional-dependencies"][extra]
            ]
        elif name not in without and (name, extras) not in seen:
            seen.add((name, extras))
            for text in importlib.metadata.requires(name) or ():
                found = Requirement(text)
                if found.marker is None or any(
                    found.marker.evaluate({"extra": extra}) for extra in extras or ("",)
                ):
                    waiting.append(found)
    return {name for name, _ in seen}


def listed(name: str) -> set[str]:
    lines = (
        line.partition("#")[0].strip()
        for line in (ROOT / "images" / f"{name}.txt").read_text().splitlines()
    )
    return {line for line in lines if line}


def test_the_package_lists_equal_the_packages_requirements() -> None:
    assert listed("payload") == requirements("kvtier[tierd]")
    assert listed("operator") == requirements("kvtier[operator]", without=NOT_IN_THE_OPERATOR)


@pytest.mark.parametrize("name", [*NAMES, "payload-lmcache"])
def test_the_last_stage_only_copies_and_nothing_is_downloaded(name: str) -> None:
    text = (ROOT / "images" / f"{name}.Containerfile").read_text()
    build, last = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    words = {line.split()[0] for line in last.splitlines()[1:] if re.match("[A-Z]+ ", line)}
    assert words <= {"COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT"}
    assert re.findall(r"^RUN (.*)$", build, re.MULTILINE) == [
        f'["/usr/local/bin/python3", "/build/install", "{name.removeprefix("payload-")}", "/image"]'
    ]
    if name in NAMES:
        assert "\nUSER 65532:65532\n" in text


def test_a_machine_that_cannot_build_images_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builder.os, "geteuid", lambda: 0)
    monkeypatch.setattr(builder.shutil, "which", lambda _: None)
    with pytest.raises(images.NoImagesError, match="missing Debian packages: buildah mmdebstrap"):
        images.shipped()
    monkeypatch.setattr(builder.os, "geteuid", lambda: 1000)
    with pytest.raises(images.NoImagesError, match="built as root"):
        images.shipped()


# Built images


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    """The archives that node tests run, by image."""
    try:
        return dict(zip(NAMES, images.shipped(), strict=True))
    except images.NoImagesError as error:
        pytest.skip(str(error))


def blob(tar: tarfile.TarFile, digest: str) -> Any:
    file = tar.extractfile(f"blobs/{digest.replace(':', '/')}")
    assert file is not None
    return file


def manifest(tar: tarfile.TarFile) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The digest, the manifest and the configuration of an OCI archive."""
    index = tar.extractfile("index.json")
    assert index is not None
    (entry,) = json.load(index)["manifests"]
    found = json.load(blob(tar, entry["digest"]))
    return entry["digest"], found, json.load(blob(tar, found["config"]["digest"]))


def entries(archive: Path) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    """What the layers hold, the lowest first."""
    with tarfile.open(archive) as tar:
        for layer in manifest(tar)[1]["layers"]:
            with tarfile.open(fileobj=blob(tar, layer["digest"]), mode="r:*") as content:
                for entry in content:
                    yield entry, content


def bill(archive: Path) -> dict[str, Any]:
    return dict(json.loads(archive.with_suffix(".spdx.json").read_text()))


@pytest.mark.parametrize("name", NAMES)
def test_an_image_holds_what_its_list_says_and_any_user_can_read_it(
    built: dict[str, Path], name: str
) -> None:
    with tarfile.open(built[name]) as tar:
        digest, _, configuration = manifest(tar)
    assert configuration["config"]["User"] == "65532:65532"
    assert configuration["architecture"] == builder.own_architecture()
    packages, modes = set[str](), dict[str, int]()
    for entry, _ in entries(built[name]):
        path = entry.name.strip("/")
        assert (entry.mtime, entry.uid, entry.gid) == (0, 0, 0), path
        assert not re.search(r"/(torch|vllm)/", path) or "/kvtier/" in path
        assert not entry.mode & 0o6000, path
        if entry.isfile() or entry.isdir():
            modes[path] = entry.mode
        if match := re.match(rf"{PLACE}/packages/([^/]+?)-[^/-]+\.dist-info/METADATA$", path):
            packages.add(canonicalize_name(match[1]))
    assert packages == listed(name)
    assert [path for path, mode in modes.items() if mode & 0o044 != 0o044] == []
    assert "bin/sh" not in modes
    # The bill of materials names the image and everything in it.
    document = bill(built[name])
    found = {each["name"]: each for each in document["packages"]}
    image = document["packages"][0]
    assert image["checksums"][0]["checksumValue"] == digest.removeprefix("sha256:")
    assert listed(name) <= set(found)
    assert {"libc6", "libssl3", "python3.11-minimal"} <= set(found)
    versions = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    for package in listed(name):
        assert found[package]["versionInfo"] == versions[package]
    contained = [each["relatedSpdxElement"] for each in document["relationships"][1:]]
    assert contained == [each["SPDXID"] for each in document["packages"][1:]]


def test_bytecode_is_found_and_its_source_is_not_checked(built: dict[str, Path]) -> None:
    """A root file system that is read-only would otherwise be compiled at each start."""
    sources, compiled = set[str](), set[str]()
    for entry, content in entries(built["payload"]):
        path = entry.name.strip("/")
        if match := re.match(rf"{PLACE}/pycache/(.+)\.cpython-311\.pyc$", path):
            file = content.extractfile(entry)
            assert file is not None
            assert file.read(8)[4:] == (1).to_bytes(4, "little"), path
            compiled.add(f"{match[1]}.py")
        elif path.startswith(f"{PLACE}/source/") and path.endswith(".py"):
            sources.add(path)
    assert len(sources) > 100
    assert sources <= compiled
    assert "usr/lib/python3.11/asyncio/events.py" in compiled


def test_two_builds_have_the_same_digest(built: dict[str, Path], tmp_path: Path) -> None:
    """The second has nothing of the first: its own base, packages and store."""
    first = (built["payload"], json.loads((built["payload"].parent / "digests.json").read_text()))
    again = _build_afresh(tmp_path / "again")
    if _debian(again[0]) != _debian(first[0]):
        # Debian has updated a package since the kept base image was built.
        first = _build_afresh(tmp_path / "first")
    key = f"payload-{builder.own_architecture()}"
    assert again[1][key] == first[1][key]


def _build_afresh(directory: Path) -> tuple[Path, dict[str, str]]:
    out = directory / "out"
    command = [sys.executable, str(ROOT / "tools/images"), str(out), "--only", "payload"]
    command += ["--home", str(directory / "home")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    archive = out / f"kvtier-payload-{builder.own_architecture()}.tar"
    return archive, json.loads((out / "digests.json").read_text())


def _debian(archive: Path) -> set[tuple[str, str]]:
    return {
        (each["name"], each["versionInfo"])
        for each in bill(archive)["packages"]
        if each["SPDXID"].startswith("SPDXRef-deb-")
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the root directory needs root")
def test_commands_run_as_any_user_without_anything_of_this_machine(
    built: dict[str, Path], tmp_path: Path
) -> None:
    for name, archive in built.items():
        with tarfile.open(archive) as tar:
            for layer in manifest(tar)[1]["layers"]:
                with tarfile.open(fileobj=blob(tar, layer["digest"]), mode="r:*") as content:
                    content.extractall(tmp_path / name, filter="fully_trusted")

    def run(image: str, *command: str, status: int = 0) -> str:
        """What the command prints, or its errors if it is expected to fail."""

        def enter() -> None:
            os.chroot(tmp_path / image)
            os.chdir("/")
            os.setgroups([])
            os.setgid(0)
            os.setuid(1_000_660_000)

        done = subprocess.run(
            command,
            executable=command[0],
            env={"PATH": "/usr/local/bin", "PYTHONPYCACHEPREFIX": f"/{PLACE}/pycache"},
            preexec_fn=enter,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == status, done.stderr
        return (done.stderr if status else done.stdout).strip()

    assert run("payload", "/usr/local/bin/kvtier-sidecar", "--version") == run(
        "operator", "/usr/local/bin/kvtier-operator", "version"
    )
    for image in ("payload", "operator"):
        assert run(image, "/usr/local/bin/kvtier", "--version") == f"kvtier {__version__}"
    libraries = "import ssl, sqlite3, ctypes, lzma, zoneinfo; zoneinfo.ZoneInfo('Europe/Paris')"
    run("operator", "/usr/local/bin/python3", "-c", libraries)
    (tmp_path / "operator/kubeconfig").write_text(KUBECONFIG)
    assert run("operator", "/usr/local/bin/python3", "-c", READ_KUBECONFIG) == SERVER
    controller = ("/usr/local/bin/kvtier-operator", "controller", "--kubeconfig", "/missing")
    error = run("operator", *controller, status=2)
    assert "/missing" in error
    assert "Traceback" not in error
    target = tmp_path / "payload/payload"
    target.mkdir()
    target.chmod(0o777)  # as a fresh volume is
    assert run("payload", "/usr/local/bin/kvtier-payload", "/payload") == "/payload"
    assert sorted(path.name for path in target.iterdir())[0] == "kvtier"
    assert "vllm.general_plugins" in next(target.glob("*.dist-info/entry_points.txt")).read_text()
    assert source_files(tmp_path / "payload" / PLACE / "engine") == source_files(target)


def source_files(directory: Path) -> dict[str, bytes]:
    """Content by path, without bytecode."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
