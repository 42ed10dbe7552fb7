"""The operator on the node: its images are made and loaded, the chart is installed, and its pods run with the chart's rights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import images
from charts import NAMESPACE, Release
from nodes import wait_for

STORAGE_GID = 3000
QUICK = {
    "controller": {"pollSeconds": 2, "statusBytesSeconds": 2, "resyncSeconds": 30},
    "webhook": {"drainSeconds": 0},
}
"""Periods for tests: nobody wants to wait half a minute for a status."""


def load_images(cluster: Any, home: Path) -> dict[str, Any]:
    """Makes both images, puts them on the node, and gives the chart's values that name them."""
    operator, payload = images.operator(home), images.payload(home)
    for image in (operator, payload):
        cluster.load(image.archive)
        image.archive.unlink()
    return {
        "images": {
            "operator": operator.reference,
            "payload": payload.reference,
            "tierd": payload.reference,
            "pullPolicy": "Never",
        }
    }


def storage(home: Path, *names: str) -> list[Path]:
    """Directories as an administrator prepares them for file tiers: the group of the tiers' files may write."""
    made = []
    for name in names:
        directory = home / name
        directory.mkdir(parents=True)
        os.chown(directory, 0, STORAGE_GID)
        directory.chmod(0o2770)
        made.append(directory)
    return made


def install(
    cluster: Any, release: Release, values: dict[str, Any], allowed: Sequence[Path], seconds: int = 180
) -> None:
    """Installs the chart and waits until both Deployments are available and the webhook is trusted by the API server."""
    volumes = [{"namespaces": ["*"], "hostPath": str(path)} for path in allowed]
    try:
        release.install({**QUICK, **values, "allowedVolumes": volumes})
        wait_for("the operator's Deployments are available", lambda: available(cluster), seconds, period=0.5)
    except Exception as error:
        raise AssertionError(f"{error}\n{explain(cluster)}") from error
    wait_for("the webhook configuration has a CA", lambda: trusted(cluster), 60, period=0.5)


def available(cluster: Any) -> bool:
    """Whether controller and webhook have all their replicas."""
    template = "{range .items[*]}{.spec.replicas}={.status.availableReplicas} {end}"
    counts = cluster.kubectl("-n", NAMESPACE, "get", "deployments", "-o", f"jsonpath={template}").split()
    return len(counts) == 2 and all(count.split("=")[0] == count.split("=")[1] for count in counts)


def trusted(cluster: Any) -> bool:
    """Whether both webhook configurations name a CA."""
    template = "jsonpath={.items[*].webhooks[*].clientConfig.caBundle}"
    kinds = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
    return len(cluster.kubectl("get", kinds, "-l", "app.kubernetes.io/part-of=kvtier", "-o", template).split()) == 2


def explain(cluster: Any) -> str:
    """What the operator's pods say."""
    told = [cluster.kubectl("-n", NAMESPACE, "describe", "pods", check=False)[-6000:]]
    for component in ("controller", "webhook"):
        options = ("-n", NAMESPACE, "logs", "-l", f"app.kubernetes.io/component={component}", "--tail=40")
        told.append(f"--- {component}\n" + cluster.kubectl(*options, check=False)[-6000:])
    return "\n".join(told)
