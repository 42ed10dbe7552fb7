"""What is rendered for a connector, as a value.

Which of a policy's written fields a connector's configuration cannot say.
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
"""The KV transfer configuration as JSON, in the engine's environment: KVTier's vLLM plugin sets it where the user
configured none, so that the engine's command stays as it is."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """``transfer_config``: vLLM's KV transfer configuration. ``environment``: further variables of the engine.
    ``shared_memory_bytes``: what the connector takes of ``/dev/shm``; ``engine_memory_bytes``:
    what it takes of the engine container's memory, shared memory included.
    """

    transfer_config: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    shared_memory_bytes: int = 0
    engine_memory_bytes: int = 0

    @property
    def transfer_config_text(self) -> str:
        """The configuration as ``--kv-transfer-config`` and ``TRANSFER_CONFIG_VARIABLE`` take
        it."""
        return json.dumps(self.transfer_config, separators=(",", ":"), sort_keys=True)

    def arguments(self) -> list[str]:
        """The command-line arguments that do the same for who runs vLLM by hand."""
        return ["--kv-transfer-config", self.transfer_config_text]


def isolated(path: str, isolation: Isolation) -> str:
    """The directory of a file tier: below it one of its own for salt and revision, which these connectors' own names of
    files know nothing of.
    """
    if not isolation.salt and not isolation.model_revision:
        return path
    text = json.dumps([isolation.salt, isolation.model_revision])
    return f"{path}/{sha256_hex(text, 16)}"


Expressed = Mapping[str, object]
"""Fields (``tiers[].loadWeight``; a last part ``*`` is all below) that a connector knows; ``ANY``: every value, else
the one value that is what the connector does anyway."""


class _Any(Enum):
    ANY = "any value"


ANY = _Any.ANY
OUTSIDE: Expressed = {
    "podSelector.*": ANY,
    "engine.*": ANY,
    "attach.*": ANY,
    "rollout.*": ANY,
    "monitoring.*": ANY,
    "security.*": ANY,
    "resources.memoryPolicy": ANY,
    "tiers[].name": ANY,
    "tiers[].fileSystem.volume.*": ANY,
    "tiers[].fileSystem.sharing": ANY,
}
"""What the operator does itself, whatever the connector."""


def written(model: BaseModel, pattern: str = "", place: str = "") -> Iterator[tuple[str, str, Any]]:
    """``(pattern, place, value)`` of every leaf that the document sets: ``tiers[].loadWeight``,
    ``tiers[2].loadWeight``, 50. A live field with its default is none: the API server fills those
    in, and nobody is to be told about what nobody wrote.
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
        yield from written(value, pattern, place)
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for index, item in enumerate(value):
            yield from written(item, f"{pattern}[]", f"{place}[{index}]")
    else:
        yield pattern, place, value


def unexpressed(spec: PolicySpec, expressed: Expressed, connector: str) -> list[FieldError]:
    """Every written field that neither ``expressed`` nor the operator itself brings about."""
    known = {**OUTSIDE, **expressed}
    found = []
    for pattern, place, value in written(spec):
        accepted = _lookup(known, pattern)
        plain = _plain(value)
        if accepted is ANY or (accepted is not None and plain == accepted) or plain in ("", {}, []):
            continue
        field = f"spec.{place}"
        if accepted is None:
            found.append(FieldError.forbidden(field, f"{connector} has no such setting"))
        else:
            detail = f"must be {format_value(accepted)}, the only behavior of {connector}"
            found.append(FieldError.invalid(field, plain, detail))
    return found


def _lookup(known: Expressed, pattern: str) -> object | None:
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
