"""From what pydantic found to what a person needs: field, value, what is accepted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvtier.errors import ConfigurationError
from kvtier_operator.api.base import Path, Violation
from kvtier_operator.api.fields import dotted, fields_of, nearest, walk

MAX_VALUE_TEXT = 80
"""Longer values are cut in messages."""
KEY_MARK = "[key]"
"""What pydantic adds to a path whose last part is a map's key that is wrong itself."""
Root = TypeVar("Root", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class FieldError:
    """One thing that is wrong: the dotted field, the value found (as text), what is accepted."""

    field: str
    value: str
    accepted: str

    @property
    def message(self) -> str:
        """The three in one line."""
        where = self.field or "document"
        return f"{where}: {self.value} is not accepted; accepted is {self.accepted}"


class InvalidDocumentError(ConfigurationError):
    """A document with at least one refusal. ``refusals`` has all that were found."""

    def __init__(self, refusals: list[FieldError]) -> None:
        first = refusals[0]
        super().__init__(first.field, first.value, first.accepted)
        self.refusals = refusals
        self.args = ("\n".join(refusal.message for refusal in refusals),)


def shown(value: object) -> str:
    """A value as messages show it: JSON, cut to ``MAX_VALUE_TEXT``."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= MAX_VALUE_TEXT else text[: MAX_VALUE_TEXT - 1] + "…"


def refusals_of(error: ValidationError, root: type[BaseModel]) -> list[FieldError]:
    """Every refusal in a validation error of ``root``, in the order of the document's fields."""
    found: list[FieldError] = []
    for entry in error.errors(include_url=False):
        path = entry["loc"]
        if path and path[-1] == KEY_MARK:
            shape, _ = walk(root, path[:-2])
            accepted = (
                shape.key.accepted if shape is not None and shape.key is not None else "another key"
            )
            found.append(FieldError(dotted(path[:-1]), shown(path[-2]), accepted))
            continue
        if entry["type"] == "rules":
            violations: list[Violation] = entry.get("ctx", {}).get("violations", [])
            found.extend(
                FieldError(
                    dotted((*path, *violation.path)), shown(violation.value), violation.accepted
                )
                for violation in violations
            )
        elif entry["type"] == "missing":
            found.append(FieldError(dotted(path), "nothing", _accepted(root, path)))
        elif entry["type"] == "extra_forbidden":
            found.append(_unknown(root, path))
        else:
            found.append(FieldError(dotted(path), shown(entry["input"]), _accepted(root, path)))
    return list(dict.fromkeys(found))


def validated(root: type[Root], document: Any) -> Root:
    """``document`` (parsed YAML or JSON) as a model. Raises ``InvalidDocumentError`` with everything that is wrong."""
    try:
        return root.model_validate(document)
    except ValidationError as error:
        raise InvalidDocumentError(refusals_of(error, root)) from None


def _accepted(root: type[BaseModel], path: Path) -> str:
    shape, _ = walk(root, path)
    return shape.accepted if shape is not None else "another value"


def _unknown(root: type[BaseModel], path: Path) -> FieldError:
    shape, _ = walk(root, path[:-1])
    name = str(path[-1])
    known = (
        [document.alias for document in fields_of(shape.model)]
        if shape is not None and shape.model is not None
        else []
    )
    meant = nearest(name, known)
    hint = f"{meant} (the nearest known field)" if meant else ", ".join(known) or "no field"
    return FieldError(dotted(path), "unknown field", hint)
