"""The chart, rendered by Helm's own code without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip(
    "helm_python", reason="the chart is rendered by Helm's own code: helm-python-sdk"
)

REPOSITORY = Path(__file__).resolve().parents[3]
CHART = REPOSITORY / "charts" / "kvtier"
NAMESPACE = "kvtier-system"


class _Loader(yaml.SafeLoader):
    """Rejects an object that has a key twice, as Kustomize and Flux do."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
    assert not repeated, f"line {node.start_mark.line + 1}: keys that are there twice: {repeated}"
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def render_files(
    values: dict[str, Any] | None = None, namespace: str = NAMESPACE
) -> dict[str, str]:
    """The text of each template that renders an object, by the template's name."""
    with helm.Chart.load(CHART) as chart:
        rendered = chart.render(values or {}, name="kvtier", namespace=namespace)
    texts = {name.rpartition("/")[2]: text for name, text in rendered.items()}
    return {name: text for name, text in texts.items() if text.strip() and name != "NOTES.txt"}


def render(
    values: dict[str, Any] | None = None, namespace: str = NAMESPACE
) -> list[dict[str, Any]]:
    """The objects. ``values`` replace defaults, as those of ``--values`` do."""
    texts = render_files(values, namespace).values()
    return [body for text in texts for body in yaml.load_all(text, _Loader) if body]


def one(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    found = [
        body
        for body in objects
        if body["kind"] == kind and (name is None or body["metadata"]["name"] == name)
    ]
    assert len(found) == 1, f"{kind} {name}: {len(found)}"
    return found[0]
