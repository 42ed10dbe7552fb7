"""Attaching by environment: user configuration wins, and no error stops the engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tests.unit.scheduler.scheduler_testbed import topology

from kvtier.engines.vllm import early_pool, early_start, plugin


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


# Starting tierd early.


class _Supervisor:
    """Counts what is done with it."""

    made: ClassVar[list[_Supervisor]] = []

    def __init__(self, directory: Path, topology: object) -> None:
        self.directory = str(directory)
        self.ensured = 0
        self.abandoned = False
        self.made.append(self)

    def ensure(self) -> None:
        self.ensured += 1

    def abandon(self, timeout_seconds: float) -> None:
        self.abandoned = True


@pytest.fixture
def supervisors(monkeypatch: pytest.MonkeyPatch) -> list[_Supervisor]:
    monkeypatch.setattr(early_start, "Supervisor", _Supervisor)
    monkeypatch.setattr(early_start, "_started", {})
    monkeypatch.setattr(_Supervisor, "made", [])
    monkeypatch.delenv(early_start.ATTACHED_VARIABLE, raising=False)
    return _Supervisor.made


def _in_process(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING", not value, raising=False)


def test_an_engine_in_this_process_gets_its_tierd_before_its_weights(
    directory: str, supervisors: list[_Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _in_process(monkeypatch, True)
    _attach(_Arguments(), directory)
    assert [(each.directory, each.ensured) for each in supervisors] == [(directory, 1)]
    taken = early_start.take(directory, topology())
    assert taken is supervisors[0]
    assert early_start.take(directory, topology()) is not taken, "it has one owner"


def test_an_engine_in_a_process_of_its_own_starts_tierd_there(
    directory: str, supervisors: list[_Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _in_process(monkeypatch, False)
    _attach(_Arguments(), directory)
    assert supervisors == []
    early_start.start_in_engine_process()
    assert supervisors == [], "this is not the engine's process"
    for name in ("EngineCore", "EngineCore_DP1"):
        monkeypatch.setattr(
            "multiprocessing.current_process", lambda n=name: SimpleNamespace(name=n)
        )
        early_start.start_in_engine_process()
    assert len(supervisors) == 1, "vLLM loads plugins repeatedly"


@pytest.mark.parametrize("existing", ["Other", "KVTierConnector"])
def test_a_connector_that_the_user_configured_starts_tierd_if_it_is_this_one(
    directory: str,
    supervisors: list[_Supervisor],
    monkeypatch: pytest.MonkeyPatch,
    existing: str,
) -> None:
    _in_process(monkeypatch, True)
    extra = {"topology": directory}
    configured = {"kv_connector": existing, "kv_connector_extra_config": extra}
    _attach(_Arguments(kv_transfer_config=configured), directory)
    assert len(supervisors) == (existing == "KVTierConnector")


def test_an_engine_without_tiers_gives_its_early_tierd_up(
    directory: str, supervisors: list[_Supervisor]
) -> None:
    early_start.start(directory)
    early_start.abandon(directory)
    early_start.abandon(directory)
    assert [each.abandoned for each in supervisors] == [True]


def test_an_early_start_that_fails_is_left_to_the_connector(
    supervisors: list[_Supervisor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    early_start.start(str(tmp_path / "missing"))
    assert supervisors == []
    assert "not before" in caplog.text


def test_without_the_plugin_vllms_configuration_of_the_connector_starts_tierd(
    directory: str, supervisors: list[_Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.engines.vllm.connector import KVTierConnector

    _in_process(monkeypatch, True)
    assert not KVTierConnector.requires_piecewise_for_cudagraph({"topology": directory})
    assert [each.directory for each in supervisors] == [directory]


def test_importing_the_connector_lets_kvtier_see_the_weights() -> None:
    from kvtier.engines.vllm import connector, weights

    assert connector.KVTierConnector
    assert weights._models.installed
    assert weights._models.on_model is early_pool.begin


def test_the_core_of_an_engine_starts_tierd_before_its_workers(
    directory: str, supervisors: list[_Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.core import EngineCore

    from kvtier.engines.vllm import connector

    assert connector.KVTierConnector
    monkeypatch.setenv(early_start.ATTACHED_VARIABLE, directory)
    monkeypatch.setattr(
        "multiprocessing.current_process", lambda: SimpleNamespace(name="EngineCore")
    )
    with pytest.raises(TypeError):
        EngineCore()  # type: ignore[call-arg]
    assert [each.directory for each in supervisors] == [directory]
