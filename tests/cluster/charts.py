"""The chart on a cluster, installed by Helm's own code.

``Release`` is one installation. ``object_list`` returns the objects that it rendered.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Self

import helm_python as helm
import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "kvtier"
PREVIOUS = Path(__file__).resolve().parent / "releases" / "kvtier-0.0.9.tgz"
"""The chart before labels, accounts, budgets and cert-manager became values. A release replaces it
by the archive of the chart before."""
NAMESPACE = "kvtier-system"
NAME = "kvtier"


def without_definition(cluster: Any) -> None:
    """Removes the definition that other tests applied: Helm does not adopt objects of others."""
    cluster.kubectl(
        "delete",
        "crd",
        "kvtierpolicies.kvtier.io",
        "--ignore-not-found",
        "--wait=true",
        "--timeout=60s",
    )


class Release:
    """Installs, upgrades and uninstalls the chart as release ``kvtier`` in ``kvtier-system``."""

    def __init__(self, kubeconfig: Path, context: str, namespace: str = NAMESPACE) -> None:
        self.namespace = namespace
        self._config = helm.Config(
            kubeconfig_path=kubeconfig, kube_context=context, namespace=namespace
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._config.close()

    def install(
        self, values: dict[str, Any] | None = None, chart: Path = CHART, wait_seconds: int = 0
    ) -> dict[str, Any]:
        """``helm install --create-namespace``, with ``--wait`` where ``wait_seconds`` is given."""
        return self._config.install(
            chart,
            NAME,
            values,
            namespace=self.namespace,
            create_namespace=True,
            **({"wait": "watcher", "timeout": wait_seconds} if wait_seconds else {}),
        )

    def upgrade(
        self, values: dict[str, Any] | None = None, chart: Path = CHART, wait_seconds: int = 0
    ) -> dict[str, Any]:
        """``helm upgrade``."""
        waiting = {"wait": "watcher", "timeout": wait_seconds} if wait_seconds else {}
        return self._config.upgrade(chart, NAME, values, namespace=self.namespace, **waiting)

    def rollback(self, wait_seconds: int = 0) -> None:
        """``helm rollback`` to the revision before."""
        waiting = {"wait": "watcher", "timeout": wait_seconds} if wait_seconds else {}
        self._config.rollback(NAME, **waiting)

    def manifest(self) -> str:
        """The objects of the current revision, as YAML."""
        return str(self._config.status(NAME)["manifest"])

    def uninstall(self, wait_seconds: int = 0) -> dict[str, Any]:
        """``helm uninstall``; no error where nothing is installed."""
        waiting = {"wait": "watcher", "timeout": wait_seconds} if wait_seconds else {}
        return self._config.uninstall(NAME, ignore_not_found=True, **waiting)


def changed_chart(home: Path, version: str, property_name: str) -> Path:
    """A copy of the chart as a later release: a new version, and one more field in the CRD."""
    copy = home / f"chart-{version}"
    shutil.copytree(CHART, copy)
    description = yaml.safe_load((copy / "Chart.yaml").read_text())
    (copy / "Chart.yaml").write_text(yaml.safe_dump({**description, "version": version}))
    (path,) = (copy / "files" / "crds").iterdir()
    definition = yaml.safe_load(path.read_text())
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"][property_name] = {
        "type": "string",
        "maxLength": 63,
        "description": "Of a later release. Live.",
    }
    path.write_text(yaml.safe_dump(definition, sort_keys=False))
    return copy


def rendered(release: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a release, as ``install`` and ``upgrade`` return it."""
    return [body for body in yaml.load_all(release["manifest"], yaml.CSafeLoader) if body]
