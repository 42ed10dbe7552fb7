"""``kvtier explain``: the reference of a field, generated from the models."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvtier.cli.console import console
from kvtier.cli.inputs import OptionError
from kvtier_operator.api.base import Model
from kvtier_operator.api.fields import FieldDocument, Shape, all_fields, fields_of, nearest
from kvtier_operator.api.policy import KVTierPolicy

_PREFIXES = ("kvtierpolicy", "kvtierpolicies", "kvtp")


@dataclass(frozen=True, slots=True)
class FieldExplanation:
    """A field with path, subfields and rules. ``field`` is None for the whole policy."""

    path: str
    field: FieldDocument | None
    children: tuple[FieldDocument, ...]
    rules: tuple[str, ...]


def explain(name: str | None) -> FieldExplanation:
    """Finds a field. Indexes and the leading ``spec.`` are optional.

    Raises ``OptionError``, which names the closest field.
    """
    parts = [part for part in re.sub(r"\[[^\]]*\]", "", name or "").split(".") if part]
    if parts and parts[0].lower() in _PREFIXES:
        parts = parts[1:]
    if not parts:
        return FieldExplanation("", None, fields_of(KVTierPolicy), ())
    if parts[0] not in {document.alias for document in fields_of(KVTierPolicy)}:
        spec = next(document for document in fields_of(KVTierPolicy) if document.alias == "spec")
        if parts[0] in {document.alias for document in _subfields(spec.shape)}:
            parts = ["spec", *parts]
    return _resolve(name or "", parts)


def _resolve(name: str, parts: list[str]) -> FieldExplanation:
    children = fields_of(KVTierPolicy)
    path, field = "", None
    model: Any = KVTierPolicy
    for part in parts:
        field = next((document for document in children if document.alias == part), None)
        if field is None:
            raise OptionError("FIELD", name, _hint(path, part, children))
        path = f"{path}.{part}" if path else part
        children = _subfields(field.shape)
        model = _model_of(field.shape)
    rules = (
        tuple(rule.description for rule in model.rules if rule.message)
        if model and issubclass(model, Model)
        else ()
    )
    return FieldExplanation(path, field, children, rules)


def _hint(path: str, part: str, siblings: tuple[FieldDocument, ...]) -> str:
    meant = nearest(part, [document.alias for document in siblings])
    if meant is not None:
        return f"unknown field; did you mean {f'{path}.' if path else ''}{meant}?"
    elsewhere = [
        found
        for found, document in all_fields(KVTierPolicy)
        if document.alias.lower() == part.lower()
    ]
    if elsewhere:
        return f"unknown field; fields with this name: {', '.join(elsewhere)}"
    known = ", ".join(document.alias for document in siblings)
    if not known:
        return f"unknown field; {path} has no subfields"
    return f"unknown field; fields of {path or 'a policy'}: {known}"


def _model_of(shape: Shape) -> Any:
    inner: Shape | None = shape
    while inner is not None and inner.kind in ("list", "map"):
        inner = inner.item
    return inner.model if inner is not None else None


def _subfields(shape: Shape) -> tuple[FieldDocument, ...]:
    model = _model_of(shape)
    return fields_of(model) if model is not None else ()


def to_json(explained: FieldExplanation) -> dict[str, Any]:
    """The output of ``--json``."""
    if explained.field is None:
        return {
            "fields": [_field_json(path, document) for path, document in all_fields(KVTierPolicy)]
        }
    document = _field_json(explained.path, explained.field)
    document["rules"] = list(explained.rules)
    document["fields"] = [
        _field_json(f"{explained.path}.{child.alias}", child) for child in explained.children
    ]
    return document


def _field_json(path: str, document: FieldDocument) -> dict[str, Any]:
    return {
        "path": path,
        "type": document.shape.type_name,
        "description": document.description,
        "required": document.required,
        "default": document.default,
        "change": document.change.value if document.change is not None else None,
        "accepted": document.shape.accepted,
        "enum": list(document.shape.enum),
    }


def default_text(document: FieldDocument) -> str:
    """The default as text."""
    if document.required:
        return "required"
    if document.default is None:
        return "none"
    if document.shape.kind == "object":
        return "the defaults of its fields"
    if isinstance(document.default, dict):
        return ", ".join(f"{key} {value}" for key, value in document.default.items())
    return str(document.default) or '""'


def change_text(document: FieldDocument) -> str:
    """Live or structural, as text."""
    if document.change is None:
        return ""
    return (
        "live: applies to running engines"
        if document.change.value == "live"
        else "structural: applies to new pods"
    )


def show(explained: FieldExplanation) -> None:
    """Prints the reference of the field, or the tree of all fields."""
    out = console()
    if explained.field is None:
        tree = Tree(Text("KVTierPolicy (L live, S structural, * required)"))
        _add_fields(tree, explained.children)
        out.print(tree)
        return
    field = explained.field
    out.print(Text(explained.path, style="bold"))
    out.print(Text(f"  {field.description}"))
    properties = Table.grid(padding=(0, 2))
    for label, value in (
        ("type", field.shape.type_name),
        ("default", default_text(field)),
        ("change", change_text(field)),
        ("value", field.shape.accepted),
        *(("rule", rule) for rule in explained.rules),
    ):
        if value:
            properties.add_row(Text(f"  {label}", style="cyan"), Text(value))
    out.print(properties)
    if explained.children:
        out.print(Text("  fields", style="cyan"))
        table = Table.grid(padding=(0, 2))
        for child in explained.children:
            table.add_row(
                Text(f"    {child.alias}{'*' if child.required else ''}"),
                Text(child.shape.type_name),
                Text(child.description),
            )
        out.print(table)


def _add_fields(tree: Tree, documents: tuple[FieldDocument, ...]) -> None:
    for document in documents:
        if not document.description:
            continue  # a field of Kubernetes' metadata
        mark = {"live": " L", "structural": " S", None: ""}[
            document.change.value if document.change else None
        ]
        label = Text(f"{document.alias}{'*' if document.required else ''}", style="bold")
        label.append(f" {document.shape.type_name}{mark}", style="dim")
        _add_fields(tree.add(label), _subfields(document.shape))
