"""The daemon's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.tierd.__main__ import TOKEN_VARIABLE, parser


def test_a_daemon_that_an_engine_starts_is_told_of_its_token_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--topology", "/etc/kvtier/topology"]
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert parser().parse_args(given).token_file is None
    monkeypatch.setenv(TOKEN_VARIABLE, "/etc/kvtier/token/token")
    assert parser().parse_args(given).token_file == Path("/etc/kvtier/token/token")
    assert parser().parse_args([*given, "--token-file", "/other"]).token_file == Path("/other")
