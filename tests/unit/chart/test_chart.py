"""The Helm chart without a cluster: it renders what the code expects and rejects invalid values."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import yaml
from tests.support import webhook_configurations
from tests.unit.chart.rendered import CHART, NAMESPACE, REPOSITORY, one, render

import kvtier
from kvtier_operator import rbac
from kvtier_operator.api.allowlist import AllowedExport, AllowedVolume
from kvtier_operator.rbac import Scope
from kvtier_operator.settings import Settings

helm = pytest.importorskip(
    "helm_python", reason="the chart is rendered by Helm's own code: helm-python-sdk"
)

EXPORT = {
    "namespaces": ["serving"],
    "nfs": {"server": "NAS.example", "exportPrefix": "/kv/"},
    "mountOptions": ["vers"],
}
DIRECTORY = {"namespaces": ["*"], "hostPath": "/mnt/nvme/kv"}


def settings_of(objects: list[dict[str, Any]]) -> Settings:
    return Settings.model_validate(
        yaml.safe_load(one(objects, "ConfigMap")["data"]["settings.yaml"])
    )


def test_the_chart_passes_helm_lint() -> None:
    found = helm.lint(CHART)
    assert found["errors"] == []
    assert [message for message in found["messages"] if message["severity"] > 1] == []


def test_chart_and_code_have_the_same_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == kvtier.__version__
    images = settings_of(render()).images
    tag = kvtier.__version__
    assert (images.payload, images.tierd) == (f"kvtier/payload:{tag}", f"kvtier/payload:{tag}")


DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("image", "registry", "expected"),
    [
        ("kvtier/x", "", f"kvtier/x:{kvtier.__version__}"),
        ("kvtier/x:dev", "", "kvtier/x:dev"),
        (f"kvtier/x@{DIGEST}", "", f"kvtier/x@{DIGEST}"),
        (f"kvtier/x:1@{DIGEST}", "", f"kvtier/x:1@{DIGEST}"),
        ("localhost:5000/x", "", f"localhost:5000/x:{kvtier.__version__}"),
        ("kvtier/x", "mirror.example", f"mirror.example/kvtier/x:{kvtier.__version__}"),
        ("x", "mirror.example", f"mirror.example/x:{kvtier.__version__}"),
        ("reg.example/kvtier/x:1", "mirror.example:5000/", "mirror.example:5000/kvtier/x:1"),
        (f"localhost/x@{DIGEST}", "mirror.example/all", f"mirror.example/all/x@{DIGEST}"),
        ("reg:5000/a/x", "mirror.example", f"mirror.example/a/x:{kvtier.__version__}"),
    ],
)
def test_images_have_the_charts_version_and_the_registry_of_the_values(
    image: str, registry: str, expected: str
) -> None:
    values = {"operator": image, "payload": image, "tierd": image, "registry": registry}
    objects = render({"images": values})
    found = settings_of(objects).images
    assert (found.payload, found.tierd) == (expected, expected)
    for name in ("kvtier-controller", "kvtier-webhook"):
        (container,) = one(objects, "Deployment", name)["spec"]["template"]["spec"]["containers"]
        assert container["image"] == expected


def test_generated_files_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location(
        "kvtier_tools_chart_files", REPOSITORY / "tools" / "chart_files.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, content in module.files().items():
        assert (CHART / "files" / name).read_text(encoding="utf-8") == content, (
            f"{name} is old: run `make generate`"
        )


def test_default_values_render_the_defaults_of_the_settings() -> None:
    expected = Settings().model_dump()
    written = settings_of(render()).model_dump()
    # The chart names images of its own version.
    written["images"] |= {
        "payload": expected["images"]["payload"],
        "tierd": expected["images"]["tierd"],
    }
    assert written == expected


def test_values_are_rendered_into_the_settings() -> None:
    values = {
        "images": {
            "payload": "a/b@sha256:" + "0" * 64,
            "injectedPullSecret": "pull",
            "pullPolicy": "Never",
        },
        "watchNamespaces": ["a", "b"],
        "allowedVolumes": [EXPORT, DIRECTORY],
        "storage": {"createVolumes": True},
        "controller": {"resyncSeconds": 12.5, "pollConcurrency": 4},
        "webhook": {
            "port": 8443,
            "certificates": {"mode": "Mounted", "lifetimeSeconds": 123456789},
        },
        "monitoring": {"port": 9999},
    }
    settings = settings_of(render(values, namespace="other"))
    assert settings.namespace == "other"
    assert settings.watch_namespaces == ("a", "b")
    assert settings.images.payload.startswith("a/b@")
    assert settings.images.pull_secret == "pull"
    assert [entry.host_path for entry in settings.allowed_volumes] == [None, "/mnt/nvme/kv"]
    assert settings.allowed_volumes[0].nfs == AllowedExport.model_validate(EXPORT["nfs"])
    assert settings.storage.create_volumes
    assert (settings.controller.resync_seconds, settings.controller.poll_concurrency) == (12.5, 4)
    assert settings.webhook.certificates.lifetime_seconds == 123456789
    assert settings.monitoring.port == 9999


def test_only_changed_settings_restart_the_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        deployment = one(render(values), "Deployment", "kvtier-controller")
        return str(
            deployment["spec"]["template"]["metadata"]["annotations"]["kvtier.io/settings-checksum"]
        )

    assert checksum({}) == checksum({"webhook": {"replicas": 3}})
    assert checksum({}) != checksum({"allowedVolumes": [DIRECTORY]})


@pytest.mark.parametrize("namespace", [NAMESPACE, "other"])
def test_webhook_configurations_equal_those_of_the_code(namespace: str) -> None:
    objects = render(namespace=namespace)
    settings = Settings(namespace=namespace)
    for expected in (
        webhook_configurations.mutating(settings),
        webhook_configurations.validating(settings),
    ):
        rendered = one(objects, expected["kind"])
        assert rendered["metadata"]["name"] == expected["metadata"]["name"]
        assert rendered["webhooks"] == expected["webhooks"]


def test_templates_have_no_ca_bundle_that_an_upgrade_would_restore() -> None:
    assert "caBundle:" not in "".join(path.read_text() for path in (CHART / "templates").iterdir())


def test_every_webhook_fails_open() -> None:
    kinds = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    hooks = [hook for body in render() if body["kind"] in kinds for hook in body["webhooks"]]
    assert len(hooks) == 2
    assert {hook["failurePolicy"] for hook in hooks} == {"Ignore"}


def test_pods_meet_the_restricted_pod_security_standard() -> None:
    for name in ("kvtier-controller", "kvtier-webhook"):
        pod = one(render(), "Deployment", name)["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= container["resources"].keys()
            assert "livenessProbe" in container
            assert "readinessProbe" in container
        assert not any("hostPath" in volume for volume in pod["volumes"])


def test_there_are_two_of_each_that_prefer_different_nodes() -> None:
    objects = render()
    for name in ("kvtier-controller", "kvtier-webhook"):
        spec = one(objects, "Deployment", name)["spec"]
        assert spec["replicas"] == 2
        assert spec["strategy"]["type"] == "RollingUpdate"
        term = spec["template"]["spec"]["affinity"]["podAntiAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ][0]
        labels = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert labels == spec["selector"]["matchLabels"]
        assert one(objects, "PodDisruptionBudget", name)["spec"]["minAvailable"] == 1
    accounts = {body["metadata"]["name"] for body in objects if body["kind"] == "ServiceAccount"}
    assert accounts == {"kvtier-controller", "kvtier-webhook"}


def test_a_single_replica_has_no_disruption_budget() -> None:
    for single, other in (("controller", "webhook"), ("webhook", "controller")):
        objects = render({single: {"replicas": 1}})
        assert one(objects, "PodDisruptionBudget")["metadata"]["name"] == f"kvtier-{other}"


def test_selectors_have_no_labels_that_an_upgrade_changes() -> None:
    for name in ("kvtier-controller", "kvtier-webhook"):
        keys = one(render(), "Deployment", name)["spec"]["selector"]["matchLabels"].keys()
        assert not {"app.kubernetes.io/version", "helm.sh/chart"} & keys


def test_uninstalling_keeps_the_crd() -> None:
    definition = one(render(), "CustomResourceDefinition")
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not [
        body
        for body in render({"crd": {"install": False}})
        if body["kind"] == "CustomResourceDefinition"
    ]


def test_volumes_can_be_created_only_if_enabled_and_within_allowed_volumes() -> None:
    def creates(objects: list[dict[str, Any]]) -> bool:
        rules = [
            rule
            for body in objects
            if body["kind"] in ("ClusterRole", "Role")
            for rule in body["rules"]
        ]
        return any(
            "persistentvolumes" in rule["resources"] and "create" in rule["verbs"] for rule in rules
        )

    plain = render({"allowedVolumes": [EXPORT]})
    assert not creates(plain)
    assert "kvtier-volumes" not in {body["metadata"]["name"] for body in plain}
    opted = render({"allowedVolumes": [EXPORT, DIRECTORY], "storage": {"createVolumes": True}})
    assert creates(opted)
    guard = one(opted, "ValidatingAdmissionPolicy", "kvtier-volumes")["spec"]
    assert guard["failurePolicy"] == "Fail"
    assert (
        f"system:serviceaccount:{NAMESPACE}:kvtier-controller"
        in guard["matchConditions"][0]["expression"]
    )
    assert '"nas.example"' in guard["validations"][-1]["expression"]
    # Options count as a whole and by their names, as in kvtier_operator.api.allowlist.
    assert {each["name"]: each["expression"] for each in guard["variables"]}["options"].endswith(
        "mountOptions : []"
    )
    listed = '["soft","timeo",'
    assert f"all(option, option in {listed}" in guard["validations"][-1]["expression"]
    assert f"|| option.split('=')[0] in {listed}" in guard["validations"][-1]["expression"]
    assert "/mnt/nvme" not in json.dumps(guard)


def test_watched_namespaces_get_roles_instead_of_cluster_rules() -> None:
    def reads(body: dict[str, Any], resource: str) -> bool:
        return any(resource in rule["resources"] for rule in body["rules"])

    everywhere = render()
    assert {
        (body["kind"], body["metadata"]["name"])
        for body in everywhere
        if body["kind"].endswith("Role") and reads(body, "pods")
    } == {("ClusterRole", "kvtier-controller"), ("ClusterRole", "kvtier-webhook")}
    some = render({"watchNamespaces": ["a", NAMESPACE]})
    places = {
        (body["metadata"].get("namespace"), body["metadata"]["name"])
        for body in some
        if body["kind"].endswith("Role") and reads(body, "pods")
    }
    assert places == {
        (place, f"kvtier-{name}")
        for place in ("a", NAMESPACE)
        for name in ("controller", "webhook")
    }
    roles = {
        (body["metadata"].get("namespace"), body["metadata"]["name"])
        for body in some
        if body["kind"] == "Role"
    }
    bound = {
        (body["metadata"].get("namespace"), body["roleRef"]["name"])
        for body in some
        if body["kind"] == "RoleBinding"
    }
    assert roles == bound
    assert reads(one(some, "ClusterRole", "kvtier-webhook"), "nodes")


def rules_of(
    objects: list[dict[str, Any]], kind: str, account: str, namespace: str | None = None
) -> list[Any]:
    """Those of the role that the account has there; none where there is no such role."""
    found = (
        body
        for body in objects
        if body["kind"] == kind and body["metadata"]["name"] == f"kvtier-{account}"
    )
    return next(
        (body["rules"] for body in found if body["metadata"].get("namespace") == namespace), []
    )


@pytest.mark.parametrize("mode", ["SelfManaged", "Mounted"])
@pytest.mark.parametrize("volumes", [True, False], ids=["volumes", "no-volumes"])
@pytest.mark.parametrize("namespaces", [[], ["a", NAMESPACE]], ids=["everywhere", "some"])
def test_rules_equal_those_of_the_code(mode: str, volumes: bool, namespaces: list[str]) -> None:
    certificates = {"certificates": {"mode": mode}}
    values = {
        "webhook": certificates,
        "storage": {"createVolumes": volumes},
        "watchNamespaces": namespaces,
    }
    objects = render(values)
    on = rbac.settings_on(settings_of(objects))
    for account, given in (("controller", rbac.CONTROLLER), ("webhook", rbac.WEBHOOK)):
        watched, cluster, own = (rbac.rules(given, scope, on) for scope in Scope)
        assert rules_of(objects, "ClusterRole", account) == (
            cluster if namespaces else cluster + watched
        )
        assert rules_of(objects, "Role", account, NAMESPACE) == (
            watched + own if namespaces else own
        )
        assert rules_of(objects, "Role", account, "a") == (watched if namespaces else [])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (
            "SelfManaged",
            {
                ("controller", "secrets", ("create",)),
                ("controller", "secrets/kvtier-webhook-certificates", ("get", "patch")),
                ("controller", "mutatingwebhookconfigurations/kvtier", ("get", "patch")),
                ("controller", "validatingwebhookconfigurations/kvtier", ("get", "patch")),
                ("webhook", "secrets/kvtier-webhook-certificates", ("get", "list", "watch")),
            },
        ),
        ("Mounted", set()),
    ],
)
def test_mounted_certificates_need_no_rules(mode: str, expected: set[Any]) -> None:
    # With watched namespaces, the rule for policies' tokens is not in the operator's namespace.
    objects = render({"webhook": {"certificates": {"mode": mode}}, "watchNamespaces": ["a"]})
    found = set()
    for account in ("controller", "webhook"):
        for rule in rules_of(objects, "ClusterRole", account) + rules_of(
            objects, "Role", account, NAMESPACE
        ):
            names = [f"/{name}" for name in rule.get("resourceNames", ())] or [""]
            found |= {
                (account, f"{resource}{name}", tuple(rule["verbs"]))
                for resource in rule["resources"]
                for name in names
            }
    about_certificates = {
        each for each in found if "webhook" in each[1] or each[1].startswith("secrets")
    }
    assert about_certificates == expected


def test_rules_name_the_configured_secret() -> None:
    rendered = render({"webhook": {"certificates": {"secretName": "mine"}}})
    named = {
        name
        for body in rendered
        if body["kind"] == "Role"
        for rule in body["rules"]
        if rule["resources"] == ["secrets"]
        for name in rule.get("resourceNames", ())
    }
    assert named == {"mine"}


def test_the_chart_selects_no_pod_but_its_own_with_a_network_policy() -> None:
    """A policy that selects pods of others would open what their namespace denies, or deny what
    their clients need.
    """
    assert not [body for body in render() if body["kind"] == "NetworkPolicy"]
    peer = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    rendered = render({"networkPolicy": {"enabled": True, "metricsFrom": [peer]}})
    policy = one(rendered, "NetworkPolicy")
    assert policy["metadata"]["namespace"] == NAMESPACE
    assert policy["spec"]["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/name": "kvtier",
        "app.kubernetes.io/instance": "kvtier",
    }


def test_the_example_of_a_network_policy_opens_one_port_to_named_peers() -> None:
    example = yaml.safe_load((REPOSITORY / "examples" / "network-policy.yaml").read_text())
    (rule,) = example["spec"]["ingress"]
    assert [(each["port"], each.get("endPort")) for each in rule["ports"]] == [(9400, None)]
    assert all(peer["podSelector"]["matchLabels"] for peer in rule["from"])
    controller = one(render(), "Deployment", "kvtier-controller")["spec"]["template"]
    wanted = rule["from"][0]["podSelector"]["matchLabels"]
    assert wanted.items() <= controller["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"webhook": {"replica": 1}}, ["/webhook", "replica"]),
        ({"webhook": {"replicas": 0}}, ["/webhook/replicas", "minimum"]),
        ({"webhook": {"port": "9443"}}, ["/webhook/port", "integer"]),
        (
            {"webhook": {"certificates": {"mode": "selfManaged"}}},
            ["/webhook/certificates/mode", "SelfManaged", "Mounted"],
        ),
        ({"allowedVolumes": [{"namespaces": ["a"]}]}, ["/allowedVolumes/0", "hostPath", "nfs"]),
        ({"allowedVolumes": [{**EXPORT, **DIRECTORY}]}, ["/allowedVolumes/0", "oneOf"]),
        (
            {"allowedVolumes": [{"namespaces": ["a"], "hostPath": "/mnt/../etc"}]},
            ["/allowedVolumes/0/hostPath"],
        ),
        (
            {"allowedVolumes": [{"namespaces": [], "hostPath": "/mnt"}]},
            ["/allowedVolumes/0/namespaces"],
        ),
        (
            {"allowedVolumes": [{"namespaces": ["a"], "nfs": {"server": "x"}}]},
            ["/allowedVolumes/0/nfs", "exportPrefix"],
        ),
        ({"storage": {"createVolumes": "yes"}}, ["/storage/createVolumes", "boolean"]),
        ({"controller": {"resyncSeconds": 0}}, ["/controller/resyncSeconds"]),
        (
            {"controller": {"resources": {"limit": {"memory": "1Gi"}}}},
            ["/controller/resources", "limit"],
        ),
        ({"images": {"operator": ""}}, ["/images/operator"]),
        ({"monitoring": {"port": 80}}, ["/monitoring/port", "1,024"]),
        ({"nameOverride": "x"}, ["nameOverride"]),
    ],
)
def test_helm_rejects_invalid_values_by_name(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(helm.HelmValuesError) as caught:
        render(values)
    for word in words:
        assert word in str(caught.value)


def test_the_schema_rejects_unknown_keys() -> None:
    free = {"global", "affinity"}

    def check(schema: Any, path: tuple[str, ...]) -> None:
        if isinstance(schema, dict):
            if (
                schema.get("type") == "object"
                and path[-1:] != ("items",)
                and not free.intersection(path)
            ):
                assert "additionalProperties" in schema, f"open: {path}"
            for key, value in schema.items():
                check(value, (*path, key))

    check(json.loads((CHART / "values.schema.json").read_text()), ())


def test_a_chart_that_depends_on_this_one_can_have_a_condition() -> None:
    """Helm passes the value of ``condition: kvtier.enabled`` to this chart."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["enabled"]["type"] == "boolean"
    assert one(render({"enabled": True}), "ConfigMap")


def test_schema_defaults_and_models_agree() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() == schema["properties"].keys() - {"global", "enabled"}
    for name in (
        "images",
        "controller",
        "webhook",
        "monitoring",
        "storage",
        "networkPolicy",
        "rollout",
    ):
        assert values[name].keys() == schema["properties"][name]["properties"].keys()
    entry = schema["properties"]["allowedVolumes"]["items"]["properties"].keys()
    assert entry <= {field.alias for field in AllowedVolume.model_fields.values()}


def test_every_setting_can_be_set_by_the_chart() -> None:
    # A setting that the chart does not render cannot be set at all.
    not_by_the_chart = {
        "host",
        "directory",
        "serviceName",
        "mutatingConfiguration",
        "validatingConfiguration",
        "extraNames",
        "matchExpressions",  # may be set, and has no default
        "enabled",  # a process without leader election is for tests
    }
    written = yaml.safe_load(one(render(), "ConfigMap")["data"]["settings.yaml"])

    def check(model: type[Any], body: dict[str, Any], path: str) -> None:
        for field in model.model_fields.values():
            alias = str(field.alias)
            if alias in not_by_the_chart:
                continue
            assert alias in body, f"{path}.{alias} is not in the chart"
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                check(field.annotation, body[alias], f"{path}.{alias}")

    check(Settings, written, "settings")
