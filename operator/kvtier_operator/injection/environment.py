"""The variables of an engine's container, changed so that its command need not be. Pure.

Kubernetes replaces ``$(NAME)`` in a value by a variable that stands before it or comes from ``envFrom``, and leaves it as
it is where there is none; so what is not known at admission can still be extended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_operator.render.engine import PLUGIN_NAME

INHERITED = "KVTIER_INHERITED_"
"""Begins the new name of a variable whose value comes from elsewhere and that is extended under its own name."""
PATH = "PYTHONPATH"
SEED = "PYTHONHASHSEED"
PLUGINS = "VLLM_PLUGINS"
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the engine shall find. ``payload``: the connector's directory, None where the image has it. ``image_path``: what
    the image's own PYTHONPATH holds. ``plain``: variables that are KVTier's own.
    """

    payload: str | None
    image_path: str
    seed: str
    plain: Mapping[str, str]


def attached(container: Mapping[str, Any], wanted: Wanted) -> tuple[list[Entry], list[str]]:
    """The container's variables with KVTier's, and sentences about what could not be as the policy says."""
    entries = [dict(entry) for entry in container.get("env") or ()]
    sources = bool(container.get("envFrom"))
    notes: list[str] = []
    if wanted.payload is not None:
        _extend_path(entries, wanted, sources)
    _set_seed(entries, wanted.seed, sources, notes)
    _extend_plugins(entries, sources, notes)
    for name, value in wanted.plain.items():
        index = _last(entries, name)
        if index is None:
            entries.append({"name": name, "value": value})
        else:
            notes.append(f"the pod sets {name} itself, which stays as it is")
    return entries, notes


def _extend_path(entries: list[Entry], wanted: Wanted, sources: bool) -> None:
    index = _last(entries, PATH)
    if index is None:
        rest = [wanted.image_path] if wanted.image_path else []
        rest += [f"$({PATH})"] if sources else []
        entries.append({"name": PATH, "value": ":".join([str(wanted.payload), *rest])})
        return
    _extend(entries, index, lambda old: f"{wanted.payload}:{old}" if old else str(wanted.payload))


def _set_seed(entries: list[Entry], seed: str, sources: bool, notes: list[str]) -> None:
    index = _last(entries, SEED)
    if index is None:
        entries.append({"name": SEED, "value": seed})
        if sources:
            notes.append(f"{SEED} is set to {seed}, whatever the container's envFrom says of it")
        return
    if "valueFrom" in entries[index]:
        notes.append(
            f"{SEED} comes from elsewhere and stays so; engines share objects only where it is {seed} in all of them"
        )
    elif entries[index].get("value") not in (seed, None, ""):
        found = entries[index]["value"]
        notes.append(
            f"{SEED} is {found} and stays so; the policy's hashSeed is {seed}. Engines with different seeds share no objects"
        )
    elif not entries[index].get("value"):
        entries[index]["value"] = seed


def _extend_plugins(entries: list[Entry], sources: bool, notes: list[str]) -> None:
    index = _last(entries, PLUGINS)
    if index is None:
        if sources:
            notes.append(
                f"if the container's envFrom sets {PLUGINS}, {PLUGIN_NAME} must be among its names"
            )
        return

    def extend(old: str) -> str:
        names = [name for name in old.split(",") if name.strip()]
        return ",".join(names if PLUGIN_NAME in names else [*names, PLUGIN_NAME])

    _extend(entries, index, extend)


def _extend(entries: list[Entry], index: int, extend: Any) -> None:
    """Changes a value; one that comes from elsewhere goes on under another name, and is named in the new value."""
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
    """The entry that counts where a name is there several times."""
    return max(
        (index for index, entry in enumerate(entries) if entry.get("name") == name), default=None
    )
