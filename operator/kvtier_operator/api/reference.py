"""The reference page, generated from the models. ``python -m kvtier_operator.api.reference`` writes
it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from kvtier_operator.api.base import Model
from kvtier_operator.api.crd import CATEGORY, PRINTER_COLUMNS, SHORT_NAME
from kvtier_operator.api.fields import ITEM, FieldDocument, Shape, fields_of
from kvtier_operator.api.policy import API_VERSION, KIND, KVTierPolicy

FILE = Path("docs/reference/policy.md")


def text() -> str:
    """The page."""
    columns = ", ".join(
        str(column["name"]) for column in PRINTER_COLUMNS if not column.get("priority")
    )
    wide = ", ".join(str(column["name"]) for column in PRINTER_COLUMNS if column.get("priority"))
    lines = [
        f"# {KIND}",
        "",
        "<!-- Generated from the models by `python -m kvtier_operator.api.reference`. -->",
        "",
        f"`apiVersion: {API_VERSION}`, `kind: {KIND}`, namespaced. Short name `{SHORT_NAME}`, "
        f"category `{CATEGORY}`.",
        "",
        "**Live** fields change under a running engine. **Structural** fields need a new pod. "
        "Sizes are "
        "Kubernetes quantities",
        "(`64Gi`, `500M`, `1.5Ti`, a number of bytes).",
        "",
        "`kvtier explain FIELD` shows the same for one field, `kvtier validate FILE...` checks "
        "files.",
        "",
        f"`kubectl get {SHORT_NAME}` shows {columns}; with `-o wide` also {wide}.",
        "",
    ]
    for path, model in _objects(KVTierPolicy, ""):
        lines += _section(path, model)
    return "\n".join(lines)


def _objects(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    if path:
        yield path, model
    for document in fields_of(model):
        if not document.description or document.alias == "metadata":
            continue
        inner: Shape | None = document.shape
        below = f"{path}.{document.alias}" if path else document.alias
        while inner is not None and inner.kind in ("list", "map"):
            below += ITEM if inner.kind == "list" else ""
            inner = inner.item
        if inner is not None and inner.model is not None:
            yield from _objects(inner.model, below)


def _section(path: str, model: type[BaseModel]) -> list[str]:
    about = " ".join((model.__doc__ or "").split())
    lines = [
        f"## {path}",
        "",
        about,
        "",
        "| field | type | default | change | meaning | allowed values |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(document) for document in fields_of(model)]
    rules = (
        [rule.description for rule in model.rules if rule.message]
        if issubclass(model, Model)
        else []
    )
    if rules:
        lines += ["", *(f"* {rule}" for rule in rules)]
    return [*lines, ""]


def _row(document: FieldDocument) -> str:
    shape = document.shape
    accepted = "see below" if _holds_object(shape) else shape.accepted
    cells = (
        f"`{document.alias}`",
        shape.type_name,
        _default(document),
        document.change.value if document.change is not None else "",
        document.description,
        accepted,
    )
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def _holds_object(shape: Shape) -> bool:
    inner: Shape | None = shape
    while inner is not None and inner.kind in ("list", "map"):
        inner = inner.item
    return inner is not None and inner.kind == "object"


def _default(document: FieldDocument) -> str:
    if document.required:
        return "**required**"
    if document.default is None or document.shape.kind == "object":
        return ""
    if isinstance(document.default, dict):
        return ", ".join(f"{key} {value}" for key, value in document.default.items())
    return f"`{document.default}`" if document.default != "" else "empty"


def main(arguments: list[str] | None = None) -> int:
    """Writes the page to the file in the arguments, or to ``docs/reference/policy.md``."""
    given = sys.argv[1:] if arguments is None else arguments
    file = Path(given[0]) if given else FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text())
    sys.stdout.write(f"{file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
