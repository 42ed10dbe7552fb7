"""Reading policies that the API server sends. Pure.

The CustomResourceDefinition may be newer or older than this process, and another version of the
operator may have written the status. Fields that this version does not know are therefore ignored
and reported, and parts of a status that cannot be read are dropped. Documents that people write are
read strictly (``validation.validated``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from kvtier_operator.api.base import Path
from kvtier_operator.api.fields import Shape, dotted, fields_of
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.api.validation import validated

MAX_UNKNOWN = 16
"""Unknown fields that are reported."""


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """A policy, and the paths of the fields of its document that this version does not know."""

    policy: KVTierPolicy
    unknown_fields: tuple[str, ...] = ()


def read_stored(document: Mapping[str, Any]) -> StoredPolicy:
    """The policy in a document of the API server. Raises ``InvalidDocumentError`` if a field that
    this version knows has a value that it does not accept.
    """
    known, unknown = known_fields(
        {key: value for key, value in document.items() if key != "status"}, KVTierPolicy
    )
    policy = validated(KVTierPolicy, known)
    status = read_status(document.get("status"))
    # Metadata belongs to Kubernetes: a new field there is no field of a policy.
    ours = tuple(dotted(path) for path in unknown if path[0] != "metadata")
    return StoredPolicy(policy.model_copy(update={"status": status}), ours[:MAX_UNKNOWN])


def read_status(raw: Any) -> PolicyStatus | None:
    """The readable parts of a status; None if there is none."""
    if not isinstance(raw, Mapping) or not raw:
        return None
    try:
        return PolicyStatus.model_validate(raw)
    except ValidationError:
        return PolicyStatus.model_validate(_readable(raw))


def known_fields(document: Any, root: type[BaseModel]) -> tuple[Any, list[Path]]:
    """``document`` without the fields that ``root`` and the models in it lack, and their paths."""
    unknown: list[Path] = []
    return _known(document, Shape(kind="object", model=root), (), unknown), unknown


def _known(value: Any, shape: Shape | None, path: Path, unknown: list[Path]) -> Any:
    if shape is None:
        return value
    if shape.kind == "object" and shape.model is not None and isinstance(value, Mapping):
        shapes = {document.alias: document.shape for document in fields_of(shape.model)}
        unknown.extend((*path, key) for key in value if key not in shapes)
        return {
            key: _known(item, shapes[key], (*path, key), unknown)
            for key, item in value.items()
            if key in shapes
        }
    if shape.kind == "list" and isinstance(value, list):
        return [
            _known(item, shape.item, (*path, index), unknown) for index, item in enumerate(value)
        ]
    return value


def _readable(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a status, and the items of its lists, that can be read one by one."""
    readable: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, list):
            readable[key] = [item for item in value if _is_readable(key, [item])]
        elif _is_readable(key, value):
            readable[key] = value
    return readable


def _is_readable(key: str, value: Any) -> bool:
    try:
        PolicyStatus.model_validate({key: value})
    except ValidationError:
        return False
    return True
