"""The CustomResourceDefinition, generated from the models. ``python -m kvtier_operator.api.crd``
writes ``crds/``.

Defaults of live fields are in the schema, so the object shows them, except in items of lists: a
client-side apply replaces a list as a whole, so that a default in an item would make each apply of
an unchanged file a change. Fields that have no effect in this version have no default either.
Defaults of structural fields are applied by the operator when it reads the object. The structural
hash covers only what was *written*: if the API server filled in the defaults, a changed default
would make every pod outdated.

Bounds. The API server estimates what a CEL rule may cost from ``maxLength``, ``maxItems`` and
``maxProperties``, so every text, list and map has one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from kvtier_operator.api.base import Change, Model, Rule, Scalar
from kvtier_operator.api.fields import ITEM, KEY, FieldDocument, Shape, fields_of
from kvtier_operator.api.policy import GROUP, KIND, MAX_POLICY_NAME, VERSION, KVTierPolicy
from kvtier_operator.api.quantity import MAX_TEXT, PATTERN
from kvtier_operator.api.unenforced import NOT_ENFORCED, is_listed

Part = TypeVar("Part")

MAX_INT32 = 2**31 - 1
PLURAL = "kvtierpolicies"
SINGULAR = "kvtierpolicy"
SHORT_NAME = "kvtp"
CATEGORY = "kvtier"
FILE_NAME = f"{GROUP}_{PLURAL}.yaml"

PRINTER_COLUMNS: tuple[dict[str, Any], ...] = (
    {
        "name": "Ready",
        "type": "string",
        "jsonPath": '.status.conditions[?(@.type=="Ready")].status',
    },
    {
        "name": "Reason",
        "type": "string",
        "jsonPath": '.status.conditions[?(@.type=="Ready")].reason',
    },
    {
        "name": "Pods",
        "type": "string",
        "description": "Pods with tiers, of those that the policy governs.",
        "jsonPath": ".status.summary.pods",
    },
    {
        "name": "Hit%",
        "type": "integer",
        "description": "Prompt tokens loaded from tiers, last five minutes.",
        "jsonPath": ".status.summary.hitTokensPercent",
    },
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "Tiers", "type": "string", "priority": 1, "jsonPath": ".status.summary.tiers"},
    {"name": "Structural", "type": "string", "priority": 1, "jsonPath": ".status.structuralHash"},
    {"name": "Live", "type": "integer", "priority": 1, "jsonPath": ".status.liveGeneration"},
)


NAME_MESSAGE = f"metadata.name must have at most {MAX_POLICY_NAME} characters"


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": [CATEGORY],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root()},
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": list(PRINTER_COLUMNS),
                }
            ],
        },
    }


def _root() -> dict[str, Any]:
    documents = {document.alias: document for document in fields_of(KVTierPolicy)}
    return {
        "type": "object",
        "description": (KVTierPolicy.__doc__ or "").strip(),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _property(documents["spec"], "spec"),
            "status": _property(documents["status"], "status"),
        },
        "x-kubernetes-validations": [
            {
                "rule": f"self.metadata.name.size() <= {MAX_POLICY_NAME}",
                "message": NAME_MESSAGE,
                "messageExpression": f"'{NAME_MESSAGE}, got ' + self.metadata.name",
            }
        ],
    }


def _property(document: FieldDocument, path: str) -> dict[str, Any]:
    """The schema of a field. ``path``: its path, as in ``fields.all_fields``."""
    schema = {"description": _description(document, path), **_schema(document.shape, path)}
    if not _may_have_default(path):
        return schema
    if (
        document.change is Change.LIVE
        and document.default is not None
        and document.shape.kind != "object"
    ):
        schema["default"] = document.default
    elif _has_live_defaults(document, path):
        schema["default"] = {}
    return schema


def _may_have_default(path: str) -> bool:
    return ITEM not in path and not is_listed(path)


def _description(document: FieldDocument, path: str) -> str:
    text = document.description
    if path in NOT_ENFORCED:
        text += f" Has no effect in this version: {NOT_ENFORCED[path]}."
    elif (
        (document.change is Change.STRUCTURAL or not _may_have_default(path))
        and document.shape.kind != "object"
        and document.default not in (None, "")
    ):
        text += f" Default: {_words(document.default)}."
    if document.change is not None and not (
        document.shape.kind == "object" and document.change is Change.LIVE
    ):
        text += " Live." if document.change is Change.LIVE else " Structural."
    return text.strip()


def _words(default: Any) -> str:
    if isinstance(default, dict):
        return ", ".join(f"{key} {value}" for key, value in default.items())
    return str(default)


def _has_live_defaults(document: FieldDocument, path: str) -> bool:
    """Whether an absent object must be added for the live defaults in it."""
    model = document.shape.model
    return (
        document.shape.kind == "object"
        and model is not None
        and document.default is not None
        and any(
            field.change is Change.LIVE
            and field.default is not None
            and _may_have_default(f"{path}.{field.alias}")
            for field in fields_of(model)
        )
    )


def _schema(shape: Shape, path: str) -> dict[str, Any]:
    match shape.kind:
        case "object":
            schema = _object(_known(shape.model), path)
        case "list":
            schema = _list(shape, path)
        case "map":
            schema = {
                "type": "object",
                "additionalProperties": _schema(_known(shape.item), f"{path}.{KEY}"),
                "maxProperties": shape.max_length,
            }
            if shape.key is not None and shape.key.pattern is not None:
                schema["x-kubernetes-validations"] = [_key_rule(shape.key)]
        case "quantity" | "size or percentage":
            schema = {
                "anyOf": [{"type": "integer"}, {"type": "string"}],
                "x-kubernetes-int-or-string": True,
                "maxLength": MAX_TEXT,
            }
            if not shape.scalars:
                schema["pattern"] = PATTERN
        case "integer":
            small = shape.maximum is not None and shape.maximum <= MAX_INT32
            schema = {"type": "integer", "format": "int32" if small else "int64"}
            for key, bound in (
                ("minimum", shape.minimum),
                ("maximum", shape.maximum),
                ("multipleOf", shape.multiple_of),
            ):
                if bound is not None:
                    schema[key] = bound
        case "string":
            schema = {"type": "string"}
            if shape.enum:
                schema["enum"] = list(shape.enum)
            for key, value in (
                ("minLength", shape.min_length),
                ("maxLength", shape.max_length),
                ("pattern", shape.pattern),
                ("format", shape.format),
            ):
                if value is not None:
                    schema[key] = value
        case _:
            schema = {"x-kubernetes-preserve-unknown-fields": True}
    if shape.scalars:
        schema.setdefault("x-kubernetes-validations", []).extend(
            _scalar_rule(scalar) for scalar in shape.scalars
        )
    return schema


def _known(part: Part | None) -> Part:
    if part is None:
        raise TypeError("an object, list or map without a type")
    return part


def _list(shape: Shape, path: str) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "array",
        "items": _schema(_known(shape.item), path + ITEM),
        "maxItems": shape.max_length,
    }
    if shape.min_length is not None:
        schema["minItems"] = shape.min_length
    if shape.map_key is not None:
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [shape.map_key]}
    else:
        schema["x-kubernetes-list-type"] = "atomic"
    return schema


def _object(model: type[BaseModel], path: str) -> dict[str, Any]:
    documents = fields_of(model)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            document.alias: _property(document, f"{path}.{document.alias}")
            for document in documents
        },
    }
    required = [document.alias for document in documents if document.required]
    if required:
        schema["required"] = required
    rules = (
        [_rule(rule) for rule in model.rules if rule.cel is not None]
        if issubclass(model, Model)
        else []
    )
    if rules:
        schema["x-kubernetes-validations"] = rules
    return schema


def _rule(rule: Rule) -> dict[str, Any]:
    return _validation(rule.cel or "", rule.message, rule.expression, rule.field_path)


def _scalar_rule(scalar: Scalar) -> dict[str, Any]:
    return _validation(scalar.cel, scalar.message, scalar.expression, None)


def _key_rule(key: Shape) -> dict[str, Any]:
    return _validation(
        f"self.all(key, key.size() <= {key.max_length} && "
        f"key.matches({_quoted(key.pattern or '')}))",
        f"each key must be {key.accepted}",
        f"'each key must be {key.accepted}, got ' + "
        f"self.filter(key, !key.matches({_quoted(key.pattern or '')}))[0]",
        None,
    )


def _quoted(text: str) -> str:
    return "r'" + text + "'"


def _validation(
    cel: str, message: str, expression: str | None, field_path: str | None
) -> dict[str, Any]:
    rule = {"rule": cel, "message": message}
    if expression is not None:
        rule["messageExpression"] = expression
    if field_path is not None:
        rule["fieldPath"] = field_path
    return rule


def text() -> str:
    """The content of the file."""
    body = yaml.safe_dump(definition(), sort_keys=False, width=120, allow_unicode=True)
    return f"# Generated from the models by `python -m kvtier_operator.api.crd`.\n{body}"


def main(arguments: list[str] | None = None) -> int:
    """Writes the file into the directory in the arguments, or into ``crds``."""
    given = sys.argv[1:] if arguments is None else arguments
    directory = Path(given[0] if given else "crds")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE_NAME).write_text(text())
    sys.stdout.write(f"{directory / FILE_NAME}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
