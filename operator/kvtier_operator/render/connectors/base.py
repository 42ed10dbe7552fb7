"""What connectors have in common: the rendered configuration, and which fields of a policy a
connector supports. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from pydantic import BaseModel

from kvtier.hashing import sha256_hex
from kvtier_operator.api.base import Change
from kvtier_operator.api.fields import fields_of, jsonable
from kvtier_operator.api.policy import PolicySpec
from kvtier_operator.api.quantity import Quantity
from kvtier_operator.api.settings import Isolation
from kvtier_operator.api.validation import FieldError, format_value

TRANSFER_CONFIG_VARIABLE: Final = "KVTIER_TRANSFER_CONFIG"
"""Variable with the KV transfer configuration as JSON. KVTier's vLLM plugin applies it if the
engine has none, so that the engine's command stays as it is."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """``transfer_config``: vLLM's KV transfer configuration. ``environment``: further variables of
    the engine. ``shared_memory_bytes``: the connector's use of ``/dev/shm``.
    ``engine_memory_bytes``: its use of the engine container's memory, including shared memory.
    """

    transfer_config: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    shared_memory_bytes: int = 0
    engine_memory_bytes: int = 0

    @property
    def transfer_config_text(self) -> str:
        """The value of ``--kv-transfer-config`` and ``TRANSFER_CONFIG_VARIABLE``."""
        return json.dumps(self.transfer_config, separators=(",", ":"), sort_keys=True)

    def arguments(self) -> list[str]:
        """The same configuration as command-line arguments of vLLM."""
        return ["--kv-transfer-config", self.transfer_config_text]


def isolated_path(path: str, isolation: Isolation) -> str:
    """The directory of a file tier, with a subdirectory for salt and revision, which file names of
    these connectors do not include.
    """
    if not isolation.salt and not isolation.model_revision:
        return path
    text = json.dumps([isolation.salt, isolation.model_revision])
    return f"{path}/{sha256_hex(text, 16)}"


def several_volumes(spec: PolicySpec, connector: str) -> list[FieldError]:
    """An error for each tier with ``volumes``: other connectors have one directory a tier."""
    return [
        FieldError.forbidden(
            f"spec.tiers[{index}].fileSystem.volumes",
            f"{connector} has one directory for each tier: use volume",
        )
        for index, tier in enumerate(spec.tiers)
        if tier.file_system is not None and tier.file_system.volumes is not None
    ]


SupportedFields = Mapping[str, object]
"""Fields (``tiers[].loadWeight``; a last part ``*`` means all fields below) that a connector
supports. ``ANY``: every value; otherwise the only value."""


class _Any(Enum):
    ANY = "any value"


ANY = _Any.ANY
OPERATOR_FIELDS: SupportedFields = {
    "podSelector.*": ANY,
    "engine.type": ANY,
    "engine.containerName": ANY,
    "engine.connector": ANY,
    "engine.delivery": ANY,
    "engine.pythonPath": ANY,
    "engine.localRanks": ANY,
    "engine.hashSeed": ANY,
    "attach.*": ANY,
    "rollout.*": ANY,
    "monitoring.*": ANY,
    "security.*": ANY,
    "resources.memoryPolicy": ANY,
    "tiers[].name": ANY,
    "tiers[].fileSystem.volume.*": ANY,
    "tiers[].fileSystem.sharing": ANY,
}
"""Fields that the operator implements for every connector."""


def set_fields(
    model: BaseModel, pattern: str = "", place: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """``(pattern, path, value)`` of every leaf that the document sets: ``tiers[].loadWeight``,
    ``tiers[2].loadWeight``, 50. Live fields with their defaults are not included, because the API
    server sets them.
    """
    for document in fields_of(type(model)):
        if document.attribute not in model.model_fields_set:
            continue
        value = getattr(model, document.attribute)
        if (
            document.change is Change.LIVE
            and document.default is not None
            and jsonable(value) == document.default
        ):
            continue
        dot = "." if pattern else ""
        yield from _leaves(
            value, f"{pattern}{dot}{document.alias}", f"{place}{dot}{document.alias}"
        )


def _leaves(value: Any, pattern: str, place: str) -> Iterator[tuple[str, str, Any]]:
    if value is None:
        return
    if isinstance(value, BaseModel):
        yield from set_fields(value, pattern, place)
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for index, item in enumerate(value):
            yield from set_fields(item, f"{pattern}[]", f"{place}[{index}]")
    else:
        yield pattern, place, value


def unsupported_fields_of(
    spec: PolicySpec, supported: SupportedFields, connector: str
) -> list[FieldError]:
    """Every field that is set and that neither the connector nor the operator implements."""
    known = {**OPERATOR_FIELDS, **supported}
    found = []
    for pattern, place, value in set_fields(spec):
        allowed = _lookup(known, pattern)
        plain = _plain(value)
        if allowed is ANY or (allowed is not None and plain == allowed) or plain in ("", {}, []):
            continue
        field = f"spec.{place}"
        if allowed is None:
            found.append(FieldError.forbidden(field, f"{connector} has no such setting"))
        else:
            detail = f"must be {format_value(allowed)}, the only behavior of {connector}"
            found.append(FieldError.invalid(field, plain, detail))
    return found


def _lookup(known: SupportedFields, pattern: str) -> object | None:
    if pattern in known:
        return known[pattern]
    parts = pattern.split(".")
    for length in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:length]) + ".*"
        if prefix in known:
            return known[prefix]
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Quantity):
        return value.text
    return value.value if isinstance(value, Enum) else value
