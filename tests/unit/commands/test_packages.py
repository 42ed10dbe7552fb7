"""The command starts where packages of tierd are missing, as in the operator's image."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from kvtier.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
TIERD = ("numpy", "zmq", "blake3", "psutil", "xxhash", "torch")
OPERATOR = ("kubernetes", "aiohttp", "kopf")


def run(names: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(names=names), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        (TIERD, ["--version"]),
        (TIERD, ["validate", str(REPOSITORY / "examples/ram-and-disk.yaml")]),
        (TIERD + OPERATOR, ["why", "--help"]),
    ],
)
def test_a_command_needs_its_own_packages_only(
    names: tuple[str, ...], arguments: list[str]
) -> None:
    done = run(names, *arguments)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("names", "arguments", "needed"),
    [
        (TIERD, ["inspect", "/tmp"], "install kvtier[tierd] (No module named 'numpy')"),
        (OPERATOR, ["why", "pod"], "install kvtier[operator] (No module named"),
    ],
)
def test_a_missing_package_is_one_line(
    names: tuple[str, ...], arguments: list[str], needed: str
) -> None:
    done = run(names, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert needed in done.stderr
    assert len(done.stderr.splitlines()) == 1
