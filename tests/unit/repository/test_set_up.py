"""The commands that a newcomer types."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
TARGETS = (
    "install",
    "demo",
    "test",
    "test-unit",
    "test-engine",
    "test-cluster",
    "lint",
    "bench",
    "constraints",
    "clean",
    "help",
)
TOOLS = ("tools/install", "tools/uv", "tools/debian-packages", ".ci/run")
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str, **variables: str) -> str:
    command = [
        "make",
        "--no-print-directory",
        *arguments,
        *(f"{name}={value}" for name, value in variables.items()),
    ]
    return subprocess.run(
        command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=60
    ).stdout


@needs_make
def test_help_lists_every_target_with_what_it_is_for() -> None:
    listed = dict(line.split(maxsplit=1) for line in make("help").splitlines())
    assert set(TARGETS) <= set(listed)
    assert all(listed.values())


@needs_make
def test_make_alone_shows_the_help_and_does_nothing() -> None:
    assert make() == make("help")


@needs_make
def test_the_demo_with_an_installed_vllm_installs_nothing() -> None:
    commands = make("--dry-run", "demo", KVTIER_VLLM="/opt/vllm/bin/python")
    assert "tools/install" not in commands
    assert "/opt/vllm/bin/python -m kvtier.cli.demo" in commands
    assert "PYTHONPATH=connector:operator" in commands.replace('"', "")


@needs_make
def test_the_demo_without_one_installs_first() -> None:
    commands = make("--dry-run", "demo", KVTIER_VLLM="").splitlines()
    assert commands[0] == "tools/install"
    assert commands[1].endswith("-m kvtier.cli.demo")


@needs_make
def test_the_test_run_lints_before_it_tests() -> None:
    commands = make("--dry-run", "test")
    assert commands.index("ruff check") < commands.index("mypy") < commands.index("-m pytest")


def test_continuous_integration_runs_what_a_developer_runs() -> None:
    assert "make test" in (REPOSITORY / ".ci" / "run").read_text()
    assert ".ci/run" in (REPOSITORY / ".github" / "workflows" / "ci.yml").read_text()


@pytest.mark.parametrize("tool", TOOLS)
def test_shell_tools_are_valid_and_executable(tool: str) -> None:
    path = REPOSITORY / tool
    assert path.stat().st_mode & 0o100
    subprocess.run(["bash", "-n", path], check=True, timeout=30)


def test_every_debian_package_names_its_command_and_its_reason() -> None:
    rows = [
        line
        for line in (REPOSITORY / "tools" / "debian-packages.txt").read_text().splitlines()
        if line[0] != "#"
    ]
    assert rows
    for row in rows:
        assert re.fullmatch(r"[a-z0-9.+-]+ +\S+ +\S.+", row), row


def test_the_installation_is_not_repeated_when_nothing_changed(tmp_path: Path) -> None:
    project = a_project(tmp_path / "project")
    assert installed(project) == ["venv", "pip install"]
    assert installed(project) == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "overrides.txt"])
def test_the_installation_is_repeated_when_what_it_depends_on_changed(
    tmp_path: Path, name: str
) -> None:
    project = a_project(tmp_path / "project")
    installed(project)
    with (project / name).open("a") as file:
        file.write("\n")
    assert installed(project) == ["pip install"]


def test_a_failed_installation_is_retried(tmp_path: Path) -> None:
    project = a_project(tmp_path / "project")
    assert installed(project, fails=True) == ["venv", "pip install"]
    assert installed(project) == ["pip install"]


def test_a_moved_checkout_gets_a_new_environment(tmp_path: Path) -> None:
    project = a_project(tmp_path / "project")
    installed(project)
    moved = project.rename(tmp_path / "moved")
    assert installed(moved) == ["venv", "pip install"]


def a_project(directory: Path) -> Path:
    """A checkout with the real ``tools/install`` and a ``tools/uv`` that records its arguments."""
    (directory / "tools").mkdir(parents=True)
    shutil.copy(REPOSITORY / "tools" / "install", directory / "tools")
    for name in ("pyproject.toml", "constraints.txt", "overrides.txt"):
        (directory / name).write_text(f"# {name}\n")
    uv = directory / "tools" / "uv"
    uv.write_text(
        "#!/bin/sh\n"
        'program() { echo "#!/bin/sh" > "$1"; chmod +x "$1"; }\n'
        'case "$1" in\n'
        "    venv) echo venv >> uv_calls; mkdir -p .venv/bin; program .venv/bin/python ;;\n"
        '    pip) echo "$1 $2" >> uv_calls; [ ! -e fails ] || exit 1; program .venv/bin/kvtier ;;\n'
        "esac\n"
    )
    uv.chmod(0o755)
    return directory


def installed(project: Path, fails: bool = False) -> list[str]:
    """Runs ``tools/install``; the calls of uv, in order."""
    (project / "uv_calls").write_text("")
    if fails:
        (project / "fails").touch()
    answer = subprocess.run(
        [project / "tools" / "install"], capture_output=True, text=True, timeout=60
    )
    (project / "fails").unlink(missing_ok=True)
    assert (answer.returncode != 0) is fails, answer.stderr
    return (project / "uv_calls").read_text().splitlines()
