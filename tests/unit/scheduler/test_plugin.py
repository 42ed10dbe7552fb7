"""Attaching by environment: user configuration wins, and no error stops the engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.scheduler.scheduler_testbed import topology

from kvtier.engines.vllm import plugin


class _Arguments:
    """EngineArgs as far as the plugin looks at them."""

    def __init__(self, **values: Any) -> None:
        self.kv_transfer_config: Any = None
        self.kv_offloading_size = None
        self.encoder_decoder = False
        self.refuses = False
        self.__dict__.update(values)

    def create(self) -> Any:
        if self.refuses and self.kv_transfer_config is not None:
            raise ValueError("not with a connector")
        return SimpleNamespace(
            kv_transfer_config=self.kv_transfer_config,
            model_config=SimpleNamespace(is_encoder_decoder=self.encoder_decoder),
        )


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "structural.json").write_text(topology().structural.model_dump_json(by_alias=True))
    return str(tmp_path)


def _attach(arguments: _Arguments, directory: str) -> Any:
    return plugin.attach(arguments, directory, arguments.create).kv_transfer_config


def test_the_connector_is_attached_where_none_is_configured(directory: str) -> None:
    transfer = _attach(_Arguments(), directory)
    assert transfer.kv_connector == "KVTierConnector"
    assert transfer.kv_role == "kv_both"
    assert transfer.kv_load_failure_policy == "recompute"
    assert transfer.kv_connector_extra_config == {"topology": directory}


@pytest.mark.parametrize(
    "existing",
    [{"kv_connector": "Other"}, SimpleNamespace(kv_connector="Other")],
    ids=["dict", "object"],
)
def test_a_user_configured_connector_takes_precedence(
    directory: str, existing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert _attach(_Arguments(kv_transfer_config=existing), directory) is existing
    assert "Other" in caplog.text
    assert len(caplog.records) == 1


def test_vllms_own_offloading_takes_precedence(directory: str) -> None:
    assert _attach(_Arguments(kv_offloading_size=4.0), directory) is None


@pytest.mark.parametrize("content", [None, "", "{}", '{"schemaVersion": 99}'])
def test_a_topology_that_cannot_be_read_is_one_log_line(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (tmp_path / "structural.json").write_text(content)
    assert _attach(_Arguments(), str(tmp_path)) is None
    assert len([record for record in caplog.records if "not attached" in record.message]) == 1


def test_a_topology_for_another_engine_type_is_not_used(tmp_path: Path) -> None:
    structural = topology().structural.model_copy(update={"engine_type": "ATOM"})
    (tmp_path / "structural.json").write_text(structural.model_dump_json(by_alias=True))
    assert _attach(_Arguments(), str(tmp_path)) is None


def test_encoder_decoder_models_start_without_kvtier(directory: str) -> None:
    assert _attach(_Arguments(encoder_decoder=True), directory) is None


def test_an_engine_that_rejects_the_connector_starts_without_it(
    directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert _attach(_Arguments(refuses=True), directory) is None
    assert "not with a connector" in caplog.text


def test_an_engine_that_cannot_start_raises_its_own_error(directory: str) -> None:
    def create() -> Any:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        plugin.attach(_Arguments(), directory, create)


def test_without_the_variable_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    before = EngineArgs.create_engine_config
    monkeypatch.delenv(plugin.TOPOLOGY_VARIABLE, raising=False)
    plugin.register()
    monkeypatch.setenv(plugin.TOPOLOGY_VARIABLE, "  ")
    plugin.register()
    assert EngineArgs.create_engine_config is before


def test_registering_twice_wraps_once(monkeypatch: pytest.MonkeyPatch, directory: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    before = EngineArgs.create_engine_config
    monkeypatch.setenv(plugin.TOPOLOGY_VARIABLE, directory)
    plugin.register()
    wrapped = EngineArgs.create_engine_config
    plugin.register()
    assert wrapped is not before
    assert EngineArgs.create_engine_config is wrapped


def test_an_unsupported_vllm_is_one_log_line(
    monkeypatch: pytest.MonkeyPatch, directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.delattr(EngineArgs, "create_engine_config")
    monkeypatch.setenv(plugin.TOPOLOGY_VARIABLE, directory)
    plugin.register()
    assert "not attached" in caplog.text


def test_the_variable_configures_another_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "KVTIER_TRANSFER_CONFIG",
        '{"kv_connector":"OffloadingConnector","kv_role":"kv_both",'
        '"kv_connector_extra_config":{"block_size":64}}',
    )
    transfer = _attach(_Arguments(), "")
    assert transfer.kv_connector == "OffloadingConnector"
    assert transfer.kv_connector_extra_config == {"block_size": 64}
    existing = {"kv_connector": "Other"}
    assert _attach(_Arguments(kv_transfer_config=existing), "") is existing


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "7",
        '{"kv_role": "both"}',
        '{"kv_connector": "X", "unknown_field": 1}',
        '{"kv_connector": "NoSuch", "kv_role": "kv_both"}',
    ],
)
def test_an_invalid_variable_is_one_log_line(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVTIER_TRANSFER_CONFIG", text)
    assert _attach(_Arguments(), "") is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
