"""Models with several KV cache groups: every token equals that of an engine without KVTier, with
prompts reloaded from RAM, and from files after a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.hybrid_models import MODELS

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 600
"""Only an engine that hangs takes as long."""
RELOADED_CHUNKS = 7 + 2 + 2 + 4
"""Of the four prompts of ``hybrid_run``: 7 chunks and 5 tokens, 3 chunks (the last token is always
computed), 2 chunks and a token, and 4 chunks of the first one and another."""


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_hybrid_model_is_reloaded_from_ram_and_from_files_with_the_same_tokens(
    name: str, tmp_path: Path
) -> None:
    result = _run(name, tmp_path)
    plain = result["plain"]["tokens"]
    assert len(result["groups"]) > 1
    assert all(len(set(tokens)) > 3 for tokens in plain), "this output would hide wrong KV"
    for engine in ("first", "ram", "restarted"):
        assert result[engine]["tokens"] == plain
    expected = RELOADED_CHUNKS * MODELS[name].chunk_tokens
    assert result["ram"]["loaded"] == {"0": expected}
    assert sum(result["restarted"]["loaded"].values()) == expected
    assert result["restarted"]["loaded"]["1"] > expected / 2
    assert result["failures"] == result["failures_restarted"] == {}


def _run(name: str, directory: Path) -> Any:
    paths = [ROOT / "connector", ROOT, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    script = ROOT / "tests" / "support" / "hybrid_run.py"
    log = directory / "engine.log"
    with log.open("wb") as errors:
        done = subprocess.run(
            [sys.executable, str(script), name, str(directory / "case")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    if done.returncode:
        pytest.fail(f"exit status {done.returncode}:\n{log.read_text()[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
