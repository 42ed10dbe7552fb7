"""Scrape configurations from PodMonitors, as the Prometheus operator writes them.

The monitors are the documented one of tiers and the chart's of the operator, so a scrape proves
their selectors, port names, relabelings and tokens. Discovery is done here, with the labels that
Prometheus' discovery of pods sets, because Debian's Prometheus has none for Kubernetes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml
from charts import CHART, NAMESPACE
from nodes import ok

DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"
Job = dict[str, Any]


def of_tiers() -> dict[str, Any]:
    """The PodMonitor of docs/monitoring.md: of policy ``serving/chat``."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", DOCUMENTED.read_text(), re.MULTILINE | re.DOTALL)
    return dict(yaml.safe_load(next(each for each in blocks if "kind: PodMonitor" in each)))


def of_operator() -> dict[str, Any]:
    """The PodMonitor of the chart, with default values except that it is enabled."""
    values = {"monitoring": {"podMonitor": {"enabled": True}}}
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="kvtier", namespace=NAMESPACE)
    (text,) = (text for name, text in texts.items() if name.endswith("/monitoring.yaml"))
    return dict(yaml.safe_load(text))


def jobs(api: Any, monitor: Mapping[str, Any], directory: Path) -> Iterator[Job]:
    """A job for each endpoint of a monitor, with the pods that its namespace has now. Tokens are
    written into ``directory``.
    """
    namespace, name = monitor["metadata"]["namespace"], monitor["metadata"]["name"]
    pods = ok(api.request("GET", f"/api/v1/namespaces/{namespace}/pods"))["items"]
    targets = [target for pod in pods for target in discovered(pod)]
    spec = monitor["spec"]
    for number, endpoint in enumerate(spec["podMetricsEndpoints"]):
        job: Job = {
            "job_name": f"podMonitor/{namespace}/{name}/{number}",
            "static_configs": targets,
            "relabel_configs": [
                _rule(["pod_phase"], "drop", "(Failed|Succeeded)"),
                *(
                    _rule([f"pod_label_{_plain(key)}"], "keep", re.escape(value))
                    for key, value in spec["selector"].get("matchLabels", {}).items()
                ),
                _rule(["pod_container_port_name"], "keep", endpoint["port"]),
                _rule(["namespace"], "replace", target="namespace"),
                _rule(["pod_container_name"], "replace", target="container"),
                _rule(["pod_name"], "replace", target="pod"),
                *(_as_prometheus(each) for each in endpoint.get("relabelings", ())),
            ],
        }
        if "authorization" in endpoint:
            chosen = endpoint["authorization"]["credentials"]
            path = f"/api/v1/namespaces/{namespace}/secrets/{chosen['name']}"
            data = ok(api.request("GET", path))["data"][chosen["key"]]
            token = directory / f"token-{name}-{number}"
            token.write_bytes(base64.b64decode(data))
            job["authorization"] = {"credentials_file": str(token)}
        yield job


def discovered(pod: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The targets of a pod: one for each port that a container declares. None of a pod that is
    being deleted, which Prometheus would find down.
    """
    metadata, status = pod["metadata"], pod["status"]
    if "podIP" not in status or "deletionTimestamp" in metadata:
        return
    labels = {
        "namespace": metadata["namespace"],
        "pod_name": metadata["name"],
        "pod_uid": metadata["uid"],
        "pod_ip": status["podIP"],
        "pod_phase": status["phase"],
    }
    for kind in ("label", "annotation"):
        for key, value in metadata.get(f"{kind}s", {}).items():
            labels[f"pod_{kind}_{_plain(key)}"] = value
    for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
        for port in container.get("ports", ()):
            number = str(port["containerPort"])
            own = {
                "pod_container_name": container["name"],
                "pod_container_port_name": port.get("name", ""),
                "pod_container_port_number": number,
            }
            found = {f"__meta_kubernetes_{key}": value for key, value in (labels | own).items()}
            yield {"targets": [f"{status['podIP']}:{number}"], "labels": found}


def _plain(key: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", key)


def _rule(sources: list[str], action: str, regex: str = "(.*)", target: str = "") -> dict[str, Any]:
    rule: dict[str, Any] = {
        "source_labels": [f"__meta_kubernetes_{each}" for each in sources],
        "action": action,
        "regex": regex,
    }
    return {**rule, "target_label": target} if target else rule


def _as_prometheus(relabeling: Mapping[str, Any]) -> dict[str, Any]:
    return {
        re.sub(r"([A-Z])", lambda found: f"_{found[1].lower()}", key): value
        for key, value in relabeling.items()
    }
