"""The container images: reproducible, complete, and usable by any user."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvtier import __version__
from kvtier.tiers.lmcache.wire import LMCACHE_VERSION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("operator", "payload")
NOT_IN_THE_OPERATOR = {"blake3", "numpy", "psutil", "pyzmq"}


def test_the_variant_with_lmcache_has_the_version_that_the_tier_requires() -> None:
    text = (ROOT / "images/payload-lmcache.Containerfile").read_text()
    assert f"lmcache=={LMCACHE_VERSION}" in text
    assert f"lmcache=={LMCACHE_VERSION}" in (ROOT / "constraints.txt").read_text().split()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"]["lmcache"] == [f"lmcache=={LMCACHE_VERSION}"]


def build(out: Path) -> str:
    """Builds both images; what it says: a digest each."""
    command = [sys.executable, str(ROOT / "tools/images"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("images")
    return out, build(out)


def manifest(archive: Path) -> tuple[dict[str, object], list[str]]:
    """An image's configuration and the names of its layers."""
    with tarfile.open(archive) as tar:

        def document(name: str) -> object:
            file = tar.extractfile(name)
            assert file is not None
            return json.load(file)

        (entry,) = document("manifest.json")  # type: ignore[misc]
        return dict(document(entry["Config"])), list(entry["Layers"])  # type: ignore[call-overload]


def paths(archive: Path) -> dict[str, tarfile.TarInfo]:
    found = {}
    with tarfile.open(archive) as tar:
        for layer in manifest(archive)[1]:
            with tarfile.open(fileobj=tar.extractfile(layer)) as content:
                found |= {entry.name: entry for entry in content}
    return found


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


def test_container_files_name_a_numeric_user_and_use_no_distribution_package() -> None:
    for name in NAMES:
        text = (ROOT / "images" / f"{name}.Containerfile").read_text()
        assert "\nUSER 65532:65532\n" in text
        assert "constraints.txt" in text
        assert f"images/{name}.txt" in text
        assert not re.search(r"\b(apt|apt-get|apk|dnf|yum)\b", text)


def test_two_builds_are_the_same_bytes(built: tuple[Path, str], tmp_path: Path) -> None:
    out, said = built
    again = build(tmp_path)
    assert again == said.replace(str(out), str(tmp_path))
    for name in NAMES:
        assert (tmp_path / f"kvtier-{name}.tar").read_bytes() == (
            out / f"kvtier-{name}.tar"
        ).read_bytes()


def test_images_hold_what_their_lists_say_and_nothing_of_an_engine(built: tuple[Path, str]) -> None:
    for name in NAMES:
        archive = built[0] / f"kvtier-{name}.tar"
        configuration, layers = manifest(archive)
        assert configuration["config"]["User"] == "65532:65532"  # type: ignore[index]
        assert len(layers) == 3
        found = paths(archive)
        packages = {
            canonicalize_name(match[1])
            for path in found
            if (
                match := re.match(
                    r"usr/local/lib/python[\d.]+/site-packages/([^/]+?)-[^/-]+\.dist-info/METADATA",
                    path,
                )
            )
        }
        assert packages == listed(name)
        assert not [
            path for path in found if re.search(r"/(torch|vllm)/", path) and "/kvtier/" not in path
        ]
        assert {entry.mtime for entry in found.values()} == {0}
        assert {entry.uid for entry in found.values()} == {0}
    assert (
        manifest(built[0] / "kvtier-operator.tar")[1][0]
        == manifest(built[0] / "kvtier-payload.tar")[1][0]
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the root directory needs root")
def test_commands_run_as_any_user_without_anything_of_this_machine(
    built: tuple[Path, str], tmp_path: Path
) -> None:
    for name in NAMES:
        root, archive = tmp_path / name, built[0] / f"kvtier-{name}.tar"
        with tarfile.open(archive) as tar:
            for layer in manifest(archive)[1]:
                with tarfile.open(fileobj=tar.extractfile(layer)) as content:
                    content.extractall(root, filter="fully_trusted")

    def run(image: str, *command: str) -> str:
        def enter() -> None:
            os.chroot(tmp_path / image)
            os.chdir("/")
            os.setgroups([])
            os.setgid(0)
            os.setuid(1_000_660_000)

        done = subprocess.run(
            command,
        executable=str(command[0]),
        env={"PATH": "/usr/local/bin"},
        preexec_fn=enter,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run("payload", "/usr/local/bin/kvtier-sidecar", "--version") == run(
        "operator", "/usr/local/bin/kvtier-operator", "version"
    )
    for image in ("payload", "operator"):
        assert run(image, "/usr/local/bin/kvtier", "--version") == f"kvtier {__version__}"
    (tmp_path / "payload/opt/kvtier/payload").chmod(0o777)  # as a fresh volume is
    assert (
        run("payload", "/usr/local/bin/kvtier-payload", "/opt/kvtier/payload")
        == "/opt/kvtier/payload"
    )
    written = tmp_path / "payload/opt/kvtier/payload"
    assert sorted(path.name for path in written.iterdir())[0] == "kvtier"
    assert "vllm.general_plugins" in next(written.glob("*.dist-info/entry_points.txt")).read_text()
    mounted = tmp_path / "payload/opt/kvtier/engine"
    assert source_files(mounted) == source_files(written)


def source_files(directory: Path) -> dict[str, bytes]:
    """Content by path, without bytecode."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
