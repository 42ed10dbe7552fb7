"""Every value of the chart changes what the chart renders: no value is accepted and ignored.

The values are those of ``values.schema.json``. Each one is set to another value than its default,
in a release in which it matters, and some object must differ.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.unit.chart.rendered import CHART, NAMESPACE, helm

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
NO_EFFECT = ("global", "enabled")
"""Helm gives them to charts that another one depends on."""
OTHER_IMAGE = f"mirror.example/x@sha256:{'0' * 64}"
MONITOR = {"enabled": True}
ALTERNATIVES: dict[str, Any] = {
    "images.registry": "mirror.example",
    "images.injectedPullSecret": "mirror",
    "allowedVolumes": [{"namespaces": ["*"], "hostPath": "/mnt/kv"}],
    "policyBounds.storageGids": [{"min": 1, "max": 2}],
    "policyBounds.pythonPaths": ["/other"],
    "podSecurityContext": {"runAsUser": 7},
    "containerSecurityContext": {"privileged": False},
    "controller.leaderElection.renewDeadlineSeconds": 7,
    "webhook.certificates.renewBeforeSeconds": 3600,
    "webhook.certificates.injectCAFrom": "other/leaf",
    "webhook.namespaceSelector.matchExpressions": [{"key": "a", "operator": "Exists"}],
    "monitoring.runbooksUrl": "https://runbooks.example",
}
"""Values where the schema does not suggest one."""
ITEMS = {
    "extraEnv": {"name": "A", "value": "b"},
    "extraVolumes": {"name": "a", "emptyDir": {}},
    "extraVolumeMounts": {"name": "base", "mountPath": "/a"},
    "tolerations": {"key": "a", "operator": "Exists"},
    "topologySpreadConstraints": {
        "maxSkew": 3,
        "topologyKey": "a",
        "whenUnsatisfiable": "DoNotSchedule",
    },
    "relabelings": {"action": "drop"},
    "metricRelabelings": {"action": "drop"},
    "metricsFrom": {"podSelector": {}},
}
CERT_MANAGER = {"webhook": {"certificates": {"mode": "CertManager"}}}
NEEDS: dict[str, dict[str, Any]] = {
    "webhook.certificates.lifetimeSeconds": CERT_MANAGER,
    "webhook.certificates.issuerRef": {
        "webhook": {"certificates": {"mode": "CertManager", "issuerRef": {"name": "a"}}}
    },
    "webhook.certificates.injectCAFrom": {"webhook": {"certificates": {"mode": "Mounted"}}},
    "webhook.podDisruptionBudget.maxUnavailable": {
        "webhook": {"podDisruptionBudget": {"minAvailable": None, "maxUnavailable": 1}}
    },
    "controller.podDisruptionBudget.maxUnavailable": {
        "controller": {"podDisruptionBudget": {"minAvailable": None, "maxUnavailable": 1}}
    },
    "controller.extraVolumeMounts": {
        "controller": {"extraVolumes": [{"name": "base", "emptyDir": {}}]}
    },
    "webhook.extraVolumeMounts": {"webhook": {"extraVolumes": [{"name": "base", "emptyDir": {}}]}},
    "networkPolicy.metricsFrom": {"networkPolicy": {"enabled": True}},
    **{
        f"monitoring.{kind}": {"monitoring": {kind: MONITOR}}
        for kind in ("prometheusRule", "podMonitor", "serviceMonitor", "dashboards", "service")
    },
    "monitoring.runbooksUrl": {"monitoring": {"prometheusRule": MONITOR}},
    "webhook.podDisruptionBudget.minAvailable": {"webhook": {"replicas": 3}},
    "controller.podDisruptionBudget.minAvailable": {"controller": {"replicas": 3}},
}
"""What a release must have for a value to matter, by the start of its path."""


def _leaves(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, found in schema.get("properties", {}).items():
        below = f"{path}.{key}" if path else key
        if "properties" in found:
            yield from _leaves(found, below)
        elif below not in NO_EFFECT:
            yield below, found


LEAVES = dict(_leaves(SCHEMA))
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def _current(base: dict[str, Any], path: str) -> Any:
    """The value that a release has; None if there is none."""
    for values in (base, DEFAULTS):
        found: Any = values
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if found is not None:
            return found
    return None


def _another(path: str, schema: dict[str, Any], current: Any) -> Any:
    """A valid value that is not the current one."""
    name = path.rpartition(".")[2]
    if path in ALTERNATIVES:
        return ALTERNATIVES[path]
    if name in ITEMS:
        return [ITEMS[name]]
    if "enum" in schema:
        return next(each for each in reversed(schema["enum"]) if each != current)
    kinds = schema.get("type") or [each.get("type") for each in schema["anyOf"]]
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if path.startswith("images.") and kind == "string":
        return OTHER_IMAGE
    number = (current or schema.get("minimum", 1)) + 1 if kind in ("integer", "number") else None
    if name in ("interval", "scrapeTimeout"):
        return "45s"
    others = {
        "boolean": not current,
        "integer": number,
        "number": number,
        "string": "other",
        "array": ["other"],
        "object": {"cpu": "77m"} if name in ("requests", "limits") else {"other": "x"},
    }
    return others[str(kind)]


def _merged(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(base)
    *parents, last = path.split(".")
    place = found
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    return found


def _needs(path: str) -> dict[str, Any]:
    starts = [start for start in NEEDS if path == start or path.startswith(f"{start}.")]
    return NEEDS[max(starts, key=len)] if starts else {}


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    with helm.Chart.load(CHART) as loaded:
        yield loaded


def _rendered(chart: Any, values: dict[str, Any]) -> dict[str, str]:
    texts = chart.render(values, name="kvtier", namespace=NAMESPACE)
    return {name: text for name, text in texts.items() if not name.endswith("NOTES.txt")}


@pytest.mark.parametrize("path", LEAVES)
def test_a_value_changes_what_is_rendered(chart: Any, path: str) -> None:
    base = _needs(path)
    current = _current(base, path)
    value = _another(path, LEAVES[path], current)
    assert value != current
    assert _rendered(chart, _merged(base, path, value)) != _rendered(chart, base)
