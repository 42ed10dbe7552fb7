"""The webhook works with the permissions of the chart, and reports a missing one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.cluster import admission
from tests.cluster.admission import LABELLED, WebhookProcess, installed, pod, policy

from kvtier_operator import rbac
from kvtier_operator.api.names import POLICY_ANNOTATION
from kvtier_operator.rbac import Permission, Scope

RIGHTS = "/apis/rbac.authorization.k8s.io/v1"


class Account:
    """A service account with some rights, and a kubeconfig that uses it."""

    def __init__(
        self, api: Any, nodes: ModuleType, namespace: str, cluster: Any, home: Path
    ) -> None:
        self._api, self._nodes, self.namespace = api, nodes, namespace
        self.name = f"webhook-{secrets.token_hex(3)}"
        nodes.ok(
            api.request(
                "POST",
                f"/api/v1/namespaces/{namespace}/serviceaccounts",
                {"metadata": {"name": self.name}},
            )
        )
        token_request = {"spec": {"expirationSeconds": 3600}}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{self.name}/token"
        token = nodes.ok(api.request("POST", path, token_request))["status"]["token"]
        config = yaml.safe_load(cluster.kubeconfig.read_text())
        chosen = next(each for each in config["contexts"] if each["name"] == cluster.context)[
            "context"
        ]
        config["users"] = [{"name": "webhook", "user": {"token": token}}]
        config["contexts"] = [{"name": "webhook", "context": {**chosen, "user": "webhook"}}]
        config["current-context"] = "webhook"
        kubeconfig = home / f"{self.name}.yaml"
        kubeconfig.write_text(yaml.safe_dump(config))
        self.cluster = SimpleNamespace(kubeconfig=kubeconfig, context="webhook")

    def grant(self, given: Sequence[Permission]) -> None:
        """Creates a Role for namespaced rules and a ClusterRole for the others, as in the chart."""
        on = frozenset({rbac.SELF_MANAGED})
        wide = [
            *rbac.rules(given, Scope.WATCHED, on),
            *rbac.rules(given, Scope.CLUSTER, on),
        ]
        own = rbac.rules(given, Scope.OWN, on)
        within = f"{RIGHTS}/namespaces/{self.namespace}"
        for base, kind, rules in ((RIGHTS, "ClusterRole", wide), (within, "Role", own)):
            body = {"metadata": {"name": self.name}, "rules": rules}
            self._nodes.ok(self._api.request("POST", f"{base}/{kind.lower()}s", body))
            binding = {
                "metadata": {"name": self.name},
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": kind,
                    "name": self.name,
                },
                "subjects": [
                    {"kind": "ServiceAccount", "name": self.name, "namespace": self.namespace}
                ],
            }
            self._nodes.ok(self._api.request("POST", f"{base}/{kind.lower()}bindings", binding))

    def remove(self) -> None:
        for plural in ("clusterrolebindings", "clusterroles"):
            self._api.request("DELETE", f"{RIGHTS}/{plural}/{self.name}")


@pytest.fixture
def account(
    full_cluster: Any, full_api: Any, nodes: ModuleType, tmp_path: Path
) -> Iterator[Account]:
    namespace = nodes.make_namespace(full_api, f"rights-{secrets.token_hex(3)}", LABELLED)
    with admission.definition(full_cluster, full_api, nodes):
        made = Account(full_api, nodes, namespace, full_cluster, tmp_path)
        yield made
        made.remove()
    full_api.request("DELETE", f"/api/v1/namespaces/{namespace}")


def test_with_the_charts_permissions_a_pod_is_injected(
    full_api: Any, nodes: ModuleType, account: Account, tmp_path: Path
) -> None:
    account.grant(rbac.WEBHOOK)
    policies = f"/apis/kvtier.io/v1alpha1/namespaces/{account.namespace}/kvtierpolicies"
    nodes.ok(full_api.request("POST", policies, policy()))
    # Self-managed as it ships: the Secret is read with the account's rights, too.
    mode = {"mode": "SelfManaged", "secretName": "kvtier-webhook-certificates"}
    options = {"namespace": account.namespace, "webhook": {"certificates": mode}}
    process = WebhookProcess(tmp_path / "webhook", account.cluster, options)
    data = process.make_secret()
    body = {"metadata": {"name": mode["secretName"]}, "data": data}
    nodes.ok(full_api.request("POST", f"/api/v1/namespaces/{account.namespace}/secrets", body))
    configuration = admission.configurations(process)[0]
    configuration["metadata"]["name"] = account.name
    # The operator's namespace is the pods' here, which the real configuration would not ask about.
    del configuration["webhooks"][0]["namespaceSelector"]["matchExpressions"]
    pods = f"/api/v1/namespaces/{account.namespace}/pods?dryRun=All"
    with process, installed(full_api, configuration):

        def attached() -> bool:
            stored = nodes.ok(full_api.request("POST", pods, pod()))
            return POLICY_ANNOTATION in (stored["metadata"].get("annotations") or {})

        nodes.wait_for("a pod is attached", attached)


@pytest.mark.parametrize("missing", ["kvtierpolicies", "nodes", "limitranges"])
def test_a_missing_permission_is_named_and_pods_are_admitted_unchanged(
    full_api: Any, nodes: ModuleType, account: Account, tmp_path: Path, missing: str
) -> None:
    account.grant([each for each in rbac.WEBHOOK if missing not in each.resources])
    process = WebhookProcess(tmp_path / "webhook", account.cluster)
    process.start(wait=False)
    try:

        def named() -> bool:
            status, text = process.monitoring("/readyz")
            return status == 503 and missing in text and "forbidden" in text.lower()

        nodes.wait_for("the missing right is named", named)
        assert process.monitoring("/healthz")[0] == 200
    finally:
        assert process.stop() == 0
