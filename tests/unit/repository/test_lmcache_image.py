"""The variant of the sidecar's image with LMCache: what it installs is pinned, and consistent."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support.lmcache_backends import require_lmcache
from tools.imagebuild.packages import PYTHON

from kvtier.tiers.lmcache.wire import LMCACHE_VERSION

ROOT = Path(__file__).resolve().parents[3]
CONTAINERFILE = ROOT / "images" / "payload-lmcache.Containerfile"


def pinned() -> dict[str, str]:
    """The version of each package in constraints.txt."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, separator, version = line.partition("#")[0].partition("==")
        if separator:
            found[str(canonicalize_name(name.strip()))] = version.partition(";")[0].strip()
    return found


def test_every_package_that_lmcache_needs_is_pinned_to_a_version_that_it_takes() -> None:
    # pip has no overrides: one requirement that contradicts a constraint fails the build.
    require_lmcache()
    versions = pinned()
    waiting = [Requirement(f"lmcache=={LMCACHE_VERSION}")]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    problems = []
    while waiting:
        requirement = waiting.pop()
        name = str(canonicalize_name(requirement.name))
        version = versions.get(name)
        if version is None:
            problems.append(f"{name} is not pinned")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement}: pinned is {version}")
        key = (name, tuple(sorted(requirement.extras)))
        if key in seen:
            continue
        seen.add(key)
        for text in importlib.metadata.requires(name) or ():
            found = Requirement(text)
            extras = requirement.extras or {""}
            if found.marker is None or any(
                found.marker.evaluate({"extra": extra}) for extra in extras
            ):
                waiting.append(found)
    assert problems == []
    assert len(seen) > 50


def test_the_variant_replaces_nothing_of_the_payload_and_keeps_its_user() -> None:
    _, final = re.split(r"\nFROM \$\{PAYLOAD_IMAGE\}\n", CONTAINERFILE.read_text())
    assert [line.split()[0] for line in final.splitlines() if line] == ["COPY", "COPY"]
    versions = pinned()
    assert versions["lmcache"] == LMCACHE_VERSION
    for name in ("payload.txt", "payload-lmcache.txt"):
        listed = [
            line.partition("#")[0].strip()
            for line in (ROOT / "images" / name).read_text().splitlines()
        ]
        for each in filter(None, listed):
            assert str(canonicalize_name(each)) in versions, "both installs take the same version"


def test_both_images_have_one_python() -> None:
    payload = (ROOT / "images" / "payload.Containerfile").read_text()
    assert set(re.findall(r"python(3\.\d+)", payload)) == {PYTHON}
    assert "\nARG BUILD_IMAGE=${PYTHON_IMAGE}\n" in CONTAINERFILE.read_text()
