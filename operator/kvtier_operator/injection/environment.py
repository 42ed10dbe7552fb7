"""The engine's variables, patched so that its command can stay as it is. Pure; works on the
documents of the patch.

Kubernetes replaces ``$(NAME)`` in a value by a variable that is defined before it or comes from
``envFrom``, and keeps the text if there is none. So even a variable whose value is unknown at
admission can be extended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_operator.render.engine import PLUGIN_NAME

INHERITED = "KVTIER_INHERITED_"
"""Prefix of the new name of a variable with ``valueFrom``; the variable itself extends that one."""
PATH = "PYTHONPATH"
SEED = "PYTHONHASHSEED"
PLUGINS = "VLLM_PLUGINS"
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """What the engine needs. ``payload``: the connector's directory; None if the image has the
    connector. ``image_path``: the value of the image's own PYTHONPATH. ``variables``: KVTier's own.
    """

    payload: str | None
    image_path: str
    seed: str
    variables: Mapping[str, str]


def patch_environment(
    container: Mapping[str, Any], wanted: EngineEnvironment
) -> tuple[list[Entry], list[str]]:
    """The variables with KVTier's, and notes about those that differ from the policy."""
    entries = [dict(entry) for entry in container.get("env") or ()]
    has_env_from = bool(container.get("envFrom"))
    notes: list[str] = []
    if wanted.payload is not None:
        _extend_path(entries, wanted, has_env_from)
    _set_seed(entries, wanted.seed, has_env_from, notes)
    _extend_plugins(entries, has_env_from, notes)
    for name, value in wanted.variables.items():
        index = _last(entries, name)
        if index is None:
            entries.append({"name": name, "value": value})
        else:
            notes.append(f"the pod sets {name}; its value is kept")
    return entries, notes


def _extend_path(entries: list[Entry], wanted: EngineEnvironment, has_env_from: bool) -> None:
    index = _last(entries, PATH)
    if index is None:
        rest = [wanted.image_path] if wanted.image_path else []
        rest += [f"$({PATH})"] if has_env_from else []
        entries.append({"name": PATH, "value": ":".join([str(wanted.payload), *rest])})
        return
    _extend(entries, index, lambda old: f"{wanted.payload}:{old}" if old else str(wanted.payload))


def _set_seed(entries: list[Entry], seed: str, has_env_from: bool, notes: list[str]) -> None:
    index = _last(entries, SEED)
    if index is None:
        entries.append({"name": SEED, "value": seed})
        if has_env_from:
            notes.append(
                f"{SEED} is set to {seed}, which overrides a value from the container's envFrom"
            )
        return
    if "valueFrom" in entries[index]:
        notes.append(
            f"{SEED} has valueFrom, which is kept; only engines with the value {seed} share objects"
        )
    elif entries[index].get("value") not in (seed, None, ""):
        found = entries[index]["value"]
        notes.append(
            f"{SEED} is {found}, which is kept; the policy's hashSeed is {seed}. Engines with "
            "different seeds share no objects"
        )
    elif not entries[index].get("value"):
        entries[index]["value"] = seed


def _extend_plugins(entries: list[Entry], has_env_from: bool, notes: list[str]) -> None:
    index = _last(entries, PLUGINS)
    if index is None:
        if has_env_from:
            notes.append(
                f"if the container's envFrom sets {PLUGINS}, the value must include {PLUGIN_NAME}"
            )
        return

    def extend(old: str) -> str:
        names = [name for name in old.split(",") if name.strip()]
        return ",".join(names if PLUGIN_NAME in names else [*names, PLUGIN_NAME])

    _extend(entries, index, extend)


def _extend(entries: list[Entry], index: int, extend: Callable[[str], str]) -> None:
    """Extends a value. A variable with ``valueFrom`` is renamed, and the extended value refers to
    it.
    """
    entry = entries[index]
    if "valueFrom" not in entry:
        entries[index] = {**entry, "value": extend(str(entry.get("value") or ""))}
        return
    name = str(entry["name"])
    entries[index : index + 1] = [
        {**entry, "name": INHERITED + name},
        {"name": name, "value": extend(f"$({INHERITED}{name})")},
    ]


def _last(entries: list[Entry], name: str) -> int | None:
    """Index of the entry that wins if the variable is defined more than once."""
    return max(
        (index for index, entry in enumerate(entries) if entry.get("name") == name), default=None
    )
