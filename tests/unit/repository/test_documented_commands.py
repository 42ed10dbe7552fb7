"""Every command in the documentation is run here, or is marked with what it needs.

A fenced block without a language, or with ``console``, holds commands. A comment before it says
``<!-- run -->``: this test runs it in an empty directory. Or it says what the block needs, as in
``<!-- needs: cluster -->``: a cluster, a GPU, root, an engine (``make demo`` and the like) or
storage. Whatever the mark, options of ``kvtier`` must exist. Blocks of other languages hold no
commands.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.main import get_command

from kvtier.cli.app import app
from kvtier.cli.main import main
from kvtier.harness.file_writers import make, open_tier

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
FENCE = re.compile(
    r"(?P<mark>^[ ]*<!-- (?P<text>[^\n]*?) -->\n)?"
    r"^(?P<indent>[ ]*)(?P<fence>```|~~~)(?P<language>[^\n]*)\n(?P<body>.*?)^(?P=indent)(?P=fence)",
    re.MULTILINE | re.DOTALL,
)
COMMAND_LANGUAGES = ("", "console", "sh", "bash", "shell")
OTHER_LANGUAGES = ("text", "yaml", "json", "promql", "python")
NEEDS = {"cluster", "gpu", "root", "engine", "storage"}
PROGRAMS = (
    "kubectl",
    "helm",
    "kvtier",
    "kvtier-tierd",
    "kvtier-sidecar",
    "make",
    "curl",
    "pip",
    "install",
)
STARTS = re.compile(rf"(?:\$ )?(?:{'|'.join(PROGRAMS)}) ")
POLICY = re.compile(r"^( *)```yaml\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block. ``mark``: the comment before it. ``lines``: without indentation."""

    page: Path
    mark: str
    language: str
    lines: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}: {self.lines[0] if self.lines else ''}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for found in FENCE.finditer(page.read_text(encoding="utf-8")):
            indent = len(found["indent"])
            lines = tuple(line[indent:] for line in found["body"].splitlines())
            yield Block(page, found["text"] or "", found["language"].strip(), lines)


BLOCKS = list(blocks())
COMMANDS = [each for each in BLOCKS if each.language in COMMAND_LANGUAGES]
RUN = [each for each in COMMANDS if each.mark == "run"]


def commands(block: Block) -> list[tuple[list[str], str]]:
    """The commands of a block, and what the page shows as the output of each."""
    prompted = any(line.startswith("$ ") for line in block.lines)
    found: list[tuple[str, list[str]]] = []
    for line in "\n".join(block.lines).replace("\\\n", " ").splitlines():
        if prompted and not line.startswith("$ "):
            found[-1][1].append(line)
        elif line.strip() and not line.lstrip().startswith("#"):
            found.append((line.removeprefix("$ "), []))
    return [(shlex.split(line, comments=True), "\n".join(output)) for line, output in found]


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.name)
def test_a_block_with_commands_is_run_or_says_what_it_needs(block: Block) -> None:
    needed = re.fullmatch(r"needs: ([a-z, ]+)", block.mark)
    if needed is None:
        assert block.mark == "run", "put <!-- run --> or <!-- needs: ... --> before the block"
        return
    assert set(needed[1].split(", ")) <= NEEDS


def test_other_blocks_hold_no_commands() -> None:
    hidden = [
        each.name
        for each in BLOCKS
        if each.language not in COMMAND_LANGUAGES and any(STARTS.match(line) for line in each.lines)
    ]
    assert hidden == []
    assert {each.language for each in BLOCKS} <= {*COMMAND_LANGUAGES, *OTHER_LANGUAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_are_in_fences(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    loose = [line for line in text.splitlines() if re.match(" {4,}", line)]
    loose = [line for line in loose if STARTS.match(line.strip())]
    assert loose == []


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.name)
def test_options_of_kvtier_exist(block: Block) -> None:
    root: Any = get_command(app)
    for arguments, _ in commands(block):
        if arguments[:2] == ["kubectl", "kvtier"]:
            arguments = arguments[1:]
        if arguments[:1] != ["kvtier"]:
            continue
        command = root.commands.get(arguments[1])
        assert command is not None, arguments
        # Raises for an option or a value that does not exist.
        command.make_context(arguments[1], arguments[2:])


def _set_paths(arguments: list[str]) -> Iterator[str]:
    """The values that a helm command sets."""
    for option, value in pairwise(arguments):
        if option in ("--set", "--set-json", "--set-string"):
            yield value.partition("=")[0]


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.name)
def test_values_that_helm_sets_exist(block: Block) -> None:
    values = yaml.safe_load((REPOSITORY / "charts/kvtier/values.yaml").read_text())
    for arguments, _ in commands(block):
        for path in _set_paths(arguments) if arguments[0] == "helm" else ():
            place: Any = values
            for part in path.split("."):
                assert part in place, path
                place = place[part]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, which is also the home directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "mnt/nvme/kv").mkdir(parents=True)
    tier = open_tier(tmp_path / "tier", 1 << 26)
    for seed in range(4):
        tier.write(*make(seed))
    tier.close()
    return tmp_path


def policy_of(page: Path) -> str:
    """The page's first policy, or that of an example."""
    for indent, body in POLICY.findall(page.read_text(encoding="utf-8")):
        if "kind: KVTierPolicy" in body:
            return "\n".join(line[len(indent) :] for line in body.splitlines())
    return (REPOSITORY / "examples/ram-and-disk.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
def test_a_marked_block_runs(block: Block, scratch: Path) -> None:
    policy = policy_of(block.page).replace("/mnt/nvme", f"{scratch}/mnt/nvme")
    for name in ("chat.yaml", "policy.yaml"):
        (scratch / name).write_text(policy)
    for arguments, output in commands(block):
        assert arguments[0] == "kvtier", "only kvtier can be run here"
        given = [_local(each, scratch) for each in arguments[1:]]
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            assert main(given) == 0, shown.getvalue()
        if output:
            assert [line.rstrip() for line in shown.getvalue().splitlines()] == [
                line.rstrip() for line in output.splitlines()
            ]


def _local(argument: str, scratch: Path) -> str:
    """Places of the page as places of this test."""
    if argument in ("DIR", "DIRECTORY"):
        return str(scratch / "tier")
    return os.path.expanduser(argument.replace("/mnt/nvme", f"{scratch}/mnt/nvme"))


def test_the_rules_find_what_they_are_for(tmp_path: Path) -> None:
    command = "<!-- run -->\n```\nkvtier validate \\\n  a.yaml  # why\n```\n"
    text = f"{command}\n1. x\n\n   ```text\n   a\n   ```\n"
    (first, second) = FENCE.finditer(text)
    assert (first["text"], first["language"], second["language"]) == ("run", "", "text")
    block = Block(tmp_path, "run", "", tuple(first["body"].splitlines()))
    assert commands(block) == [(["kvtier", "validate", "a.yaml"], "")]
    shown = Block(tmp_path, "run", "console", ("$ kvtier x", "out 1", "out 2", "$ kvtier y"))
    assert commands(shown) == [(["kvtier", "x"], "out 1\nout 2"), (["kvtier", "y"], "")]


def test_a_good_part_is_run() -> None:
    assert len(RUN) >= 10
    kinds: dict[str, Any] = {}
    for each in COMMANDS:
        kinds.setdefault(each.mark, []).append(each.name)
    assert set(kinds) > {"run", "needs: cluster"}
