"""``docs/lmcache-engine.md`` documents the configuration that the code reads, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from kvtier.engines.atom import cache_engine_config
from kvtier.engines.atom.cache_engine_config import OPTIONS, options_of
from kvtier.engines.common import atom_plugin
from kvtier.engines.lmcache import config as lmcache_config
from kvtier.tiers.lmcache.wire import LMCACHE_VERSION

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "lmcache-engine.md").read_text()
OF_ATOM = {"kv_connector", "kv_role", "engine_id"}
"""Options that ATOM's own documentation describes."""


def table(head: str) -> list[list[str]]:
    """The cells of the rows below a table's head."""
    lines = iter(PAGE.splitlines())
    for line in lines:
        if line.strip().startswith(f"| {head}"):
            break
    next(lines)
    rows = []
    for line in lines:
        if not line.strip().startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return rows


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_option_of_lmcaches_file_that_is_accepted_is_documented() -> None:
    documented = [name for row in table("Option | Requirement") for name in names(row[0])]
    assert sorted(documented) == sorted(lmcache_config.OPTIONS)


def test_every_option_and_variable_of_the_connector_is_documented() -> None:
    rows = {names(row[0])[0]: row for row in table("Option of `kv_transfer_config`")}
    assert set(rows) == OPTIONS - OF_ATOM
    variables = {name: names(row[1]) for name, row in rows.items() if names(row[1])}
    read = {"lmcache_config": atom_plugin.LMCACHE_VARIABLE, **atom_plugin.LMCACHE_OPTIONS}
    assert variables == {name: [variable] for name, variable in read.items()}


def test_the_documented_defaults_are_those_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_engine_config, "require_lmcache", lambda: None)
    path = tmp_path / "lmcache.yaml"
    path.write_text("")
    options = options_of(SimpleNamespace(kv_transfer_config={"lmcache_config": str(path)}))
    defaults = {names(row[0])[0]: row[2] for row in table("Option of `kv_transfer_config`")}
    assert float(defaults["lookup_seconds"]) == options.lookup_seconds
    assert float(defaults["load_seconds"]) == options.load_seconds
    found = str(options.run_directory)
    assert re.fullmatch(names(defaults["run_directory"])[0].replace("UID", r"\d+"), found)
    assert (
        f"default {options.file.chunk_tokens} "
        in " ".join(row[1] for row in table("Option | Requirement")).replace("|", " ") + " "
    )
    minimum = re.search(r"`OFFLOAD_MIN_LOAD_TOKENS` \(default (\d+)\)", PAGE)
    assert minimum is not None
    assert int(minimum[1]) == options.topology().live.min_load_tokens


def test_the_documented_example_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_engine_config, "require_lmcache", lambda: None)
    found = re.search(r"--kv-transfer-config '(\{.*?\})'", PAGE, re.DOTALL)
    assert found is not None
    given = json.loads(found[1])
    path = tmp_path / "lmcache.yaml"
    path.write_text(yaml.safe_dump({"chunk_size": 256, "local_cpu": True}))
    given["lmcache_config"] = str(path)
    assert options_of(SimpleNamespace(kv_transfer_config=given)).file.path == path
    assert given["kv_connector"] == atom_plugin.LMCACHE_CONNECTOR_NAME
    assert f"`lmcache` {LMCACHE_VERSION}" in PAGE
