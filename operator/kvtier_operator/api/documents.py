"""Reading policy files: YAML or JSON, one or several documents, or lists of policies as `kubectl
get -o yaml` prints them.

Files are parsed as `kubectl` does (``yaml_scalars``). In addition, duplicate keys, keys that are
not text, aliases that expand a small file into a large one, and documents of other kinds are
errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from kvtier.config.loader import unique_keys
from kvtier_operator.api.policy import API_VERSION, KIND, KVTierPolicy
from kvtier_operator.api.validation import FieldError, InvalidDocumentError, format_value, validated
from kvtier_operator.api.yaml_scalars import Scalar, as_json, parse_scalar

MAX_FILE_BYTES = 1 << 20
"""A large policy has 10 KiB; a file may hold several."""
MAX_DEPTH = 64
"""Deepest nesting; the deepest policy has 10 levels.

Parsers recurse, so there has to be a bound.
"""
MAX_NODES = 200_000
"""Nodes of a file with aliases expanded."""
MAX_MERGED = 16
"""Mappings that one `<<` may merge, and (times 64) keys that come of it."""

_MERGE = "tag:yaml.org,2002:merge"

LIST_KINDS = {("v1", "List"), (API_VERSION, f"{KIND}List")}
ACCEPTED_KINDS = f"apiVersion {API_VERSION} with kind {KIND} (or a List of them)"


@dataclass(frozen=True, slots=True)
class Checked:
    """A policy of a file, or its errors. ``where``: index of the document, and of the item in a
    list.
    """

    where: str
    policy: KVTierPolicy | None
    errors: tuple[FieldError, ...]


class _Loader(yaml.SafeLoader):
    """Rejects what a policy must not have. Plain scalars are read as kubectl reads them."""

    _depth = 0

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        if kind is yaml.ScalarNode and value is not None and implicit[0]:
            return _MERGE if value == "<<" else _TAGS[type(parse_scalar(value))]
        return str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth >= MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH} levels"
            raise yaml.composer.ComposerError(None, None, problem, self.get_mark())
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            if (
                key.tag == _MERGE
                and isinstance(value, yaml.SequenceNode)
                and len(value.value) > MAX_MERGED
            ):
                raise yaml.constructor.ConstructorError(
                    None, None, f"more than {MAX_MERGED} merged mappings", key.start_mark
                )
        super().flatten_mapping(node)
        if len(node.value) > MAX_MERGED * 64:
            raise yaml.constructor.ConstructorError(
                None, None, "merges that expand", node.start_mark
            )


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> Iterator[dict[str, Any]]:
    mapping: dict[str, Any] = {}
    yield mapping
    written: set[Hashable] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:
            continue
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is not text; put it in quotes", key_node.start_mark
            )
        if key in written:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is defined more than once", key_node.start_mark
            )
        written.add(key)
    loader.flatten_mapping(node)
    mapping.update((str(key), value) for key, value in loader.construct_mapping(node).items())


def _construct_scalar(loader: _Loader, node: yaml.ScalarNode) -> Scalar:
    """A plain scalar, or one with a tag, which must have a value of that type."""
    value = parse_scalar(str(loader.construct_scalar(node)))
    is_number = type(value) is int and node.tag == _TAGS[float]
    if _TAGS[type(value)] != node.tag and not is_number:
        raise yaml.constructor.ConstructorError(
            None, None, f"{value!r} is not of the type {node.tag}", node.start_mark
        )
    return value


_TAGS: dict[type, str] = {
    type(None): "tag:yaml.org,2002:null",
    bool: "tag:yaml.org,2002:bool",
    int: "tag:yaml.org,2002:int",
    float: "tag:yaml.org,2002:float",
    str: "tag:yaml.org,2002:str",
}
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
for _type, _tag in _TAGS.items():
    if _type is not str:
        _Loader.add_constructor(_tag, _construct_scalar)


def parse(text: str | bytes) -> list[Checked]:
    """Every policy in a file, or its errors. A file that cannot be parsed is one entry."""
    try:
        documents = _documents(text)
    except InvalidDocumentError as error:
        return [Checked("", None, tuple(error.errors))]
    if not documents:
        return [
            Checked(
                "",
                None,
                (FieldError.malformed("", f"the file is empty; must have {ACCEPTED_KINDS}"),),
            )
        ]
    several = len(documents) > 1
    checked: list[Checked] = []
    for index, document in enumerate(documents):
        where = f"document {index}" if several else ""
        checked.extend(_expand(document, where))
    return checked


def load_policy(text: str | bytes) -> KVTierPolicy:
    """The only policy of a file. Raises ``InvalidDocumentError``, also for more than one."""
    checked = parse(text)
    errors = [error for entry in checked for error in entry.errors]
    if errors:
        raise InvalidDocumentError(errors)
    policies = [entry.policy for entry in checked if entry.policy is not None]
    if len(policies) != 1:
        raise InvalidDocumentError(
            [FieldError.malformed("", f"the file has {len(policies)} policies; must have one")]
        )
    return policies[0]


def _documents(text: str | bytes) -> list[Any]:
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InvalidDocumentError(
                [FieldError.malformed("", f"byte {error.start} is not UTF-8; must be YAML or JSON")]
            ) from None
    if len(text) > MAX_FILE_BYTES:
        raise InvalidDocumentError(
            [FieldError.malformed("", f"must have at most {MAX_FILE_BYTES} characters")]
        )
    try:
        documents = _raw_documents(text)
    except yaml.YAMLError as error:
        raise InvalidDocumentError(
            [FieldError.malformed(_position(error), f"must be YAML or JSON: {_problem(error)}")]
        ) from None
    except RecursionError:
        raise InvalidDocumentError(
            [FieldError.malformed("", f"must have at most {MAX_DEPTH} levels")]
        ) from None
    except ValueError as error:
        raise InvalidDocumentError(
            [FieldError.malformed("", f"must be YAML or JSON: {error}")]
        ) from None
    # `---` at the start or the end makes an empty document, which kubectl skips as well.
    documents = [document for document in documents if document is not None]
    for document in documents:
        _check_numbers(document, 0, [MAX_NODES])
    return documents


def _raw_documents(text: str) -> list[Any]:
    if text.lstrip().startswith("{"):
        # JSON may be indented with tabs, which YAML rejects. Other text that starts with { is YAML
        # in flow style.
        try:
            return [json.loads(text, object_pairs_hook=unique_keys, parse_float=_json_float)]
        except json.JSONDecodeError:
            pass
    return list(yaml.load_all(text, Loader=_Loader))


def _json_float(text: str) -> int | float:
    return as_json(float(text))


def _check_numbers(value: Any, depth: int, budget: list[int]) -> None:
    budget[0] -= 1
    if budget[0] < 0 or depth > MAX_DEPTH:
        raise InvalidDocumentError(
            [
                FieldError.malformed(
                    "",
                    f"must have at most {MAX_NODES} values and {MAX_DEPTH} levels with aliases "
                    "expanded",
                )
            ]
        )
    if isinstance(value, dict):
        for item in value.values():
            _check_numbers(item, depth + 1, budget)
    elif isinstance(value, list):
        for item in value:
            _check_numbers(item, depth + 1, budget)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidDocumentError([FieldError.invalid("", str(value), "must be a finite number")])


def _problem(error: yaml.YAMLError) -> str:
    problem = (
        getattr(error, "problem", None)
        or getattr(error, "reason", None)
        or str(error).splitlines()[0]
    )
    return str(problem)


def _position(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return _mark(mark) if mark is not None else ""


def _mark(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


def _expand(document: Any, where: str) -> Iterator[Checked]:
    if isinstance(document, dict) and _kind(document) in LIST_KINDS:
        items = document.get("items")
        if not isinstance(items, list) or not items:
            yield Checked(
                where,
                None,
                (FieldError.invalid("items", items, "must be a list of at least one policy"),),
            )
            return
        for index, item in enumerate(items):
            yield _check(item, f"{where}, item {index}" if where else f"item {index}")
        return
    yield _check(document, where)


def _kind(document: dict[str, Any]) -> tuple[str, str]:
    return str(document.get("apiVersion")), str(document.get("kind"))


def _check(document: Any, where: str) -> Checked:
    if not isinstance(document, dict):
        return Checked(
            where, None, (FieldError.invalid("", document, f"must be a mapping: {ACCEPTED_KINDS}"),)
        )
    wrong = [
        FieldError.unsupported(field, document[field], [expected])
        if field in document
        else FieldError.required(field, f"must be {format_value(expected)}")
        for field, expected in (("apiVersion", API_VERSION), ("kind", KIND))
        if document.get(field) != expected
    ]
    if wrong:
        # Further errors of an object of another kind do not help.
        return Checked(where, None, tuple(wrong))
    try:
        return Checked(where, validated(KVTierPolicy, document), ())
    except InvalidDocumentError as error:
        return Checked(where, None, tuple(error.errors))
