"""Validation errors of documents that people write, in the form of apimachinery's field errors.

``validated`` turns a parsed document into a model, or raises ``InvalidDocumentError`` with one
``FieldError`` for each thing that is wrong, in the order of the document's fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvtier.errors import ConfigurationError
from kvtier_operator.api.base import ErrorType, Path, Violation
from kvtier_operator.api.fields import Shape, dotted, fields_of, nearest, walk

MAX_VALUE_TEXT = 80
"""Longer values are truncated in messages."""
KEY_MARK = "[key]"
"""The last part of pydantic's path to an invalid key of a map."""
Root = TypeVar("Root", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class FieldError:
    """One thing that is wrong. ``field``: dotted path, empty for the whole document. ``value``: as
    in the document, empty if it does not matter. ``detail``: what the field must be.
    """

    field: str
    type: ErrorType
    value: str
    detail: str

    @classmethod
    def required(cls, field: str, detail: str = "") -> FieldError:
        """The field must be set."""
        return cls(field, ErrorType.REQUIRED, "", detail)

    @classmethod
    def invalid(cls, field: str, value: object, detail: str) -> FieldError:
        """The value is invalid. ``detail``: ``must be ...``."""
        return cls(field, ErrorType.INVALID, format_value(value), detail)

    @classmethod
    def malformed(cls, field: str, detail: str) -> FieldError:
        """The text is invalid as a whole. ``field`` may be a position in it."""
        return cls(field, ErrorType.INVALID, "", detail)

    @classmethod
    def unsupported(cls, field: str, value: object, supported: Iterable[str]) -> FieldError:
        """The value is not one of a set."""
        values = ", ".join(format_value(each) for each in supported)
        return cls(
            field, ErrorType.NOT_SUPPORTED, format_value(value), f"supported values: {values}"
        )

    @classmethod
    def forbidden(cls, field: str, detail: str) -> FieldError:
        """The field must not be set, or not to this value."""
        return cls(field, ErrorType.FORBIDDEN, "", detail)

    @classmethod
    def too_long(cls, field: str, detail: str) -> FieldError:
        """The value is too long."""
        return cls(field, ErrorType.TOO_LONG, "", detail)

    @property
    def message(self) -> str:
        """One line: ``spec.tiers[0]: Invalid value: "disk": must be a memory tier``."""
        parts = [self.field or "document", self.type.value]
        if self.type.has_value and self.value:
            parts.append(self.value)
        if self.detail:
            parts.append(self.detail)
        return ": ".join(parts)

    def __str__(self) -> str:
        return self.message


class InvalidDocumentError(ConfigurationError):
    """A document with at least one error. ``errors`` has all that were found."""

    def __init__(self, errors: list[FieldError]) -> None:
        first = errors[0]
        super().__init__(first.field, first.value, first.detail)
        self.errors = errors
        self.args = ("\n".join(error.message for error in errors),)


def format_value(value: object) -> str:
    """A value in messages: JSON, truncated to ``MAX_VALUE_TEXT``."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= MAX_VALUE_TEXT else text[: MAX_VALUE_TEXT - 1] + "…"


def validated(root: type[Root], document: Any) -> Root:
    """``document`` (parsed YAML or JSON) as a model. Raises ``InvalidDocumentError``."""
    try:
        return root.model_validate(document)
    except ValidationError as error:
        raise InvalidDocumentError(field_errors(error, root)) from None


def field_errors(error: ValidationError, root: type[BaseModel]) -> list[FieldError]:
    """Every error that pydantic found in a document of ``root``."""
    found: list[FieldError] = []
    for entry in error.errors(include_url=False):
        path = entry["loc"]
        if path and path[-1] == KEY_MARK:
            shape, _ = walk(root, path[:-2])
            key = shape.key if shape is not None else None
            found.append(FieldError.invalid(dotted(path[:-1]), path[-2], _must_be(key)))
        elif entry["type"] == "rules":
            violations: list[Violation] = entry.get("ctx", {}).get("violations", [])
            found.extend(_of_rule(path, violation) for violation in violations)
        elif entry["type"] == "extra_forbidden":
            found.append(_unknown_field(root, path))
        else:
            shape, _ = walk(root, path)
            found.append(_of_value(path, entry["type"], entry["input"], shape))
    return list(dict.fromkeys(found))


def _of_value(path: Path, kind: str, value: object, shape: Shape | None) -> FieldError:
    field = dotted(path)
    if kind == "missing":
        return FieldError.required(field, _must_be(shape))
    if shape is not None and shape.enum and shape.accepts is None:
        return FieldError.unsupported(field, value, shape.enum)
    return FieldError.invalid(field, value, _must_be(shape))


def _of_rule(path: Path, violation: Violation) -> FieldError:
    field = dotted((*path, *violation.path))
    value = format_value(violation.value) if violation.type.has_value else ""
    return FieldError(field, violation.type, value, violation.detail)


def _must_be(shape: Shape | None) -> str:
    return f"must be {shape.accepted}" if shape is not None else "must have another value"


def _unknown_field(root: type[BaseModel], path: Path) -> FieldError:
    shape, _ = walk(root, path[:-1])
    model = shape.model if shape is not None else None
    known = [document.alias for document in fields_of(model)] if model is not None else []
    meant = nearest(str(path[-1]), known)
    hint = f'did you mean "{meant}"?' if meant else f"known fields: {', '.join(known) or 'none'}"
    return FieldError.forbidden(dotted(path), f"unknown field; {hint}")
