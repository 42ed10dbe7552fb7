"""The adapter under ATOM's own scheduler and block manager, where a copy of their source is given.

``KVTIER_ATOM_SOURCE``: a directory with the package ``atom``, or a git repository of it. Nothing of
it is part of this repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLE = "KVTIER_ATOM_SOURCE"
REPOSITORY = Path(__file__).resolve().parents[3]
SCHEDULES = 100
PROGRAM = """
import logging, sys, types
tests = types.ModuleType("tests")
tests.__path__ = [sys.argv.pop(1)]
sys.modules["tests"] = tests
logging.disable(logging.WARNING)
from tests.support.atom_own_scheduler import main
sys.exit(main())
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    given = os.environ.get(VARIABLE, "")
    if not given:
        pytest.skip(f"{VARIABLE} names no copy of ATOM's source")
    path = Path(given)
    if (path / "atom" / "model_engine" / "scheduler.py").is_file():
        return path
    archive = subprocess.run(
        ["git", "-C", str(path), "archive", "HEAD", "atom"], capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"{VARIABLE}: {path} holds neither the package nor a repository of it")
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=archive.stdout, check=True)
    return tmp_path


def test_random_schedules_under_atoms_own_scheduler(source: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import atom.model_engine.scheduler"],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        pytest.skip(f"ATOM's scheduler cannot be imported here: {found.stderr.splitlines()[-1]}")
    path = [str(source), str(REPOSITORY / "connector"), str(REPOSITORY)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(REPOSITORY / "tests"), "0", str(SCHEDULES)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    for name, least in (
        ("stored", 500),
        ("loads_whole", 50),
        ("preempted", 20),
        ("loads_failed", 5),
    ):
        assert seen[name] >= least, seen
