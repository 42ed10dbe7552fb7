"""What each value of the chart changes, and relations between values that it rejects."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from tests.unit.chart.rendered import CHART, NAMESPACE, helm, one, render, render_files

from kvtier_operator.main import WEBHOOK_STOP_SECONDS
from kvtier_operator.settings import Settings

COMPONENTS = ("controller", "webhook")
CONFIGURATIONS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")


def pod(objects: list[dict[str, Any]], component: str) -> dict[str, Any]:
    template = one(objects, "Deployment", f"kvtier-{component}")["spec"]["template"]
    return dict(template)


def everything_on() -> dict[str, Any]:
    return {
        "storage": {"createVolumes": True},
        "rollout": {"enabled": True},
        "networkPolicy": {"enabled": True},
        "monitoring": {
            "prometheusRule": {"enabled": True},
            "serviceMonitor": {"enabled": True},
            "dashboards": {"enabled": True},
        },
        "webhook": {"certificates": {"mode": "CertManager"}},
    }


def test_common_labels_and_annotations_are_on_every_object_and_on_pods_but_not_in_selectors() -> (
    None
):
    common = {"commonLabels": {"team": "ml"}, "commonAnnotations": {"owner": "a@example"}}
    objects = render({**everything_on(), **common})
    without = [
        (body["kind"], body["metadata"]["name"])
        for body in objects
        if body["kind"] != "CustomResourceDefinition"
        and body["metadata"].get("labels", {}).get("team") != "ml"
    ]
    assert without == []
    unannotated = [
        (body["kind"], body["metadata"]["name"])
        for body in objects
        if body["metadata"].get("annotations", {}).get("owner") != "a@example"
    ]
    assert unannotated == []
    for component in COMPONENTS:
        metadata = pod(objects, component)["metadata"]
        assert metadata["labels"]["team"] == "ml"
        assert metadata["annotations"]["owner"] == "a@example"
        selector = one(objects, "Deployment", f"kvtier-{component}")["spec"]["selector"]
        assert "team" not in selector["matchLabels"]


def test_a_key_that_several_values_set_is_in_an_object_once() -> None:
    """Kustomize, and so Flux, rejects an object with a key twice. The value for fewer objects
    wins.
    """
    everything = everything_on()
    own = {"labels": {"team": "own"}, "annotations": {"team": "own"}}
    pods = {"podLabels": {"team": "own"}, "podAnnotations": {"team": "own"}}
    values: dict[str, Any] = {
        **everything,
        "commonLabels": {"team": "ml"},
        "commonAnnotations": {"team": "ml", "kvtier.io/settings-checksum": "x"},
        "controller": pods,
        "webhook": {**everything["webhook"], **pods},
        "monitoring": {
            **everything["monitoring"],
            **{
                kind: {"enabled": True, **own}
                for kind in ("prometheusRule", "serviceMonitor", "dashboards")
            },
        },
    }
    objects = render(values)
    for kind in ("PrometheusRule", "ServiceMonitor"):
        metadata = one(objects, kind)["metadata"]
        assert (metadata["labels"]["team"], metadata["annotations"]["team"]) == ("own", "own")
    for component in COMPONENTS:
        metadata = pod(objects, component)["metadata"]
        assert (metadata["labels"]["team"], metadata["annotations"]["team"]) == ("own", "own")
        # Without the checksum of its settings, a pod would not follow them.
        assert len(metadata["annotations"]["kvtier.io/settings-checksum"]) == 64
        named = {"podAnnotations": {"kubectl.kubernetes.io/default-container": "mesh"}}
        changed = pod(render({component: named}), component)["metadata"]["annotations"]
        assert changed["kubectl.kubernetes.io/default-container"] == "mesh"
    selected = {"app.kubernetes.io/part-of": "kube-prometheus"}
    monitors = {"podMonitor": {"enabled": True, "labels": selected}}
    labels = one(render({"monitoring": monitors}), "PodMonitor")["metadata"]["labels"]
    assert selected.items() <= labels.items()


def test_a_pod_may_take_as_long_to_end_as_the_webhook_drains() -> None:
    for drain, grace in ((0, 30), (5, 30), (5.5, 31), (60, 85)):
        objects = render({"webhook": {"drainSeconds": drain}})
        spec = pod(objects, "webhook")["spec"]
        assert spec["terminationGracePeriodSeconds"] == grace
        assert grace >= drain + WEBHOOK_STOP_SECONDS + 5
        assert pod(objects, "controller")["spec"]["terminationGracePeriodSeconds"] == 30


def test_the_definition_is_kept_whatever_annotations_it_gets() -> None:
    values = {
        "commonAnnotations": {"helm.sh/resource-policy": "delete"},
        "crd": {"annotations": {"helm.sh/resource-policy": "delete", "note": "x"}},
    }
    annotations = one(render(values), "CustomResourceDefinition")["metadata"]["annotations"]
    assert annotations == {"helm.sh/resource-policy": "keep", "note": "x"}


def test_argo_cd_syncs_the_definition_first_and_never_prunes_it() -> None:
    assert "argocd" not in "".join(render_files().values())
    objects = render({"argocd": {"enabled": True}})
    definition = one(objects, "CustomResourceDefinition")["metadata"]["annotations"]
    assert definition["helm.sh/resource-policy"] == "keep"
    options = definition["argocd.argoproj.io/sync-options"].split(",")
    assert {"Prune=false", "Delete=false"} <= set(options)
    wave = "argocd.argoproj.io/sync-wave"
    assert int(definition[wave]) < 0
    for kind in CONFIGURATIONS:
        assert int(one(objects, kind)["metadata"]["annotations"][wave]) > 0


def test_security_contexts_can_lose_single_fields_or_all() -> None:
    for component in COMPONENTS:
        # No user or group by default: OpenShift assigns those of the namespace.
        assert pod(render(), component)["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        some = render({"podSecurityContext": {"seccompProfile": None, "runAsUser": 7}})
        assert pod(some, component)["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 7,
        }
        nothing = pod(
            render({"podSecurityContext": None, "containerSecurityContext": None}), component
        )["spec"]
        assert "securityContext" not in nothing
        assert "securityContext" not in nothing["containers"][0]


@pytest.mark.parametrize("component", COMPONENTS)
def test_accounts_can_be_named_annotated_and_made_by_others(component: str) -> None:
    account = {"name": "mine", "annotations": {"eks.amazonaws.com/role-arn": "arn"}}
    objects = render({component: {"serviceAccount": account}})
    made = one(objects, "ServiceAccount", "mine")
    assert made["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn"}
    assert pod(objects, component)["spec"]["serviceAccountName"] == "mine"
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        (subject,) = one(objects, kind, f"kvtier-{component}")["subjects"]
        assert subject == {"kind": "ServiceAccount", "name": "mine", "namespace": NAMESPACE}
    others = render({component: {"serviceAccount": {"create": False, "name": "mine"}}})
    assert "mine" not in {b["metadata"]["name"] for b in others if b["kind"] == "ServiceAccount"}
    assert pod(others, component)["spec"]["serviceAccountName"] == "mine"


def test_admission_policies_limit_the_account_that_the_controller_has() -> None:
    values = {**everything_on(), "webhook": {}}
    values["controller"] = {"serviceAccount": {"name": "mine"}}
    policies = [b for b in render(values) if b["kind"] == "ValidatingAdmissionPolicy"]
    assert len(policies) == 5
    for body in policies:
        (condition,) = body["spec"]["matchConditions"]
        name = f"system:serviceaccount:{NAMESPACE}:mine"
        assert condition["expression"] == f"request.userInfo.username == '{name}'"


def test_without_rbac_no_role_is_rendered() -> None:
    kinds = {body["kind"] for body in render({**everything_on(), "rbac": {"create": False}})}
    assert {kind for kind in kinds if "Role" in kind} == set()
    assert {"ServiceAccount", "ValidatingAdmissionPolicy"} <= kinds


def test_roles_for_people_are_aggregated_on_request() -> None:
    def aggregated(values: dict[str, Any]) -> dict[str, list[str]]:
        prefix = "rbac.authorization.k8s.io/aggregate-to-"
        return {
            key.removeprefix(prefix): body["rules"][0]["verbs"]
            for body in render(values)
            if body["kind"] == "ClusterRole"
            for key, value in body["metadata"]["labels"].items()
            if key.startswith(prefix) and value == "true"
        }

    assert aggregated({}) == {"view": ["get", "list", "watch"]}
    both = aggregated({"rbac": {"aggregate": {"edit": True}}})
    assert set(both["edit"]) > {"create", "update", "patch", "delete"}
    assert aggregated({"rbac": {"aggregate": {"view": False}}}) == {}
    assert one(render(), "ClusterRole", "kvtier-policies-edit")["rules"][0]["resources"] == [
        "kvtierpolicies"
    ]


@pytest.mark.parametrize("component", COMPONENTS)
def test_pods_get_variables_volumes_spread_and_a_log_level(component: str) -> None:
    objects = render(
        {
            component: {
                "logLevel": "debug",
                "annotations": {"reloader": "on"},
                "extraEnv": [{"name": "KUBERNETES_SERVICE_HOST", "value": "api"}],
                "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
                "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ssl/extra"}],
                "topologySpreadConstraints": [
                    {"maxSkew": 2, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule"},
                    {
                        "maxSkew": 1,
                        "topologyKey": "y",
                        "whenUnsatisfiable": "ScheduleAnyway",
                        "labelSelector": {"matchLabels": {"own": "x"}},
                    },
                ],
            }
        }
    )
    deployment = one(objects, "Deployment", f"kvtier-{component}")
    assert deployment["metadata"]["annotations"] == {"reloader": "on"}
    spec = pod(objects, component)["spec"]
    container = spec["containers"][0]
    assert container["args"][-2:] == ["--log-level", "debug"]
    names = [each["name"] for each in container["env"]]
    assert names == ["POD_NAME", "POD_NAMESPACE", "KUBERNETES_SERVICE_HOST"]
    assert container["volumeMounts"][-1] == {"name": "ca", "mountPath": "/etc/ssl/extra"}
    assert spec["volumes"][-1] == {"name": "ca", "configMap": {"name": "ca"}}
    first, second = spec["topologySpreadConstraints"]
    assert first["labelSelector"] == deployment["spec"]["selector"]
    assert second["labelSelector"]["matchLabels"]["own"] == "x"


def test_replicas_are_spread_over_zones_by_default() -> None:
    for component in COMPONENTS:
        (constraint,) = pod(render(), component)["spec"]["topologySpreadConstraints"]
        assert constraint["topologyKey"] == "topology.kubernetes.io/zone"
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({}, {"minAvailable": 1}),
        ({"minAvailable": "50%"}, {"minAvailable": "50%"}),
        ({"minAvailable": None, "maxUnavailable": 1}, {"maxUnavailable": 1}),
        ({"minAvailable": 0}, {"minAvailable": 0}),
    ],
)
def test_disruption_budgets_have_the_bound_that_is_set(
    budget: dict[str, Any], expected: dict[str, Any]
) -> None:
    for component in COMPONENTS:
        objects = render({component: {"podDisruptionBudget": budget}})
        spec = one(objects, "PodDisruptionBudget", f"kvtier-{component}")["spec"]
        assert {k: v for k, v in spec.items() if k.startswith("m")} == expected
        # Several replicas that are not ready must not block a drain.
        assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_namespaces_of_the_webhook_can_be_selected_otherwise_but_never_its_own() -> None:
    selector = {
        "matchLabels": {"kvtier.io/inject": None, "tier": "gpu"},
        "matchExpressions": [{"key": "no", "operator": "DoesNotExist"}],
    }
    objects = render(
        {
            "webhook": {
                "namespaceSelector": selector,
                "configurationAnnotations": {"team": "ml"},
                "service": {"annotations": {"mesh": "off"}},
            }
        }
    )
    body = one(objects, "MutatingWebhookConfiguration")
    rendered = body["webhooks"][0]["namespaceSelector"]
    assert rendered["matchLabels"] == {"tier": "gpu"}
    assert rendered["matchExpressions"][0] == {"key": "no", "operator": "DoesNotExist"}
    assert rendered["matchExpressions"][1]["values"] == ["kube-system", NAMESPACE]
    assert body["metadata"]["annotations"] == {"team": "ml"}
    assert one(objects, "Service", "kvtier-webhook")["metadata"]["annotations"] == {"mesh": "off"}
    # The operator explains pods that the webhook did not see by the same selector.
    text = one(objects, "ConfigMap", "kvtier-settings")["data"]["settings.yaml"]
    found = Settings.model_validate(yaml.safe_load(text)).webhook.namespace_selector
    assert found.match_labels == {"tier": "gpu"}
    assert [each.key for each in found.match_expressions or ()] == ["no"]


def test_cert_manager_issues_the_certificate_that_the_webhook_mounts() -> None:
    certificates = {
        "mode": "CertManager",
        "secretName": "mine",
        "lifetimeSeconds": 7200,
        "renewBeforeSeconds": 3600,
    }
    objects = render({"webhook": {"certificates": certificates}}, namespace="other")
    leaf = one(objects, "Certificate", "kvtier-webhook")["spec"]
    assert leaf["secretName"] == "mine"
    assert leaf["dnsNames"][0] == "kvtier-webhook.other.svc"
    assert (leaf["duration"], leaf["renewBefore"]) == ("7200s", "3600s")
    # A CA of its own signs: with a self-signed certificate, every renewal would be a new CA.
    assert leaf["issuerRef"]["name"] == "kvtier-webhook-ca"
    authority = one(objects, "Issuer", "kvtier-webhook-ca")["spec"]["ca"]["secretName"]
    signed = one(objects, "Certificate", "kvtier-webhook-ca")["spec"]
    assert signed["isCA"]
    assert signed["secretName"] == authority
    assert one(objects, "Issuer", signed["issuerRef"]["name"])["spec"] == {"selfSigned": {}}
    for kind in CONFIGURATIONS:
        annotations = one(objects, kind)["metadata"]["annotations"]
        assert annotations["cert-manager.io/inject-ca-from"] == "other/kvtier-webhook"
    volumes = {each["name"]: each for each in pod(objects, "webhook")["spec"]["volumes"]}
    assert volumes["certificates"]["secret"]["secretName"] == "mine"
    text = one(objects, "ConfigMap", "kvtier-settings")["data"]["settings.yaml"]
    assert yaml.safe_load(text)["webhook"]["certificates"]["mode"] == "Mounted"
    rules = [r for b in objects if b["kind"].endswith("Role") for r in b["rules"]]
    assert not any("mutatingwebhookconfigurations" in rule["resources"] for rule in rules)


def test_an_issuer_of_the_cluster_replaces_the_one_of_the_chart() -> None:
    reference = {"name": "company", "kind": "ClusterIssuer"}
    objects = render({"webhook": {"certificates": {"mode": "CertManager", "issuerRef": reference}}})
    assert not [body for body in objects if body["kind"] == "Issuer"]
    issuer = one(objects, "Certificate")["spec"]["issuerRef"]
    assert issuer == {"group": "cert-manager.io", **reference}


def test_a_service_monitor_selects_the_metrics_service_and_no_other() -> None:
    monitor = {"enabled": True, "interval": "30s", "metricRelabelings": [{"action": "drop"}]}
    objects = render({"monitoring": {"serviceMonitor": monitor}})
    spec = one(objects, "ServiceMonitor")["spec"]
    services = [b for b in objects if b["kind"] == "Service"]
    selected = [
        body["metadata"]["name"]
        for body in services
        if spec["selector"]["matchLabels"].items() <= body["metadata"]["labels"].items()
    ]
    assert selected == ["kvtier-metrics"]
    service = one(objects, "Service", "kvtier-metrics")["spec"]
    (endpoint,) = spec["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["ports"]}
    assert endpoint["interval"] == "30s"
    assert endpoint["metricRelabelings"] == [{"action": "drop"}]
    assert "scrapeTimeout" not in endpoint
    for component in COMPONENTS:
        assert service["selector"].items() <= pod(objects, component)["metadata"]["labels"].items()
    slow = {"enabled": True, "interval": "1h", "scrapeTimeout": "59m60s"}
    assert one(render({"monitoring": {"podMonitor": slow}}), "PodMonitor")
    alone = render({"monitoring": {"service": {"enabled": True}}})
    assert one(alone, "Service", "kvtier-metrics")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"controller": {"podDisruptionBudget": {"minAvailable": 2}}},
            "controller.podDisruptionBudget.minAvailable: Invalid value: 2: must be less than "
            "controller.replicas",
        ),
        (
            {"webhook": {"podDisruptionBudget": {"maxUnavailable": 1}}},
            "webhook.podDisruptionBudget: Forbidden: minAvailable and maxUnavailable exclude",
        ),
        (
            {"webhook": {"podDisruptionBudget": {"minAvailable": None}}},
            "webhook.podDisruptionBudget: Required value",
        ),
        (
            {"webhook": {"podDisruptionBudget": {"minAvailable": None, "maxUnavailable": 0}}},
            "webhook.podDisruptionBudget: Invalid value: must allow one replica",
        ),
        # 75% of two are two: the API server rounds up.
        (
            {"webhook": {"podDisruptionBudget": {"minAvailable": "75%"}}},
            "webhook.podDisruptionBudget.minAvailable: Invalid value: 75%: must be less than",
        ),
        (
            {"controller": {"replicas": 3, "podDisruptionBudget": {"minAvailable": "67%"}}},
            "controller.podDisruptionBudget.minAvailable: Invalid value: 67%: must be less than",
        ),
        (
            {"controller": {"leaderElection": {"renewDeadlineSeconds": 9}}},
            "renewDeadlineSeconds: Invalid value: 9: must be less than leaseSeconds - 1",
        ),
        (
            {"controller": {"leaderElection": {"retrySeconds": 5}}},
            "renewDeadlineSeconds: Invalid value: 6: must be more than 1.2 * retrySeconds",
        ),
        (
            {"controller": {"serviceAccount": {"name": "kvtier-webhook"}}},
            'webhook.serviceAccount.name: Duplicate value: "kvtier-webhook"',
        ),
        (
            {
                "controller": {"serviceAccount": {"create": False, "name": "mine"}},
                "webhook": {"serviceAccount": {"create": False, "name": "mine"}},
            },
            'webhook.serviceAccount.name: Duplicate value: "mine"',
        ),
        (
            {"webhook": {"certificates": {"mode": "CertManager", "renewBeforeSeconds": 299}}},
            "renewBeforeSeconds: Invalid value: must be at least 300 with mode CertManager",
        ),
        (
            {
                "webhook": {
                    "certificates": {"mode": "CertManager", "secretName": "kvtier-webhook-ca"}
                }
            },
            'secretName: Invalid value: "kvtier-webhook-ca": is the Secret of the CA',
        ),
        (
            {"webhook": {"certificates": {"renewBeforeSeconds": 7776000}}},
            "renewBeforeSeconds: Invalid value: 7776000: must be less than lifetimeSeconds",
        ),
        (
            {"webhook": {"certificates": {"injectCAFrom": "a/b"}}},
            "webhook.certificates.injectCAFrom: Forbidden: only with mode Mounted",
        ),
        (
            {"webhook": {"certificates": {"issuerRef": {"name": "x"}}}},
            "webhook.certificates.issuerRef: Forbidden: only with mode CertManager",
        ),
        ({"webhook": {"port": 9402}}, "webhook.port: Invalid value: 9402: must differ"),
        (
            {
                "monitoring": {
                    "podMonitor": {"enabled": True},
                    "serviceMonitor": {"enabled": True},
                }
            },
            "monitoring.serviceMonitor: Forbidden: together with podMonitor",
        ),
        (
            {"monitoring": {"podMonitor": {"interval": "1m", "scrapeTimeout": "1m1ms"}}},
            'monitoring.podMonitor.scrapeTimeout: Invalid value: "1m1ms": must be at most interval',
        ),
        (
            {"policyBounds": {"storageGids": [{"min": 5, "max": 4}]}},
            "policyBounds.storageGids[0].max: Invalid value: 4: must be at least min",
        ),
        (
            {"controller": {"extraVolumeMounts": [{"name": "a", "mountPath": "/a"}]}},
            'controller.extraVolumeMounts: Not found: "a": must be a volume of extraVolumes',
        ),
        (
            {"controller": {"extraVolumeMounts": [{"name": "certificates", "mountPath": "/a"}]}},
            'controller.extraVolumeMounts: Not found: "certificates"',
        ),
        (
            {"webhook": {"extraVolumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}},
            'webhook.extraVolumeMounts: Duplicate value: "/tmp"',
        ),
        (
            {"webhook": {"extraVolumes": [{"name": "a"}, {"name": "a"}]}},
            'webhook.extraVolumes: Duplicate value: "a"',
        ),
        (
            {
                "webhook": {
                    "namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}
                }
            },
            "webhook.namespaceSelector.matchExpressions[0].values: Invalid value",
        ),
    ],
)
def test_values_that_contradict_each_other_are_rejected(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(helm.HelmError) as caught:
        render(values)
    assert message in str(caught.value)


def test_all_contradictions_are_reported_at_once() -> None:
    with pytest.raises(helm.HelmError) as caught:
        render(
            {
                "webhook": {"port": 9402, "certificates": {"injectCAFrom": "a/b"}},
                "controller": {"podDisruptionBudget": {"minAvailable": 7}},
            }
        )
    for field in ("webhook.port", "injectCAFrom", "controller.podDisruptionBudget"):
        assert field in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"commonLabels": {"app.kubernetes.io/name": "x"}},
        {"webhook": {"podLabels": {"app.kubernetes.io/component": "x"}}},
        {"controller": {"extraEnv": [{"name": "POD_NAME", "value": "x"}]}},
        {"controller": {"extraVolumes": [{"name": "settings"}]}},
        {"controller": {"logLevel": "trace"}},
        {"podSecurityContext": "restricted"},
        {"webhook": {"certificates": {"issuerRef": {"kind": "ClusterIssuer"}}}},
        {"webhook": {"failurePolicy": "Fail"}},
        {"monitoring": {"podMonitor": {"interval": "soon"}}},
        {"images": {"registry": "https://mirror.example"}},
        {"images": {"registry": "mirror.example/kv:5000"}},
        {"monitoring": {"runbooksUrl": 'https://runbooks.example/"x'}},
    ],
)
def test_values_that_would_break_the_operator_are_rejected(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmValuesError):
        render(values)


def notes(values: dict[str, Any]) -> str:
    """What Helm prints after an installation."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="kvtier", namespace=NAMESPACE)
    (text,) = (text for name, text in texts.items() if name.endswith("NOTES.txt"))
    return " ".join(str(text).split())


def test_the_notes_name_the_labels_that_enable_injection() -> None:
    def selected(**selector: Any) -> str:
        return notes({"webhook": {"namespaceSelector": selector}})

    expressions = "must also match webhook.namespaceSelector.matchExpressions"
    assert "label namespace NAME kvtier.io/inject=enabled 2." in notes({})
    found = selected(matchLabels={"kvtier.io/inject": None, "tier": "gpu"})
    assert "label namespace NAME tier=gpu 2." in found
    some = [{"key": "gpu", "operator": "Exists"}]
    assert expressions in selected(matchExpressions=some)
    found = selected(matchLabels={"kvtier.io/inject": None}, matchExpressions=some)
    assert "label namespace" not in found
    assert expressions in found
    found = selected(matchLabels={"kvtier.io/inject": None})
    assert "called for every namespace but kube-system and kvtier-system" in found


def test_the_notes_say_what_host_network_needs() -> None:
    assert "network of its nodes" not in notes({})
    found = notes({"webhook": {"hostNetwork": True, "replicas": 3, "port": 8443}})
    assert "each of its 3 replicas needs a node of its own" in found
    assert "ports 8443 and 9402 are free" in found
