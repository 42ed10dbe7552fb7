"""``kubectl kvtier`` against a real API server, with the real webhook process: its answers are the
webhook's, its errors name the missing right, and reports come through the API server's proxy.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import random
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import psutil
import pytest
import yaml
from tests.cluster import admission
from tests.cluster.admission import LABELLED, WebhookProcess, installed, pod
from tests.cluster.test_webhook_admits_pods import any_pod, policies
from tests.support.pods import status_document, tier_document

from kvtier.cli.cluster.access import ClusterOptions, open_reader
from kvtier.cli.cluster.snapshot import read_snapshot, recreated
from kvtier.cli.cluster.why import created_now
from kvtier.cli.main import PLUGIN, main
from kvtier.tierd.http import BearerToken, HttpResponse, HttpServer
from kvtier_operator.api.names import SKIPPED_ANNOTATION, STRUCTURAL_ANNOTATION

RANDOM_PODS = 60
SEED = 7
OPERATOR = "kvtier-preview"
"""The namespace with the settings. Tests of the chart have their own."""
COMMAND_SECONDS = 60
SETTINGS = {
    "allowedVolumes": [
        {"namespaces": ["*"], "hostPath": "/mnt/kv"},
        {"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/"}},
    ]
}


class Answer(NamedTuple):
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str) -> Answer:
    """Runs the command in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(list(arguments))
    return Answer(status, out.getvalue(), errors.getvalue())


class Kvtier:
    """Runs the command against the cluster."""

    def __init__(self, cluster: Any, namespace: str) -> None:
        self.kubeconfig, self.context = cluster.kubeconfig, cluster.context
        self.namespace = namespace

    def arguments(self, *arguments: str) -> list[str]:
        """The arguments of a command with those that name the cluster."""
        where = ["--kubeconfig", str(self.kubeconfig), "-n", self.namespace]
        if "--context" not in arguments:
            where += ["--context", self.context]
        if arguments[0] != "top":
            where += ["--operator-namespace", OPERATOR]
        return [*arguments, *where]

    def __call__(self, *arguments: str) -> Answer:
        return run(*self.arguments(*arguments))


@pytest.fixture(scope="module")
def webhook(
    full_cluster: Any, full_api: Any, nodes: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WebhookProcess]:
    home = tmp_path_factory.mktemp("preview")
    with admission.definition(full_cluster, full_api, nodes):
        process = WebhookProcess(home, full_cluster, SETTINGS)
        with process, installed(full_api, *admission.configurations(process)):
            text = yaml.safe_dump(process.settings.model_dump(mode="json", by_alias=True))
            nodes.make_namespace(full_api, OPERATOR)
            body = {"metadata": {"name": "kvtier-settings"}, "data": {"settings.yaml": text}}
            maps = f"/api/v1/namespaces/{OPERATOR}/configmaps"
            nodes.ok(full_api.request("POST", maps, body))
            yield process
            full_api.request("DELETE", f"/api/v1/namespaces/{OPERATOR}")


@pytest.fixture
def space(full_api: Any, nodes: ModuleType, webhook: WebhookProcess) -> Iterator[str]:
    """A namespace with injection enabled."""
    name: str = nodes.make_namespace(full_api, f"preview-{secrets.token_hex(3)}", LABELLED)
    yield name
    full_api.request("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def kvtier(full_cluster: Any, space: str) -> Kvtier:
    return Kvtier(full_cluster, space)


def chat(**spec: Any) -> dict[str, Any]:
    return admission.policy("chat", {"app": "engine"}, **spec)


def apply(api: Any, nodes: ModuleType, space: str, *documents: dict[str, Any]) -> None:
    """Creates policies, and waits until the webhook knows each of them."""
    path = f"/apis/kvtier.io/v1alpha1/namespaces/{space}/kvtierpolicies"
    pods = f"/api/v1/namespaces/{space}/pods?dryRun=All"
    for each in documents:
        nodes.ok(api.request("POST", path, each))
    for each in documents:
        labels = each["spec"]["podSelector"]["matchLabels"]

        def known(labels: dict[str, str] = labels) -> bool:
            status, body = api.request("POST", pods, pod(labels))
            annotations = body["metadata"].get("annotations") or {} if status == 201 else {}
            return STRUCTURAL_ANNOTATION in annotations or SKIPPED_ANNOTATION in annotations

        nodes.wait_for("the webhook knows the policy", known)


def test_the_preview_of_random_pods_is_what_the_webhook_then_does(
    full_cluster: Any, full_api: Any, nodes: ModuleType, webhook: WebhookProcess, space: str
) -> None:
    """The answer of the real webhook, through the real API server, for pods of every kind."""
    documents = list(policies())
    apply(full_api, nodes, space, *documents)
    names = [each["metadata"]["name"] for each in documents]
    choose = random.Random(SEED)
    created = []
    for _ in range(RANDOM_PODS):
        document = any_pod(choose, choose.choice(names))
        path = f"/api/v1/namespaces/{space}/pods?dryRun=All"
        status, body = full_api.request("POST", path, document)
        if status == 201:
            created.append((document, body))

    async def previews() -> list[tuple[str, str]]:
        options = ClusterOptions(full_cluster.kubeconfig, full_cluster.context, space, OPERATOR)
        async with open_reader(options) as reader:
            snapshot = await read_snapshot(reader)
            assert reader.not_checked == []
            found = [created_now(snapshot, recreated(document)) for document, _ in created]
        return [(each.result, each.reason) for each in found]

    actual = []
    for _, body in created:
        annotations = body["metadata"].get("annotations") or {}
        skipped = json.loads(annotations.get(SKIPPED_ANNOTATION, "{}"))
        attached = STRUCTURAL_ANNOTATION in annotations
        actual.append(("Attached", "") if attached else ("Skipped", skipped["reason"]))
    assert asyncio.run(previews()) == actual
    assert {result for result, _ in actual} == {"Attached", "Skipped"}
    assert len({reason for _, reason in actual}) > 3


def test_why_and_plan_for_a_pod_that_was_skipped(
    full_api: Any, nodes: ModuleType, webhook: WebhookProcess, space: str, kvtier: Kvtier,
    tmp_path: Path,
) -> None:  # fmt: skip
    apply(full_api, nodes, space, chat())
    document = pod({"app": "engine"}, generateName=None, name="two-hosts")
    document["spec"]["containers"][0]["args"] = ["--nnodes", "2"]
    pods = f"/api/v1/namespaces/{space}/pods"
    body = nodes.ok(full_api.request("POST", pods, document))
    skipped = json.loads(body["metadata"]["annotations"][SKIPPED_ANNOTATION])
    answer = kvtier("why", "two-hosts", "-o", "json")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert (found["state"], found["reason"]) == ("Skipped", skipped["reason"])
    assert found["message"] == skipped["message"]
    assert found["ifCreatedNow"]["reason"] == skipped["reason"]
    text = kvtier("why", "pod/two-hosts")
    assert f"pod {space}/two-hosts: Skipped" in text.stdout
    assert skipped["message"] in text.stdout, "a pipe does not cut it"

    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(chat(minLoadTokens=64, chunkTokens=512)))
    planned = kvtier("plan", str(file), "-o", "json")
    assert planned.returncode == 0, planned.stderr
    (plan,) = json.loads(planned.stdout)["policies"]
    assert plan["counts"] == {"WithoutTiers": 1}
    assert [(each["field"], each["change"]) for each in plan["changes"]] == [
        ("spec.chunkTokens", "structural"),
        ("spec.minLoadTokens", "live"),
    ]
    path = f"/apis/kvtier.io/v1alpha1/namespaces/{space}/kvtierpolicies/chat"
    stored = nodes.ok(full_api.request("GET", path))
    assert stored["spec"]["minLoadTokens"] == 512, "a plan writes nothing"


def test_an_unchanged_file_plans_no_change(
    full_api: Any, nodes: ModuleType, webhook: WebhookProcess, space: str, kvtier: Kvtier,
    tmp_path: Path,
) -> None:  # fmt: skip
    apply(full_api, nodes, space, chat())
    nodes.ok(
        full_api.request(
            "POST",
            f"/api/v1/namespaces/{space}/pods",
            pod({"app": "engine"}, generateName=None, name="engine"),
        )
    )
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(chat()))
    (plan,) = json.loads(kvtier("plan", str(file), "-o", "json").stdout)["policies"]
    assert (plan["new"], plan["changes"], plan["counts"]) == (False, [], {"Unchanged": 1})


def _own_address() -> str:
    """An address of this machine that the API server may proxy to."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            loopback = each.address.startswith(("127.", "169.254."))
            if each.family == socket.AF_INET and not loopback:
                return str(each.address)
    pytest.skip("this machine has no address but loopback")


def test_top_reads_tierd_through_the_proxy_with_the_policys_token(
    full_api: Any, nodes: ModuleType, webhook: WebhookProcess, space: str, kvtier: Kvtier,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The API server removes the Authorization header, and tierd wants the token."""
    apply(full_api, nodes, space, chat())
    token = tmp_path / "token"
    token.write_text("secret-token")
    body = json.dumps(
        status_document(tier_document("ram", usedBytes=1 << 29, hitTokens=40), promptTokens=100)
    ).encode()
    server = HttpServer(
        "0.0.0.0",
        0,
        {"/status": lambda: HttpResponse(200, "application/json", body)},
        BearerToken(token),
    )
    try:
        address, port = _own_address(), server.address[1]
        pods = f"/api/v1/namespaces/{space}/pods"
        document = pod({"app": "engine"}, generateName=None, name="engine")
        created = nodes.ok(full_api.request("POST", pods, document))
        annotations = created["metadata"]["annotations"]
        structural = json.loads(annotations[STRUCTURAL_ANNOTATION])
        structural["http"]["port"] = port
        patch = {"metadata": {"annotations": {STRUCTURAL_ANNOTATION: json.dumps(structural)}}}
        merge = "application/merge-patch+json"
        nodes.ok(full_api.request("PATCH", f"{pods}/engine", patch, content_type=merge))
        state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        ready = {"name": "vllm", "ready": True, "restartCount": 0, "image": "x", "imageID": ""}
        status = {
            "status": {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{"ip": address}],
                "containerStatuses": [{**ready, "state": state}],
            }
        }
        nodes.ok(full_api.request("PATCH", f"{pods}/engine/status", status, content_type=merge))

        without = kvtier("top", "-o", "json")
        assert without.returncode == 0, without.stderr
        (engine,) = json.loads(without.stdout)["engines"]
        assert engine["tiers"] == []
        assert "does not accept the policy's token" in engine["message"]

        secret = {
            "metadata": {"name": "chat-token"},
            "data": {"token": base64.b64encode(b"secret-token").decode()},
        }
        nodes.ok(full_api.request("POST", f"/api/v1/namespaces/{space}/secrets", secret))
        (engine,) = json.loads(kvtier("top", "-o", "json").stdout)["engines"]
        assert engine["state"] == "Attached"
        assert engine["tiers"][0]["usedBytes"] == 1 << 29
        text = kvtier("top").stdout
        assert text.splitlines()[1].endswith("50%   40%"), text

        doctor = kvtier("doctor", "engine", "--no-inside", "-o", "json")
        checks = {each["check"]: each for each in json.loads(doctor.stdout)["findings"]}
        assert checks["tier"]["severity"] == "ok"
        assert checks["hash-seed"]["severity"] == "ok"
        assert checks["versions"]["severity"] in ("error", "ok")
    finally:
        server.close()


def _limited(
    api: Any, nodes: ModuleType, space: str, cluster: Any, rules: list[dict[str, Any]], home: Path
) -> Path:
    """A kubeconfig of an account with these rules in the namespace."""
    group = "/apis/rbac.authorization.k8s.io/v1/namespaces/" + space
    nodes.ok(
        api.request(
            "POST", f"/api/v1/namespaces/{space}/serviceaccounts", {"metadata": {"name": "ann"}}
        )
    )
    nodes.ok(api.request("POST", f"{group}/roles", {"metadata": {"name": "ann"}, "rules": rules}))
    binding = {
        "metadata": {"name": "ann"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "ann"},
        "subjects": [{"kind": "ServiceAccount", "name": "ann", "namespace": space}],
    }
    nodes.ok(api.request("POST", f"{group}/rolebindings", binding))
    path = f"/api/v1/namespaces/{space}/serviceaccounts/ann/token"
    answer = nodes.ok(api.request("POST", path, {"spec": {}}))
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"] = [{"name": "ann", "user": {"token": answer["status"]["token"]}}]
    for each in config["contexts"]:
        each["context"]["user"] = "ann"
    for each in config["clusters"]:
        authority = each["cluster"].get("certificate-authority")
        if authority:
            each["cluster"]["certificate-authority"] = str(cluster.kubeconfig.parent / authority)
    found = home / "ann"
    found.write_text(yaml.safe_dump(config))
    return found


def test_an_account_with_few_rights_is_told_which_one_is_missing(
    full_cluster: Any, full_api: Any, nodes: ModuleType, webhook: WebhookProcess, space: str,
    kvtier: Kvtier, tmp_path: Path,
) -> None:  # fmt: skip
    apply(full_api, nodes, space, chat())
    document = pod({"app": "engine"}, generateName=None, name="engine")
    nodes.ok(full_api.request("POST", f"/api/v1/namespaces/{space}/pods", document))
    pods_only = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}]
    kvtier.kubeconfig = _limited(full_api, nodes, space, full_cluster, pods_only, tmp_path)
    for command in (["why", "engine"], ["top"]):
        answer = kvtier(*command)
        expected = f"the right to list kvtierpolicies.kvtier.io in namespace {space} is missing"
        assert answer.returncode == 1
        assert answer.stderr.startswith(f"kvtier: {expected}"), answer.stderr
        assert answer.stdout == ""

    more = {"apiGroups": ["kvtier.io"], "resources": ["kvtierpolicies"], "verbs": ["get", "list"]}
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space}/roles/ann"
    nodes.ok(
        full_api.request(
            "PATCH",
            path,
            {"rules": [*pods_only, more]},
            content_type="application/merge-patch+json",
        )
    )

    def answered() -> Any:
        answer = kvtier("why", "engine", "-o", "json")
        return json.loads(answer.stdout) if answer.returncode == 0 else None

    found = nodes.wait_for("the right is known", answered)
    assert found["policy"] == "chat"
    missing = "\n".join(found["notChecked"])
    assert "the right to list nodes in the cluster is missing" in missing
    assert f"the right to get configmaps in namespace {OPERATOR} is missing" in missing
    assert found["state"] in ("Starting", "NotPolled")


def test_errors_without_a_cluster(
    kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    nothing = run("why", "x")
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "there is no ~/.kube/config" in nothing.stderr
    broken = tmp_path / "broken"
    monkeypatch.setenv("KUBECONFIG", str(broken))
    for content in ("{", "a: 1", "\x00", ""):
        broken.write_text(content)
        answer = run("top")
        assert answer.returncode == 2, content
        assert "must be a kubeconfig" in answer.stderr
    config = yaml.safe_load(kvtier.kubeconfig.read_text())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for each in config["clusters"]:
            each["cluster"]["server"] = f"https://127.0.0.1:{closed.getsockname()[1]}"
        away = kvtier.kubeconfig.parent / f"away-{secrets.token_hex(3)}"
        away.write_text(yaml.safe_dump(config))
        answer = run("why", "x", "--kubeconfig", str(away), "--context", kvtier.context)
    assert answer.returncode == 1
    assert "the API server does not answer" in answer.stderr
    wrong = kvtier("why", "engine", "--context", "none-such")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "must be a kubeconfig with the context" in wrong.stderr


def test_a_pipe_gets_whole_lines_and_no_traceback(kvtier: Kvtier, space: str) -> None:
    """The command as a process, as a script runs it."""
    answer = subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main", *kvtier.arguments("why", "none")],
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert answer.returncode == 1
    assert answer.stderr == f"kvtier: Pod none does not exist in namespace {space}\n"


def test_as_a_plugin_of_kubectl(full_cluster: Any, space: str, tmp_path: Path) -> None:
    plugin = tmp_path / PLUGIN
    paths = os.environ.get("PYTHONPATH", "")
    plugin.write_text(
        f"#!{sys.executable}\nimport sys\nfrom kvtier.cli.main import main\nsys.exit(main())\n"
    )
    plugin.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": paths}
    kubectl = str(full_cluster.assets / "kubectl") if full_cluster.assets else "kubectl"
    if not Path(kubectl).is_file():
        pytest.skip("kubectl is not among the binaries")
    answer = subprocess.run(
        [kubectl, "kvtier", "why", "--help"],
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
        env=environment,
    )
    assert answer.returncode == 0, answer.stderr
    assert "Usage: kubectl kvtier why" in answer.stdout
