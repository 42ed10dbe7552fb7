"""The operator on the node, installed from its images and chart, with the chart's permissions."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import images
import openshift
from charts import NAMESPACE, Release, without_definition
from nodes import make_namespace, ok, wait_for
from stub_engine_pods import STORAGE_GID, Place

DEAD_EXPORT = {"server": "192.0.2.1", "exportPrefix": "/kv"}
"""A server that never answers (an address for documentation)."""
QUICK = {
    "controller": {"pollSeconds": 2, "statusBytesSeconds": 2, "resyncSeconds": 30},
    "webhook": {"drainSeconds": 0},
}
"""Short periods, so that tests do not wait half a minute for a status."""


def load_images(cluster: Any) -> None:
    """Builds the images that are released, and loads them on the node under the chart's names."""
    for archive in images.shipped():
        cluster.load(archive)


def storage(home: Path, *names: str) -> list[Path]:
    """Creates directories for file tiers, writable by the storage group."""
    made = []
    for name in names:
        directory = home / name
        directory.mkdir(parents=True)
        os.chown(directory, 0, STORAGE_GID)
        directory.chmod(0o2770)
        made.append(directory)
    return made


def install(cluster: Any, release: Release, values: dict[str, Any], seconds: int = 180) -> None:
    """Installs the chart and waits until both Deployments are available and the API server trusts
    the webhook.
    """
    try:
        release.install(values)
        wait_for(
            "the operator's Deployments are available",
            lambda: available(cluster),
            seconds,
            period=0.5,
        )
    except Exception as error:
        raise AssertionError(f"{error}\n{explain(cluster)}") from error
    wait_for("the webhook configuration has a CA", lambda: trusted(cluster), 60, period=0.5)


@dataclass(frozen=True, slots=True)
class Installed:
    """The operator, installed. ``storage`` holds the directories that policies may name."""

    cluster: Any
    api: Any
    release: Release
    values: dict[str, Any]
    storage: Path

    def directory(self, name: str) -> Path:
        """A directory below ``storage``, prepared for a file tier."""
        return storage(self.storage, name)[0]

    @contextlib.contextmanager
    def namespace(self, name: str, labels: Mapping[str, str] | None = None) -> Iterator[Place]:
        """A namespace with injection enabled, deleted when the block ends."""
        make_namespace(self.api, name, {"kvtier.io/inject": "enabled", **(labels or {})})
        try:
            place = Place(self.cluster, self.api, name)
            place.prepare()
            yield place
        finally:
            self.api.request("DELETE", f"/api/v1/namespaces/{name}")

    def wait_gone(self) -> None:
        """Waits until namespaces that were deleted are gone, with all that was in them."""

        def going() -> list[str]:
            found = ok(self.api.request("GET", "/api/v1/namespaces"))["items"]
            return [
                body["metadata"]["name"]
                for body in found
                if "deletionTimestamp" in body["metadata"]
            ]

        wait_for("deleted namespaces are gone", lambda: not going(), 180)

    def upgrade(self, **values: Any) -> None:
        """`helm upgrade` with other values, and waits until the operator runs with them."""
        self.release.upgrade({**self.values, **values})
        wait_for(
            "the operator's Deployments are up to date",
            lambda: available(self.cluster),
            120,
            period=0.5,
        )


@contextlib.contextmanager
def installed(cluster: Any, api: Any, home: Path) -> Iterator[Installed]:
    """The chart's release while the block runs. Every directory below ``home`` is allowed. The
    operator runs as on OpenShift: as a user that the namespace has, and its images do not know.
    """
    allowed = [
        {"namespaces": ["*"], "hostPath": str(home)},
        {"namespaces": ["*"], "nfs": DEAD_EXPORT},
    ]
    values = {**QUICK, "allowedVolumes": allowed, "storage": {"createVolumes": True}}
    without_definition(cluster)
    with (
        openshift.enforce(api, openshift.RESTRICTED_V2),
        Release(cluster.kubeconfig, cluster.context) as release,
    ):
        openshift.constrain(api, NAMESPACE, openshift.RESTRICTED_V2)
        try:
            install(cluster, release, values)
            found = Installed(cluster, api, release, values, home)
            yield found
            found.wait_gone()
        finally:
            release.uninstall()
            cluster.kubectl(
                "delete", "crd", "kvtierpolicies.kvtier.io", "--ignore-not-found", seconds=120
            )


def available(cluster: Any) -> bool:
    """Whether controller and webhook have all their replicas and the previous ones are gone. A
    terminating replica may still receive requests, and here it does not drain (``drainSeconds``).
    """
    found = json.loads(cluster.kubectl("-n", NAMESPACE, "get", "deployments", "-o", "json"))[
        "items"
    ]
    pods = json.loads(cluster.kubectl("-n", NAMESPACE, "get", "pods", "-o", "json"))["items"]
    if any("deletionTimestamp" in pod["metadata"] for pod in pods):
        return False

    def complete(body: dict[str, Any]) -> bool:
        status, wanted = body.get("status", {}), body["spec"]["replicas"]
        seen = status.get("observedGeneration") == body["metadata"]["generation"]
        counts = {
            status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")
        }
        return bool(seen and counts == {wanted})

    return len(found) == 2 and all(complete(body) for body in found)


def trusted(cluster: Any) -> bool:
    """Whether both webhook configurations name a CA."""
    template = "jsonpath={.items[*].webhooks[*].clientConfig.caBundle}"
    kinds = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
    return (
        len(
            cluster.kubectl(
                "get", kinds, "-l", "app.kubernetes.io/part-of=kvtier", "-o", template
            ).split()
        )
        == 2
    )


def explain(cluster: Any) -> str:
    """What the operator's pods say."""
    parts = [cluster.kubectl("-n", NAMESPACE, "describe", "pods", check=False)[-6000:]]
    for component in ("controller", "webhook"):
        options = (
            "-n",
            NAMESPACE,
            "logs",
            "-l",
            f"app.kubernetes.io/component={component}",
            "--tail=40",
        )
        parts.append(f"--- {component}\n" + cluster.kubectl(*options, check=False)[-6000:])
    return "\n".join(parts)
