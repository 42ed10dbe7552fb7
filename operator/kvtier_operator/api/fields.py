"""What the models say about each field: the one source of the CRD, `kvtier explain`, the reference
and of refusals.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvtier_operator.api.base import Accepts, Change, MapKey, Path, Scalar
from kvtier_operator.api.quantity import Quantity, SizeOrPercentage

ITEM = "[]"
"""Stands for any index of a list in a field path."""
KEY = "<key>"
"""Stands for any key of a map in a field path."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A value's type and bounds. ``kind``: "object" (``model``), "list" (``item``), "map" (``key``,
    ``item``), "quantity", "size or percentage", "integer", "string", "any". ``enum`` restricts a
    string.
    """

    kind: str
    model: type[BaseModel] | None = None
    item: Shape | None = None
    key: Shape | None = None
    enum: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    multiple_of: int | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None
    format: str | None = None
    map_key: str | None = None
    accepts: str | None = None
    scalars: tuple[Scalar, ...] = ()

    @property
    def type_name(self) -> str:
        """The type, for the reference."""
        if self.kind == "list" and self.item is not None:
            return f"list of {self.item.type_name}"
        if self.kind == "map" and self.item is not None:
            return f"map of {self.item.type_name}"
        return "enum" if self.enum else self.kind

    @property
    def accepted(self) -> str:
        """The valid values, in words: ``must be <accepted>``."""
        if self.accepts is not None:
            return self.accepts
        if self.enum:
            return "one of " + ", ".join(value or '""' for value in self.enum)
        if self.kind == "integer":
            text = "an integer"
            if self.multiple_of is not None:
                text = f"a multiple of {self.multiple_of}"
            if self.minimum is not None and self.maximum is not None:
                return f"{text} from {self.minimum} to {self.maximum}"
            return f"{text} of at least {self.minimum}" if self.minimum is not None else text
        if self.kind == "string":
            bounds = []
            if self.min_length:
                bounds.append(f"at least {self.min_length}")
            if self.max_length is not None:
                bounds.append(f"at most {self.max_length}")
            text = f"text of {' and '.join(bounds)} characters" if bounds else "text"
            return f"{text} that matches {self.pattern}" if self.pattern else text
        if self.kind == "list":
            item = (
                f" of {self.item.type_name}s"
                if self.item is not None and self.item.type_name != "any"
                else ""
            )
            if self.min_length is not None and self.max_length is not None:
                return f"a list{item} with {self.min_length} to {self.max_length} items"
            return f"a list{item}" + (
                f" with at most {self.max_length} items" if self.max_length is not None else ""
            )
        if self.kind == "map":
            return "a map" + (
                f" with at most {self.max_length} entries" if self.max_length is not None else ""
            )
        if self.kind == "object" and self.model is not None:
            return "a mapping with " + ", ".join(
                document.alias for document in fields_of(self.model)
            )
        return "any value"


@dataclass(frozen=True, slots=True)
class FieldDocument:
    """Documentation of one field of a model."""

    alias: str
    attribute: str
    shape: Shape
    description: str
    required: bool
    change: Change | None
    default: Any = field(default=None)
    """As JSON would hold it; None where there is none or it is an object of defaults."""


def jsonable(value: Any) -> Any:
    """A default in the form of a document."""
    if isinstance(value, BaseModel):
        return {
            document.alias: jsonable(getattr(value, document.attribute))
            for document in fields_of(type(value))
            if getattr(value, document.attribute) is not None
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Quantity | SizeOrPercentage):
        return value.text
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def _merge(shape: dict[str, Any], metadata: tuple[Any, ...]) -> None:
    for mark in metadata:
        match mark:
            case annotated_types.Ge(ge=bound):
                shape["minimum"] = bound
            case annotated_types.Gt(gt=bound) if isinstance(bound, int):
                shape["minimum"] = bound + 1
            case annotated_types.Le(le=bound):
                shape["maximum"] = bound
            case annotated_types.MultipleOf(multiple_of=unit):
                shape["multiple_of"] = unit
            case annotated_types.MinLen(min_length=length):
                shape["min_length"] = length
            case annotated_types.MaxLen(max_length=length):
                shape["max_length"] = length
            case MapKey(field=name):
                shape["map_key"] = name
            case Accepts(words=words):
                shape["accepts"] = words
            case Scalar():
                shape["scalars"] = (*shape.get("scalars", ()), mark)
            case FieldInfo():
                _merge(shape, tuple(mark.metadata))
                if isinstance(mark.json_schema_extra, dict) and "format" in mark.json_schema_extra:
                    shape["format"] = mark.json_schema_extra["format"]
            case _ if isinstance(getattr(mark, "pattern", None), str):
                shape["pattern"] = mark.pattern


def shape_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Shape:
    """The shape of a type annotation. Marks in ``metadata`` win."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        return shape_of(inner, (*marks, *metadata))
    if origin in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return shape_of(members[0], metadata)
    found: dict[str, Any] = {}
    _merge(found, metadata)
    if origin is Literal:
        return Shape(kind="string", enum=tuple(get_args(annotation)), **found)
    if origin is list:
        return Shape(kind="list", item=shape_of(get_args(annotation)[0]), **found)
    if origin is dict:
        key, item = get_args(annotation)
        return Shape(kind="map", key=shape_of(key), item=shape_of(item), **found)
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            return Shape(kind="object", model=annotation, **found)
        if issubclass(annotation, Enum):
            return Shape(kind="string", enum=tuple(member.value for member in annotation), **found)
        if issubclass(annotation, Quantity):
            return Shape(kind="quantity", **found)
        if issubclass(annotation, SizeOrPercentage):
            return Shape(kind="size or percentage", **found)
        if annotation is int:
            return Shape(kind="integer", **found)
        if annotation is str:
            return Shape(kind="string", **found)
    return Shape(kind="any", **found)


def _replace(shape: Shape, **changes: Any) -> Shape:
    values = {name: getattr(shape, name) for name in Shape.__slots__}
    return Shape(**{**values, **changes})


@cache
def fields_of(model: type[BaseModel]) -> tuple[FieldDocument, ...]:
    """The fields of a model, in order."""
    return tuple(_document(attribute, info) for attribute, info in model.model_fields.items())


def _document(attribute: str, info: FieldInfo) -> FieldDocument:
    shape = shape_of(info.annotation, tuple(info.metadata))
    if isinstance(info.json_schema_extra, dict) and isinstance(
        info.json_schema_extra.get("format"), str
    ):
        shape = _replace(shape, format=info.json_schema_extra["format"])
    default = None if info.default is PydanticUndefined else jsonable(info.default)
    return FieldDocument(
        alias=info.alias or attribute,
        attribute=attribute,
        shape=shape,
        description=info.description or "",
        required=info.is_required(),
        change=next((mark for mark in info.metadata if isinstance(mark, Change)), None),
        default=default,
    )


def step(shape: Shape, part: str | int) -> tuple[Shape | None, FieldDocument | None]:
    """One step down a path: the shape there, and the field's document where the step is a field."""
    if shape.kind == "object" and shape.model is not None:
        for document in fields_of(shape.model):
            if document.alias == part:
                return document.shape, document
        return None, None
    if shape.kind in ("list", "map"):
        return shape.item, None
    return None, None


def walk(root: type[BaseModel], path: Path) -> tuple[Shape | None, FieldDocument | None]:
    """Follows a path from a model: the shape at its end and the last field on it. (None, ...) where
    it leads nowhere.
    """
    shape: Shape | None = Shape(kind="object", model=root)
    document: FieldDocument | None = None
    for part in path:
        if shape is None:
            return None, document
        shape, found = step(shape, part)
        document = found or document
    return shape, document


def all_fields(root: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldDocument]]:
    """Every field below a model with its path (``spec.tiers[].name``), parents first."""
    for document in fields_of(root):
        path = f"{prefix}.{document.alias}" if prefix else document.alias
        yield path, document
        shape: Shape | None = document.shape
        while shape is not None and shape.kind in ("list", "map"):
            path += ITEM if shape.kind == "list" else f".{KEY}"
            shape = shape.item
        if shape is not None and shape.kind == "object" and shape.model is not None:
            yield from all_fields(shape.model, path)


def nearest(name: str, known: list[str]) -> str | None:
    """The known name that is most similar to ``name``, or None."""
    by_lower = {candidate.lower().replace("_", ""): candidate for candidate in known}
    found = difflib.get_close_matches(
        name.lower().replace("_", "").replace("-", ""), list(by_lower), n=1, cutoff=0.6
    )
    return by_lower[found[0]] if found else None


def dotted(path: Path) -> str:
    """A path in messages: ``spec.tiers[0].name``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text
