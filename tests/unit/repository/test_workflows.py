"""The workflows of GitHub, which cannot run here: their form, and that what they run exists.

Keys, jobs and expressions follow the workflow syntax; scripts are parsed by bash; commands come
from a step before, or are installed on the runner; paths, make targets and options exist.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_operator.api.documents import load_policy

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
HEREDOC = re.compile(r"<<'(\w+)'\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
TOP = {"name", "on", "permissions", "concurrency", "jobs"}
JOB = {
    "runs-on", "needs", "timeout-minutes", "permissions", "container", "strategy", "env",
    "defaults", "steps",
}  # fmt: skip
STEP = {"name", "uses", "with", "run", "env", "if"}
CONTEXTS = re.compile(
    r"github\.(workflow|ref|repository_owner)|secrets\.GITHUB_TOKEN|matrix\.\w+|failure\(\)"
)
SHELL = {
    "apt-get", "bash", "basename", "cat", "do", "done", "echo", "for", "helm", "kind", "kubectl",
    "make", "read", "sed", "sudo", "test", "tee", "true", "while",
}  # fmt: skip
"""Of the shell, the base system and GitHub's runners. helm, kind and kubectl are not in a job's
own container."""
RUNNERS_OWN = {"helm", "kind", "kubectl", "make", "sudo"}
BY_PACKAGE = {"buildah": "buildah", "jq": "jq", "python3": "python3"}
BY_ACTION = {"sigstore/cosign-installer": "cosign", "azure/setup-helm": "helm"}
IN_THE_REPOSITORY = re.compile(r"(?<![\w./-])((?:tools|tests|charts|\.ci)/[\w./-]*\w)")


def load(path: Path) -> dict[str, Any]:
    """Without YAML 1.1's booleans: ``on`` is a key."""
    found = yaml.load(path.read_text(), yaml.BaseLoader)
    return dict(found)


def jobs() -> Iterator[Any]:
    for path in FILES:
        for name, job in load(path)["jobs"].items():
            yield pytest.param(job, id=f"{path.stem}-{name}")


def scripts(job: Mapping[str, Any]) -> Iterator[str]:
    """The scripts of a job; expressions stand for a word."""
    for step in job["steps"]:
        if "run" in step:
            yield EXPRESSION.sub("expression", step["run"])


def commands(script: str) -> Iterator[list[str]]:
    """The words of each simple command."""
    script = HEREDOC.sub(" ", script).replace("\\\n", " ")
    for part in re.split(r"\n|\||&&|;|\$\(", script):
        text = re.sub(r"\d?[<>]+&?\S*", " ", part).replace(")", " ")
        try:
            words = shlex.split(text)
        except ValueError:  # a quoted text that a separator cut
            continue
        while words and (words[0] in ("do", "sudo") or re.fullmatch(r"\w+=.*", words[0])):
            words = words[1:]
        if words:
            yield words


def test_there_are_the_workflows_of_tests_chart_and_release() -> None:
    assert {path.stem for path in FILES} == {"ci", "chart", "release"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workflow_has_known_keys_and_least_rights(path: Path) -> None:
    found = load(path)
    assert found.keys() == TOP - ({"concurrency"} if path.stem == "release" else set())
    assert found["permissions"] in ({"contents": "read"}, {})
    for name, job in found["jobs"].items():
        assert job.keys() <= JOB, name
        assert {"runs-on", "timeout-minutes", "steps"} <= job.keys(), name
        assert int(job["timeout-minutes"]) <= 90
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= found["jobs"].keys()


@pytest.mark.parametrize("job", jobs())
def test_a_step_runs_a_script_or_an_action_of_a_version(job: Mapping[str, Any]) -> None:
    for step in job["steps"]:
        assert step.keys() <= STEP
        assert ("run" in step) != ("uses" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|[0-9a-f]{40})", step["uses"])


@pytest.mark.parametrize("job", jobs())
def test_expressions_name_what_exists(job: Mapping[str, Any]) -> None:
    for expression in EXPRESSION.findall(yaml.safe_dump(dict(job))):
        assert CONTEXTS.fullmatch(expression), expression
        if expression.startswith("matrix."):
            assert expression.removeprefix("matrix.") in job["strategy"]["matrix"]


@pytest.mark.parametrize("job", jobs())
def test_bash_can_parse_every_script(job: Mapping[str, Any]) -> None:
    for script in scripts(job):
        done = subprocess.run(
            ["bash", "-n"], input=script, capture_output=True, text=True, timeout=30, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), script


@pytest.mark.parametrize("job", jobs())
def test_every_command_is_there_when_it_runs(job: Mapping[str, Any]) -> None:
    available = SHELL - (RUNNERS_OWN if "container" in job else set())
    for step in job["steps"]:
        action = step.get("uses", "").partition("@")[0]
        if action in BY_ACTION:
            available.add(BY_ACTION[action])
        if action == "actions/setup-python":
            available |= {"python", "python3"}
        for words in commands(EXPRESSION.sub("expression", step.get("run", ""))):
            if words[:2] == ["apt-get", "install"]:
                available |= {name for name, package in BY_PACKAGE.items() if package in words}
            name = words[0]
            if name.startswith(".venv/"):
                assert "make install" in str(job["steps"]), "the environment is not installed"
            elif "/" in name:
                assert (ROOT / name).exists(), name
            else:
                assert name in available, f"{name} in {words}"


@pytest.mark.parametrize("job", jobs())
def test_paths_make_targets_and_options_exist(job: Mapping[str, Any]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for script in scripts(job):
        for path in IN_THE_REPOSITORY.findall(HEREDOC.sub("", script)):
            assert (ROOT / path).exists(), path
        for words in commands(script):
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), words
            if words[0] == "python3":
                known = _help(words[1])
                options = [word for word in words if word.startswith("--")]
                assert [each for each in options if each not in known] == []


@pytest.mark.parametrize("job", jobs())
def test_policies_in_scripts_are_valid(job: Mapping[str, Any]) -> None:
    for script in scripts(job):
        for _, text in HEREDOC.findall(script):
            if "KVTierPolicy" in text:
                assert load_policy(text).spec.tiers


def test_what_is_released_is_what_the_chart_needs() -> None:
    """The archives that the release pushes are those whose digests go into the values."""
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert "python3 tools/images --arch amd64,arm64" in text
    assert text.index("tools/images") < text.index("tools/release") < text.index("helm push")
    assert text.index("helm push") < text.index("cosign sign")


def _help(tool: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / tool), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    "script",
    ["cosign sign x", "kind create cluster", "python3 tools/image --arch amd64", "skopeo copy a b"],
)
def test_a_command_that_is_missing_is_found(script: str) -> None:
    job = {"container": {}, "steps": [{"run": script}]}

    def check() -> None:
        test_every_command_is_there_when_it_runs(job)
        test_paths_make_targets_and_options_exist(job)

    with pytest.raises((AssertionError, subprocess.CalledProcessError)):
        check()
