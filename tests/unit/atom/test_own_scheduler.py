"""The adapter under ATOM's own scheduler and block manager, from a copy of their source.

``tests/support/atom_source.py`` finds or fetches that copy. Nothing of it is part of this
repository.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.atom_source import SourceUnavailableError, atom_source

from kvtier.engines.atom.identity_settings import NOT_SHAPING, PLACES

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
    scratch = tmp_path / "atom-source"
    scratch.mkdir()
    try:
        return atom_source(scratch)
    except SourceUnavailableError as error:
        pytest.skip(f"no copy of ATOM's source: {error}")


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


def test_the_fields_of_atoms_configuration_are_known(source: Path) -> None:
    """Those that are part of the identity when they are set, and that every other one exists."""
    tree = ast.parse((source / "atom" / "config.py").read_text())
    (config,) = (
        each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Config"
    )
    fields = {
        each.target.id
        for each in config.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assert NOT_SHAPING - fields == set()
    assert {name for name in fields - NOT_SHAPING if not name.endswith(PLACES)} == {
        "dp_logical_size",
        "enable_dp_attention",
        "enable_low_latency",
        "fake_eplb",
        "load_dummy",
        "moe_backend",
        "moe_ep_flatten_tp_across_dp",
    }
