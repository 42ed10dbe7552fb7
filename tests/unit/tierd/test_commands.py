"""The command lines of daemon and sidecar."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.processes import ended_while_importing

from kvtier import __version__
from kvtier.tierd.__main__ import TOKEN_VARIABLE, parser


def test_a_variable_names_the_token_file_of_a_tierd_that_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["--topology", "/etc/kvtier/topology"]
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert parser().parse_args(given).token_file is None
    monkeypatch.setenv(TOKEN_VARIABLE, "/etc/kvtier/token/token")
    assert parser().parse_args(given).token_file == Path("/etc/kvtier/token/token")
    assert parser().parse_args([*given, "--token-file", "/other"]).token_file == Path("/other")


def test_a_sidecar_exits_on_sigterm_during_its_imports() -> None:
    assert ended_while_importing("kvtier.tierd.sidecar", "kvtier.tierd.sidecar_supervisor") == 0


def test_the_module_runs_the_sidecar_command() -> None:
    command = [sys.executable, "-m", "kvtier.tierd.sidecar", "--version"]
    assert (
        subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
        == __version__
    )
