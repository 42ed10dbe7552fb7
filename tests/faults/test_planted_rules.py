"""The tests of a rule fail without it: each rule that ended a fault is taken away, and its tests
must notice that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 600
"""Only a test that hangs takes as long."""


@pytest.mark.slow
def test_the_tests_of_each_rule_fail_without_it(tmp_path: Path) -> None:
    paths = [ROOT / "connector", ROOT / "operator", ROOT, os.environ.get("PYTHONPATH", "")]
    log = tmp_path / "log"
    with log.open("wb") as errors:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "support" / "planted_rules.py")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(str, paths)))},
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 15
    unnoticed = {
        name: result
        for name, result in found.items()
        if result["status"] != pytest.ExitCode.TESTS_FAILED or not result["failed"]
    }
    assert not unnoticed, log.read_text()[-4000:]
