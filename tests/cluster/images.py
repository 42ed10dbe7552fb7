"""The two images that the chart names, made from this machine's Python and the checkout, without a container engine.

An image holds the interpreter with its standard library, the distributions that an extra of ``kvtier`` asks for, both source
roots, and the shared libraries that all of them load: nothing else of this machine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
WRITER = Path(__file__).resolve().parent / "kubernetes" / "image"
OPERATOR = "registry.local/kvtier-operator:test"
PAYLOAD = "registry.local/kvtier-payload:test"
STAND_IN = "registry.local/kvtier-stand-in:test"
SITE = "opt/kvtier/site-packages"
UNUSED = shutil.ignore_patterns(
    "test", "tests", "idlelib", "ensurepip", "tkinter", "turtledemo", "site-packages", "config-*", "lib2to3"
)

NOT_IN_PODS = ("kubernetes",)
"""Reads kubeconfigs, which pods have none of, and is larger than all the rest."""


@dataclass(frozen=True, slots=True)
class Image:
    """A reference as pods name it, and the archive that holds it."""

    reference: str
    archive: Path


def operator(home: Path) -> Image:
    """``kvtier-operator``."""
    return _image(
        home / "operator", OPERATOR, "operator", {"kvtier-operator": "kvtier_operator.main"}, "kvtier-operator"
    )


def payload(home: Path) -> Image:
    """The sidecar and the payload's installer."""
    commands = {"kvtier-sidecar": "kvtier.tierd.sidecar.__main__", "kvtier-payload": "kvtier.cli.payload"}
    return _image(home / "payload", PAYLOAD, "tierd", commands, "kvtier-sidecar")


def stand_in(home: Path) -> Image:
    """``stand_in_engine``: an engine for tests that starts in a second."""
    return _image(home / "stand-in", STAND_IN, "tierd", {"stand-in": "stand_in_engine"}, "stand-in", testing=True)


def _image(
    stage: Path, reference: str, extra: str, commands: dict[str, str], entry: str, testing: bool = False
) -> Image:
    prefix = Path(sys.base_prefix)
    python = Path(sys.executable).resolve()
    version = f"python{sysconfig.get_python_version()}"
    stage.mkdir(parents=True)
    for name in ("dev", "proc", "sys", "run", "etc"):
        (stage / name).mkdir()
    (stage / "tmp").mkdir(mode=0o1777)
    (stage / "tmp").chmod(0o1777)
    (stage / "etc/passwd").write_text("root:x:0:0::/:/\nkvtier:x:65532:65532::/tmp:/\n")
    (stage / "etc/group").write_text("root:x:0:\nkvtier:x:65532:\n")
    inside = stage / str(prefix).lstrip("/")
    _copy_tree(prefix / "lib" / version, inside / "lib" / version, UNUSED)
    _copy(python, inside / "bin" / python.name)
    site = stage / SITE
    for distribution in _closure(extra):
        _copy_distribution(distribution, site)
    for root, package in (("connector", "kvtier"), ("operator", "kvtier_operator")):
        _copy_tree(REPOSITORY / root / package, site / package, None if testing else shutil.ignore_patterns("testing"))
    if testing:
        _copy(Path(__file__).with_name("stand_in_engine.py"), site / "stand_in_engine.py")
    _copy_libraries(stage, [python, *stage.rglob("*.so"), *stage.rglob("*.so.*")])
    commands_place = stage / "usr/local/bin"
    commands_place.mkdir(parents=True)
    for name, module in commands.items():
        path = commands_place / name
        path.write_text(
            f"#!{python}\nimport os, sys\nsys.path.insert(0, '/{SITE}')\nos.environ['PYTHONPATH'] = '/{SITE}'\n"
            f"from {module} import main\nsys.exit(main())\n"
        )
        path.chmod(0o755)
    archive = stage.with_suffix(".tar")
    tops = [f"/{each.name}={each}" for each in sorted(stage.iterdir())]
    subprocess.run(
        [sys.executable, str(WRITER), reference, str(archive), *tops, "--entrypoint", f"/usr/local/bin/{entry}"],
        check=True,
    )
    shutil.rmtree(stage)
    return Image(reference, archive)


def _closure(extra: str) -> Iterator[importlib.metadata.Distribution]:
    """Everything that ``kvtier[extra]`` asks for, itself excepted, each once."""
    seen: set[tuple[str, str]] = set()
    waiting = [("kvtier", extra), ("kvtier", "")]
    given: set[str] = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        distribution = importlib.metadata.distribution(name)
        if name in NOT_IN_PODS:
            continue
        if name != "kvtier" and name not in given:
            given.add(name)
            yield distribution
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": wanted}):
                continue
            wants = re.sub(r"[-_.]+", "-", requirement.name).lower()
            waiting += [(wants, each) for each in ("", *requirement.extras)]


def _copy_distribution(distribution: importlib.metadata.Distribution, site: Path) -> None:
    for file in distribution.files or ():
        if ".." in file.parts:
            continue
        source = Path(str(distribution.locate_file(file)))
        if source.is_file():
            _copy(source, site / file)
            compiled = Path(importlib.util.cache_from_source(str(source)))
            if source.suffix == ".py" and compiled.is_file():
                _copy(compiled, site / file.parent / "__pycache__" / compiled.name)


def _copy_libraries(stage: Path, programs: Iterable[Path]) -> None:
    """What the dynamic loader will look for, at the places where it found it here."""
    found: set[str] = set()
    listed = [str(path) for path in programs]
    for start in range(0, len(listed), 50):
        done = subprocess.run(["ldd", *listed[start : start + 50]], capture_output=True, text=True, check=False)
        found.update(re.findall(r"(?:=> |^\s)(/\S+) \(0x", done.stdout, re.MULTILINE))
    for each in sorted(found):
        path = Path(each)
        target = stage / each.lstrip("/")
        if not target.exists() and not each.startswith(str(stage)) and ".venv" not in path.parts:
            _copy(path.resolve(), target)


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _copy_tree(source: Path, target: Path, ignore: object) -> None:
    shutil.copytree(source, target, symlinks=True, ignore=ignore, copy_function=lambda a, b: _copy(Path(a), Path(b)))  # type: ignore[arg-type]
