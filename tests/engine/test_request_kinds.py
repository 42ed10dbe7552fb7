"""Every kind of request on a real engine: what it answers equals what an engine without KVTier
answers, while prompts are reloaded from RAM and, after a restart, from files. Kinds that cannot be
reloaded take no part, and the engine's metrics say why.

LoRA adapters are in ``test_lora.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 900
"""Only an engine that hangs takes as long."""
CHUNK = 64
PROMPT = 4 * CHUNK
IMAGE_PROMPT = 5 * CHUNK
"""Whole chunks of the text and its image."""
PASSES = ("first", "RAM", "restarted")
SERVED = {
    "log-probabilities": PROMPT,
    "after-prompt-log-probabilities": PROMPT,
    "several-completions": PROMPT,
    "beam-search": PROMPT,
    "structured-output": PROMPT,
    "images": 2 * IMAGE_PROMPT,
}
"""Tokens that a reload brings at least: all whole chunks of the prompts."""
SKIPPED = {
    "prompt-log-probabilities": "not_read",
    "prompt-embeddings": "prompt_embeds",
    "streaming-input": "streaming_session",
}
TOLERANCE = 1e-3
"""Of log-probabilities: with a prefix loaded, the engine computes in pieces of other sizes."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if "KVTIER" not in name}
    path = [str(ROOT / "connector"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    directory = tmp_path_factory.mktemp("kinds")
    script = ROOT / "tests/support/request_kinds.py"
    ended = subprocess.run(
        [sys.executable, str(script), str(directory / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def _same(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    assert answer.get("tokens") == expected.get("tokens")
    assert answer.get("numbers", []) == pytest.approx(expected.get("numbers", []), abs=TOLERANCE)
    assert expected.get("tokens") or expected.get("numbers")


@pytest.mark.parametrize("run", PASSES)
@pytest.mark.parametrize("kind", [*SERVED, *SKIPPED])
def test_the_answer_equals_that_of_an_engine_without_kvtier(
    results: dict[str, Any], kind: str, run: str
) -> None:
    answer = results[f"generation, {run}"][kind]
    _same(answer, results["generation"][kind])
    assert answer["failed"] == {}


@pytest.mark.parametrize("kind", SERVED)
def test_what_can_be_reloaded_is(results: dict[str, Any], kind: str) -> None:
    from_ram = results["generation, RAM"][kind]
    # RAM is empty after the restart, so what is loaded comes from files. A request that has waited
    # (for a grammar, or behind another completion) may find its prefix prefetched into RAM.
    from_files = results["generation, restarted"][kind]
    assert from_ram["loaded"].get("ram", 0) >= SERVED[kind]
    assert sum(from_files["loaded"].values()) >= SERVED[kind] or _ended_early(from_files)
    assert from_ram["skipped"] == from_files["skipped"] == {}


def test_ram_is_empty_after_the_restart(results: dict[str, Any]) -> None:
    first_kind = results["generation, restarted"]["log-probabilities"]
    assert first_kind["loaded"] == {"disk": PROMPT} or _ended_early(first_kind)
    assert "ram" not in first_kind["loaded"]


def _ended_early(answer: dict[str, Any]) -> set[str]:
    """How promotions ended that brought less than they should: on a machine so busy that their
    deadline passed. The rest was computed."""
    return set(answer["promotions"]) - {"whole", "early"}


@pytest.mark.parametrize("kind", SKIPPED)
def test_what_takes_no_part_loads_nothing_and_is_counted_by_reason(
    results: dict[str, Any], kind: str
) -> None:
    for run in PASSES:
        answer = results[f"generation, {run}"][kind]
        assert answer["loaded"] == {}
        assert set(answer["skipped"]) == {SKIPPED[kind]}


@pytest.mark.parametrize("kind", ["prompt-embeddings", "streaming-input"])
def test_what_takes_no_part_stores_nothing(results: dict[str, Any], kind: str) -> None:
    assert results["generation, first"][kind]["stored"] == 0


def test_prompt_log_probabilities_are_computed_whole_and_their_kv_is_stored(
    results: dict[str, Any],
) -> None:
    first = results["generation, first"]
    assert first["prompt-log-probabilities"]["stored"] == PROMPT // CHUNK
    assert first["after-prompt-log-probabilities"]["loaded"] == {"ram": PROMPT}


def test_equal_text_around_another_image_shares_only_what_comes_before_it(
    results: dict[str, Any],
) -> None:
    one, other = results["generation"]["images"]["tokens"]
    assert one != other
    assert results["generation, first"]["images"]["loaded"] == {"ram": CHUNK}


@pytest.mark.parametrize("method", ["draft_model", "eagle", "ngram"])
def test_speculative_decoding_answers_as_the_model_alone(
    results: dict[str, Any], method: str
) -> None:
    expected = results["speculation"]["speculative"]
    for run in ("first", "RAM"):
        answer = results[f"{method}, {run}"]["speculative"]
        _same(answer, expected)
        assert answer["drafts"] > 0
    assert results[f"{method}, RAM"]["speculative"]["loaded"] == {"ram": 2 * PROMPT}


def test_embeddings_are_computed_from_reloaded_prompts(results: dict[str, Any]) -> None:
    for run in ("first", "RAM"):
        _same(results[f"pooling, {run}"]["embedding"], results["pooling"]["embedding"])
    assert results["pooling, RAM"]["embedding"]["loaded"] == {"ram": 2 * PROMPT}
