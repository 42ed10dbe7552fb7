"""``kvtier explain-plan``: which prefix an engine would load."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[3]
POLICY = str(REPOSITORY / "examples" / "three-tiers.yaml")
H200 = ("--alpha", "22.3e-6", "--beta", "2.1e-10")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process; returns its JSON."""

    def run(*arguments: object) -> Any:
        capsys.readouterr()
        status = main(["explain-plan", *map(str, arguments), "--file", POLICY, "--json"])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return json.loads(captured.out)

    return run


@pytest.fixture
def failure(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command, which must fail; returns the message."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        status = main(["explain-plan", *map(str, arguments)])
        captured = capsys.readouterr()
        assert (status, captured.out) == (2, "")
        return captured.err

    return run


def test_a_fast_tier_is_chosen_with_estimates_and_deadline(plan: Any) -> None:
    found = plan(8192, "--held", "nvme=8192", "--speed", "nvme=0.1,20", *H200)
    assert found["chosen"]["tokens"] == 8192
    assert found["reason"] == "least_time"
    assert found["recomputeSeconds"] == pytest.approx(0.19677, rel=1e-3)
    assert found["deadline"] == {
        "seconds": pytest.approx(0.5 * found["recomputeSeconds"]),
        "limitSeconds": 5.0,
    }
    assert found["chosen"]["readySeconds"] == pytest.approx(4 * 1e-4 + 8192 * 131_072 / 20e9)


def test_a_slow_tier_is_not_chosen(plan: Any) -> None:
    found = plan(8192, "--held", "nvme=8192", "--speed", "nvme=0.1,1", *H200)
    assert (found["chosen"], found["reason"], found["tooSlow"], found["deadline"]) == (
        None,
        "recomputing_is_faster",
        ["nvme"],
        None,
    )
    assert found["candidates"][0]["limitedByDeadline"]


def test_a_queue_can_make_a_fast_tier_too_slow(plan: Any) -> None:
    arguments = (8192, "--held", "nvme=8192", "--speed", "nvme=0.1,20", *H200)
    assert plan(*arguments)["chosen"]
    assert plan(*arguments, "--queued", "nvme=200")["chosen"] is None


def test_tokens_in_the_gpu_cache_are_neither_loaded_nor_recomputed(plan: Any) -> None:
    found = plan(8192, "--held", "nvme=8192", "--in-gpu", 4096, "--speed", "nvme=0.1,20", *H200)
    assert found["chosen"]["tokens"] == 4096
    assert found["recomputeSeconds"] < 0.12


def test_without_a_speed_of_the_engine_the_longest_is_loaded(plan: Any) -> None:
    found = plan(8192, "--held", "ram=512", "--held", "shared=4096")
    assert (found["chosen"]["tokens"], found["reason"]) == (4608, "longest_without_estimate")
    assert found["deadline"] == {"seconds": 10.0, "limitSeconds": 10.0}


def test_tokens_per_second_are_enough_of_a_speed(plan: Any) -> None:
    found = plan(
        8192, "--held", "nvme=8192", "--tokens-per-second", 40_960, "--speed", "nvme=0.1,20"
    )
    assert found["recomputeSeconds"] == pytest.approx(0.2)


def test_weighted_shows_scores(plan: Any) -> None:
    found = plan(8192, "--held", "nvme=4096", "--held", "shared=2048", "--selection", "Weighted")
    assert [candidate["score"] for candidate in found["candidates"]] == [409_600, 307_200]
    assert (found["chosen"]["tiers"], found["reason"]) == (["nvme"], "highest_score")


def test_less_than_min_load_tokens_is_not_loaded(plan: Any) -> None:
    for selection in ("Cost", "Weighted"):
        found = plan(8192, "--held", "ram=256", "--selection", selection)
        assert (found["chosen"], found["reason"]) == (None, "below_min_load_tokens")


def test_a_topology_directory_replaces_the_policy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policy = REPOSITORY / "examples" / "demo-policy.yaml"
    assert main(["render", "--file", str(policy), "--topology", str(tmp_path / "topology")]) == 0
    capsys.readouterr()
    arguments = ["1024", "--topology", str(tmp_path / "topology"), "--held", "ram=512", "--json"]
    assert main(["explain-plan", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["selection"], found["chosen"]["tokens"]) == ("Weighted", 512)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--held", "nvme=100"), "must be a multiple of the chunk size (256 tokens)"),
        (("--held", "nvme=-256"), "must be a multiple of the chunk size (256 tokens)"),
        (("--held", "tape=256"), "must be one of the tiers: ram, nvme, shared"),
        (("--held", "nvme"), "must have the form NAME=TOKENS"),
        (("--held", "nvme=16384"), "must be at most the prompt (8192 tokens) in total"),
        (("--held", "nvme=512", "--speed", "nvme=1"), "in the form NAME=MS,GB/S"),
        (("--held", "nvme=512", "--speed", "nvme=1,0"), "must be positive"),
        (("--held", "nvme=512", "--speed", "nvme=nan,1"), "must be a finite number"),
        (("--held", "nvme=512", "--speed", "nvme=-1,1"), "must have a latency of 0 or more"),
        (("--held", "nvme=512", "--alpha", "-1"), "must not be negative"),
        (
            ("--held", "nvme=512", "--alpha", "1", "--tokens-per-second", "3"),
            "must not be combined with --tokens-per-second",
        ),
        (("--held", "nvme=512", "--tokens-per-second", "0"), "must be positive"),
        (
            ("--held", "nvme=512", "--in-gpu", "9000"),
            "must be between 0 and the prompt (8192 tokens)",
        ),
        (("--held", "nvme=512", "--queued", "nvme=x"), "in the form NAME=CHUNKS"),
        (("--held", "nvme=512", "--queued", "nvme=-1"), "must be a number of chunks"),
        (("--held", "nvme=256e18"), "must be at most the prompt (8192 tokens) in total"),
    ],
)
def test_an_invalid_option_is_an_error_with_the_requirement(
    failure: Any, arguments: tuple[str, ...], message: str
) -> None:
    assert message in failure(8192, "--file", POLICY, *arguments)


def test_exactly_one_of_policy_and_topology_is_required(failure: Any, tmp_path: Path) -> None:
    assert "either --file or --topology is required" in failure(8192, "--held", "ram=512")
    assert "must not be combined with --file" in failure(
        8192, "--held", "ram=512", "--file", POLICY, "--topology", tmp_path
    )


def test_the_examples_in_the_documents_are_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    page = (REPOSITORY / "docs" / "selection.md").read_text()
    shown = re.findall(
        r"^```console\n\$ kvtier (explain-plan [^\n]*)\n(.*?)```", page, re.MULTILINE | re.DOTALL
    )
    assert len(shown) == 3
    for command, output in shown:
        capsys.readouterr()
        assert main(shlex.split(command)) == 0
        printed = capsys.readouterr().out
        assert "\n".join(line.rstrip() for line in printed.splitlines()) + "\n" == output
