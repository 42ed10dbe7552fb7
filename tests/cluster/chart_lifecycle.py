"""Install, upgrade from the previous chart, roll back and uninstall, with the operator running.

    KVTIER_TEST_KUBECONFIG=FILE KVTIER_TEST_CONTEXT=NAME python tests/cluster/chart_lifecycle.py

The cluster's nodes must have the images that the chart's values name. A test runs the same on the
node of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from charts import CHART, NAMESPACE, PREVIOUS, Release, without_definition
from clusters import CONTEXT_VARIABLE, KUBECONFIG_VARIABLE, Cluster
from nodes import wait_for
from operators import QUICK, available, explain, trusted

WAIT_SECONDS = 240
PLACE = "chart-lifecycle"
POLICY = {
    "apiVersion": "kvtier.io/v1alpha1",
    "kind": "KVTierPolicy",
    "metadata": {"name": "chat", "namespace": PLACE},
    "spec": {
        "podSelector": {"matchLabels": {"app": "vllm"}},
        "tiers": [{"name": "ram", "memory": {"capacity": "1Gi"}}],
    },
}


class Lifecycle:
    """One cluster's. ``note``: called with each step as it begins."""

    def __init__(self, cluster: Any, release: Release, note: Callable[[str], None]) -> None:
        self._cluster, self._release, self._note = cluster, release, note
        self._minimum = 600

    def run(self) -> None:
        """Raises ``AssertionError`` if a step does not have its effect."""
        try:
            self._steps()
        except Exception as error:
            raise AssertionError(f"{error}\n{explain(self._cluster)}") from error
        finally:
            self._release.uninstall()
            self._cluster.kubectl("delete", "namespace", PLACE, "--ignore-not-found", seconds=120)
            without_definition(self._cluster)

    def _steps(self) -> None:
        self._note(f"install {PREVIOUS.name}")
        without_definition(self._cluster)
        self._release.install(QUICK, chart=PREVIOUS, wait_seconds=WAIT_SECONDS)
        self._settled()
        before = self._budgets()
        self._cluster.kubectl("create", "namespace", PLACE)
        self._cluster.kubectl("label", "namespace", PLACE, "kvtier.io/inject=enabled")
        self._cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(POLICY))
        uid = self._follows()

        self._note("upgrade to this chart, with other values")
        values = {**QUICK, "controller": {**QUICK["controller"], "logLevel": "debug"}}
        self._release.upgrade(values, chart=CHART, wait_seconds=WAIT_SECONDS)
        self._settled()
        assert self._budgets() == {"kvtier-controller", "kvtier-webhook"}
        assert self._follows() == uid

        self._note("roll back")
        self._release.rollback(wait_seconds=WAIT_SECONDS)
        self._settled()
        assert self._budgets() == before
        assert self._follows() == uid

        self._note("uninstall")
        self._release.uninstall(wait_seconds=WAIT_SECONDS)
        assert self._policy()["metadata"]["uid"] == uid
        left = self._cluster.kubectl(
            *("get", "mutatingwebhookconfigurations,validatingadmissionpolicies,clusterroles"),
            *("-l", "app.kubernetes.io/part-of=kvtier", "-o", "name"),
        )
        assert left == ""
        # Nothing that remains calls the webhook or blocks a deletion.
        self._cluster.kubectl(
            "run", "later", "-n", PLACE, "--image=x", "--labels=app=vllm", "--restart=Never"
        )

    def _settled(self) -> None:
        wait_for("the operator runs", lambda: available(self._cluster), WAIT_SECONDS, period=0.5)
        wait_for("the webhook is trusted", lambda: trusted(self._cluster), 60, period=0.5)

    def _policy(self) -> dict[str, Any]:
        found = self._cluster.kubectl("get", "kvtp", "chat", "-n", PLACE, "-o", "json")
        return dict(json.loads(found))

    def _follows(self) -> str:
        """The policy's uid, once the operator has followed a change and reports it as ready."""
        self._minimum += 1
        patch = json.dumps({"spec": {"minLoadTokens": self._minimum}})
        self._cluster.kubectl(
            "patch", "kvtp", "chat", "-n", PLACE, "--type=merge", f"--patch={patch}"
        )

        def applied() -> str | None:
            body = self._policy()
            status = body.get("status") or {}
            ready = any(
                each["type"] == "Ready" and each["status"] == "True"
                for each in status.get("conditions") or ()
            )
            seen = status.get("observedGeneration") == body["metadata"]["generation"]
            live = self._cluster.kubectl(
                *("get", "configmap", "chat-live", "-n", PLACE, "--ignore-not-found"),
                "-o=jsonpath={.data.live\\.json}",
            )
            written = bool(live) and json.loads(live)["minLoadTokens"] == self._minimum
            return str(body["metadata"]["uid"]) if ready and seen and written else None

        return str(wait_for("the operator follows a change", applied, 90, period=0.5))

    def _budgets(self) -> set[str]:
        found = self._cluster.kubectl("get", "pdb", "-n", NAMESPACE, "-o", "json")
        return {each["metadata"]["name"] for each in json.loads(found)["items"]}


def main() -> int:
    """0: every step had its effect."""
    cluster = Cluster(
        Path(os.environ[KUBECONFIG_VARIABLE]),
        os.environ[CONTEXT_VARIABLE],
        own=False,
        origin=KUBECONFIG_VARIABLE,
    )
    with Release(cluster.kubeconfig, cluster.context) as release:
        try:
            Lifecycle(cluster, release, lambda step: print(f"== {step}", flush=True)).run()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            return 1
    print("the chart was installed, upgraded, rolled back and uninstalled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
