"""How tests get a copy of ATOM's source: once, of one commit, within a deadline."""

from __future__ import annotations

import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.atom_source import (
    MARKER,
    VARIABLE,
    SourceOptions,
    SourceUnavailableError,
    atom_source,
)

CONTENT = "# a scheduler\n"


def git(repository: Path, *arguments: str) -> str:
    """Runs git in a repository, without the user's configuration."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    command = ["git", "-C", str(repository), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceOptions:
    """A repository with a package ``atom``, its only commit, and an empty cache."""
    monkeypatch.delenv(VARIABLE, raising=False)
    origin = tmp_path / "origin"
    (origin / MARKER).parent.mkdir(parents=True)
    (origin / MARKER).write_text(CONTENT)
    git(origin, "init", "--quiet")
    git(origin, "add", ".")
    git(origin, "commit", "--quiet", "--no-gpg-sign", "-m", "first")
    return SourceOptions(tmp_path / "cache", str(origin), git(origin, "rev-parse", "HEAD"))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def test_the_commit_is_fetched_once_and_then_comes_from_the_cache(
    options: SourceOptions, scratch: Path
) -> None:
    found = atom_source(scratch, options)
    assert (found / MARKER).read_text() == CONTENT
    Path(options.repository).rename(scratch / "away")
    assert atom_source(scratch, options) == found
    assert [each.name for each in options.cache.iterdir()] == [options.commit]


def test_several_processes_that_fetch_at_once_get_the_same_copy(
    options: SourceOptions, scratch: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: atom_source(scratch, options), range(4)))
    assert {(each / MARKER).read_text() for each in found} == {CONTENT}
    assert [each.name for each in options.cache.iterdir()] == [options.commit]


def test_another_commit_is_not_taken_for_the_pinned_one(
    options: SourceOptions, scratch: Path
) -> None:
    other = SourceOptions(options.cache, options.repository, "1" * 40)
    with pytest.raises(SourceUnavailableError, match="not our ref"):
        atom_source(scratch, other)
    assert list(options.cache.iterdir()) == []


def test_without_a_network_the_reason_is_gits(options: SourceOptions, scratch: Path) -> None:
    absent = SourceOptions(options.cache, str(scratch / "absent"), options.commit)
    with pytest.raises(SourceUnavailableError, match="repository"):
        atom_source(scratch, absent)
    assert list(options.cache.iterdir()) == []


def test_a_server_that_never_answers_costs_the_deadline(
    options: SourceOptions, scratch: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:
        url = f"git://127.0.0.1:{hung.getsockname()[1]}/atom"
        with pytest.raises(SourceUnavailableError, match="deadline"):
            atom_source(scratch, SourceOptions(options.cache, url, options.commit, 0.5))
    assert list(options.cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_reason(options: SourceOptions, scratch: Path) -> None:
    options.cache.write_text("a file")
    with pytest.raises(SourceUnavailableError, match="cache"):
        atom_source(scratch, options)


def test_a_damaged_copy_is_named(options: SourceOptions, scratch: Path) -> None:
    kept = options.cache / options.commit
    kept.mkdir(parents=True)
    (kept / "other").touch()
    with pytest.raises(SourceUnavailableError, match="remove it"):
        atom_source(scratch, options)


def test_the_variable_names_a_directory_or_a_repository(
    options: SourceOptions, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, options.repository)
    assert atom_source(scratch) == Path(options.repository)
    bare = scratch.parent / "bare"
    git(scratch, "clone", "--quiet", "--bare", options.repository, str(bare))
    monkeypatch.setenv(VARIABLE, str(bare))
    assert atom_source(scratch) == scratch
    assert (scratch / MARKER).read_text() == CONTENT
    monkeypatch.setenv(VARIABLE, str(options.cache))
    with pytest.raises(SourceUnavailableError, match="neither the package nor a repository"):
        atom_source(scratch)


def test_off_uses_no_copy(
    options: SourceOptions, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    with pytest.raises(SourceUnavailableError, match="off"):
        atom_source(scratch, options)
