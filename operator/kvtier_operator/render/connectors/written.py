"""Which of a policy's written fields a connector's configuration cannot say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from pydantic import BaseModel

from kvtier_operator.api.base import Change
from kvtier_operator.api.fields import fields_of, jsonable
from kvtier_operator.api.policy import PolicySpec
from kvtier_operator.api.quantity import Quantity
from kvtier_operator.api.refusals import Refusal, shown

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
    ``tiers[2].loadWeight``, 50. A live field with its default is none: the API server fills those in, and nobody is to be
    told about what nobody wrote.
    """
    for document in fields_of(type(model)):
        if document.attribute not in model.model_fields_set:
            continue
        value = getattr(model, document.attribute)
        if document.change is Change.LIVE and document.default is not None and jsonable(value) == document.default:
            continue
        dot = "." if pattern else ""
        yield from _leaves(value, f"{pattern}{dot}{document.alias}", f"{place}{dot}{document.alias}")


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


def unexpressed(spec: PolicySpec, expressed: Expressed, connector: str) -> list[Refusal]:
    """Every written field that neither ``expressed`` nor the operator itself brings about."""
    known = {**OUTSIDE, **expressed}
    found = []
    for pattern, place, value in written(spec):
        accepted = _lookup(known, pattern)
        plain = _plain(value)
        if accepted is ANY or (accepted is not None and plain == accepted) or plain in ("", {}, []):
            continue
        instead = (
            f"{shown(accepted)}, which is what it does"
            if accepted is not None
            else f"nothing: {connector} has no such setting"
        )
        found.append(Refusal(f"spec.{place}", shown(plain), instead))
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
