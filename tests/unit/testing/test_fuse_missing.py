"""``kvtier faults`` where FUSE cannot be used says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from kvtier.scorecard.mount import FaultyMount
home = Path(sys.argv[1])
try:
    FaultyMount(home, home, home / "control", home / "log")
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("ModuleNotFoundError('No module named mfusepy')", "pip install mfusepy"),
        ("OSError('Unable to find libfuse')", "install the package libfuse3"),
    ],
)
def test_a_missing_part_of_fuse_is_named(tmp_path: Path, raised: str, said: str) -> None:
    (tmp_path / "mfusepy.py").write_text(f"raise {raised}")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), *sys.path])
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    (line,) = done.stdout.splitlines()
    assert said in line
    assert "Traceback" not in line + done.stderr
