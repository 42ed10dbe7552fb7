"""The command lines of daemon and sidecar."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.processes import ended_while_importing

from kvtier import __version__
from kvtier.tierd.__main__ import TOKEN_VARIABLE, parser


def test_a_daemon_that_an_engine_starts_is_told_of_its_token_by_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["--topology", "/etc/kvtier/topology"]
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert parser().parse_args(given).token_file is None
    monkeypatch.setenv(TOKEN_VARIABLE, "/etc/kvtier/token/token")
    assert parser().parse_args(given).token_file == Path("/etc/kvtier/token/token")
    assert parser().parse_args([*given, "--token-file", "/other"]).token_file == Path("/other")


def test_a_sidecar_that_is_told_to_end_before_it_has_begun_ends_by_itself() -> None:
    assert ended_while_importing("kvtier.tierd.sidecar_entry", "kvtier.tierd.sidecar_main") == 0


def test_the_sidecars_command_is_the_one_that_can_be_ended_at_once() -> None:
    command = [sys.executable, "-m", "kvtier.tierd.sidecar_entry", "--version"]
    assert (
        subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
        == __version__
    )
