"""The generated files in the repository are current and describe every field."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_operator.api import crd, reference
from kvtier_operator.api.base import Change
from kvtier_operator.api.documents import parse
from kvtier_operator.api.fields import all_fields, walk
from kvtier_operator.api.policy import KVTierPolicy, PolicySpec
from kvtier_operator.api.unenforced import is_listed

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_crd_has_not_drifted() -> None:
    committed = (REPOSITORY / "crds" / crd.FILE_NAME).read_text()
    assert committed == crd.text(), "run: python -m kvtier_operator.api.crd"


def test_the_reference_has_not_drifted() -> None:
    assert (REPOSITORY / reference.FILE).read_text() == reference.text(), (
        "run: python -m kvtier_operator.api.reference"
    )


POLICIES = sorted(
    path
    for path in (REPOSITORY / "examples").glob("*.yaml")
    if "kind: KVTierPolicy" in path.read_text()
)


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_examples_are_accepted(path: Path) -> None:
    for checked in parse(path.read_bytes()):
        assert checked.errors == ()


def _schemas(schema: dict[str, Any], path: str = "") -> Any:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from _schemas(inner, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            yield from _schemas(schema[keyword], f"{path}.{keyword}")


@cache
def _root() -> dict[str, Any]:
    definition = yaml.safe_load(crd.text())
    schema: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def test_every_text_list_and_map_of_the_schema_has_a_bound() -> None:
    for path, schema in _schemas(_root()):
        if path in ("", ".apiVersion", ".kind", ".metadata"):
            continue
        kind = schema.get("type")
        if kind == "string":
            assert "maxLength" in schema or "enum" in schema, path
        elif kind == "array":
            assert isinstance(schema["maxItems"], int), path
        elif "additionalProperties" in schema:
            assert isinstance(schema["maxProperties"], int), path


def test_only_live_fields_outside_lists_that_have_an_effect_have_a_default_in_the_schema() -> None:
    for path, document in all_fields(PolicySpec):
        schema = _at(f"spec.{path}")
        if document.shape.kind == "object":
            continue
        in_list, listed = "[]" in path, is_listed(f"spec.{path}")
        if (
            document.change is Change.LIVE
            and document.default is not None
            and not (in_list or listed)
        ):
            assert schema["default"] == document.default, path
        else:
            assert "default" not in schema, path


def _at(path: str) -> dict[str, Any]:
    schema = _root()
    for part in path.split("."):
        name = part.removesuffix("[]")
        schema = schema["additionalProperties"] if name == "<key>" else schema["properties"][name]
        if part.endswith("[]"):
            schema = schema["items"]
    return schema


def test_every_field_of_the_spec_is_described_and_marked_live_or_structural() -> None:
    for path, document in all_fields(PolicySpec):
        assert document.description.endswith("."), path
        assert document.change is not None, path
        assert document.shape.accepted, path


@pytest.mark.parametrize(
    "path",
    [
        ("spec", "minLoadTokens"),
        ("spec", "minStoreTokens"),
        ("spec", "selection"),
        ("spec", "tiers", 0, "loadWeight"),
        ("spec", "tiers", 0, "lookupTimeoutMilliseconds"),
        ("spec", "tiers", 0, "loadTimeoutSeconds"),
        ("spec", "tiers", 0, "storePolicy"),
        ("spec", "tiers", 0, "maxPendingStoreBytes"),
        ("spec", "tiers", 0, "maxWriteBytesPerSecond"),
        ("spec", "tiers", 0, "fileSystem", "capacity"),
        ("spec", "tiers", 0, "fileSystem", "highWatermarkPercent"),
        ("spec", "tiers", 0, "fileSystem", "lowWatermarkPercent"),
        ("spec", "tiers", 0, "fileSystem", "retentionSeconds"),
        ("spec", "tiers", 0, "fileSystem", "sync"),
        ("spec", "tiers", 0, "lmcache", "capacity"),
        ("spec", "breaker", "failureThreshold"),
        ("spec", "breaker", "periodSeconds"),
        ("spec", "attach", "startTimeoutSeconds"),
        ("spec", "attach", "retrySeconds"),
        ("spec", "rollout", "strategy"),
        ("spec", "monitoring", "podMonitor"),
    ],
    ids=lambda path: ".".join(str(part) for part in path),
)
def test_these_and_no_other_fields_are_live(path: tuple[str | int, ...]) -> None:
    _, document = walk(KVTierPolicy, path)
    assert document is not None
    assert document.change is Change.LIVE


def test_the_number_of_live_values_is_known() -> None:
    live = [
        path
        for path, document in all_fields(PolicySpec)
        if document.change is Change.LIVE and document.shape.kind != "object"
    ]
    assert len(live) == 28
