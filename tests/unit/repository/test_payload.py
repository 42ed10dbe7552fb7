"""The payload holds what an engine imports, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import kvtier
from kvtier import payload

MODULES = {
    "__init__",
    "awaited_nodes",
    "config",
    "engines",
    "errors",
    "files",
    "hashing",
    "key_table",
    "keys",
    "listening",
    "lookup",
    "namespace",
    "planner",
    "prefix_order",
    "presence_table",
    "processes",
    "store",
    "tenants",
    "tierd",
    "tiers",
    "transfer",
}
"""tierd, store and tiers are among them: with ``spec.engine.daemon: Engine`` the engine starts
tierd from the payload."""
MAX_BYTES = 9 << 18
"""2.25 MiB: what an init container copies in a moment."""

CLEAN_IMPORT = """
import importlib, importlib.metadata, json, sys
payload, *packages = json.loads(sys.argv[1])
sys.path[:0] = [payload]
sys.path += packages
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
plugins = [
    entry.value
    for entry in importlib.metadata.entry_points(group="vllm.general_plugins")
    if entry.name == "kvtier"
]
files = [module.__file__ for name, module in sys.modules.items() if name.startswith("kvtier")]
print(json.dumps({"plugins": plugins, "files": files}))
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return payload.write(tmp_path_factory.mktemp("payload") / "payload")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """site-packages without the ``.pth`` file of the editable install, which ``-I`` would read."""
    directory = tmp_path / "site-packages"
    directory.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "kvtier" not in entry.name and entry.suffix != ".pth":
            (directory / entry.name).symlink_to(entry)
    return directory


def top_level(directory: Path) -> set[str]:
    return {path.name.removesuffix(".py") for path in (directory / "kvtier").iterdir()}


def modules(directory: Path) -> list[str]:
    """Every module of the payload that needs no engine, by its dotted name."""
    found = []
    for path in sorted((directory / "kvtier").rglob("*.py")):
        name = ".".join(path.relative_to(directory).with_suffix("").parts)
        if not name.startswith(("kvtier.engines", "kvtier.transfer")):
            found.append(name.removesuffix(".__init__"))
    return found


def import_clean(directory: Path, packages: Path, names: list[str]) -> dict[str, list[str]]:
    """Imports modules in an interpreter that has the payload and third-party packages only."""
    paths = json.dumps([str(directory), str(packages)])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CLEAN_IMPORT, paths, json.dumps(names)],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, list[str]] = json.loads(done.stdout)
    return answer


def test_the_payload_holds_exactly_the_modules_that_an_engine_imports(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
    with capsys.disabled():
        print(f" payload: {size / 1024:.0f} KiB", end="")
    assert {path.name for path in written.iterdir()} == {
        "kvtier",
        "kvtier-atom",
        f"kvtier-{kvtier.__version__}.dist-info",
    }
    assert top_level(written) == MODULES
    assert size <= MAX_BYTES


def test_every_module_of_the_package_is_delivered_or_excluded_by_name() -> None:
    package = Path(kvtier.__file__).parent
    found = {path.name.removesuffix(".py") for path in package.iterdir()} - {"__pycache__"}
    assert found - MODULES == payload.NOT_DELIVERED


def test_plugin_and_tierd_come_from_the_payload_alone(written: Path, packages: Path) -> None:
    names = ["kvtier.engines.vllm.plugin", "kvtier.tierd.__main__", "kvtier.tierd.supervisor"]
    answer = import_clean(written, packages, names)
    assert answer["plugins"] == ["kvtier.engines.vllm.plugin:register"]
    assert [file for file in answer["files"] if not file.startswith(f"{written}/")] == []


def test_no_module_of_the_payload_needs_one_that_is_not_delivered(
    written: Path, packages: Path
) -> None:
    names = [name for name in modules(written) if not name.endswith("__main__")]
    answer = import_clean(written, packages, names)
    assert [file for file in answer["files"] if not file.startswith(f"{written}/")] == []


def test_tests_can_add_modules_to_the_payload(tmp_path: Path) -> None:
    more = payload.write(tmp_path, include=("harness", "testing"))
    assert top_level(more) == MODULES | {"harness", "testing"}
