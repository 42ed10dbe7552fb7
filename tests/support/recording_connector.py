"""A KV connector that notes every call of a hook, and answers or raises as a test says."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

CALLS: list[tuple[str, str, tuple[Any, ...]]] = []
"""(name of the child, hook, arguments)."""
ANSWERS: dict[tuple[str, str], Any] = {}
"""By name of the child and hook: what it returns; an exception is raised."""
CLASS_HOOKS: dict[str, Any] = {
    "build_kv_connector_stats": None,
    "build_prom_metrics": None,
    "get_required_kvcache_layout": None,
    "requires_piecewise_for_cudagraph": False,
    "supports_sleep_mode": True,
}
PROPERTIES = (
    "prefer_cross_layer_blocks",
    "requires_kv_delivery",
    "supports_divergent_local_hybrid_hits",
)
DEFAULTS: dict[str, Any] = {
    "get_num_new_matched_tokens": (0, False),
    "get_block_ids_with_load_errors": set(),
    "request_finished": (False, None),
    "request_finished_all_groups": (False, None),
    "take_events": (),
    "build_connector_meta": KVConnectorMetadata(),
    "get_loaded_kv_cache_group_ids": (0,),
    "get_external_cache_hit_sources": {},
    "get_finished": (None, None),
}
NEWER = ("unregister_kv_caches", "restore_kv_caches", "supports_sleep_mode")
"""Of vLLM 0.33."""
OLDER = ("prefer_cross_layer_blocks", "register_cross_layers_kv_cache")
"""Of vLLM 0.24."""
_NOT_HOOKS = ("role", "has_connector_metadata")


def hooks() -> list[str]:
    """The public names of vLLM's base class in every supported release."""
    bases = (KVConnectorBase_V1, SupportsHMA)
    found = {name for base in bases for name in vars(base) if not name.startswith("_")}
    return sorted(found | set(NEWER) | set(OLDER))


def _answer(name: str, hook: str) -> Any:
    answer = ANSWERS.get((name, hook), DEFAULTS.get(hook, CLASS_HOOKS.get(hook)))
    if isinstance(answer, Exception):
        raise answer
    return answer


def _method(hook: str) -> Any:
    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        CALLS.append((self.name, hook, arguments))
        if hook == "bind_connector_metadata":
            self._connector_metadata = arguments[0]
        return _answer(self.name, hook)

    return called


def _class_method(hook: str) -> Any:
    def called(cls: Any, *arguments: Any, **named: Any) -> Any:
        CALLS.append((cls.__name__, hook, arguments))
        return _answer(cls.__name__, hook)

    return classmethod(called)


def _property(hook: str) -> Any:
    return property(lambda self: bool(_answer(self.name, hook)))


def _init(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
    KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
    self.name = vllm_config.kv_transfer_config.kv_connector_extra_config["name"]
    CALLS.append((self.name, "__init__", (role,)))
    _answer(self.name, "__init__")


def _members(*, hybrid: bool) -> dict[str, Any]:
    members: dict[str, Any] = {"__init__": _init}
    for hook in hooks():
        if hook in CLASS_HOOKS:
            members[hook] = _class_method(hook)
        elif hook in PROPERTIES:
            members[hook] = _property(hook)
        elif hook not in _NOT_HOOKS and (hybrid or hook != "request_finished_all_groups"):
            members[hook] = _method(hook)
    return members


RecordingConnector = type(
    "RecordingConnector", (KVConnectorBase_V1, SupportsHMA), _members(hybrid=True)
)
PlainConnector = type("PlainConnector", (KVConnectorBase_V1,), _members(hybrid=False))
"""Without support for the hybrid KV cache manager."""


class OldPreemptionConnector(RecordingConnector):  # type: ignore[valid-type, misc]
    """With the signature that vLLM had before 0.24."""

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:
        CALLS.append((self.name, "handle_preemptions", (preempted_req_ids,)))
