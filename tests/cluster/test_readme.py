"""The commands of the README and of the quickstart, as written, on a real API server with a default
installation.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)

from charts import Release, rendered, without_definition
from operator_processes import operator, settings_of

REPOSITORY = Path(__file__).resolve().parents[2]
HOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/kvtier"


def blocks(page: str, heading: str) -> list[str]:
    """The code blocks of a section, without their indentation."""
    text = (REPOSITORY / page).read_text()
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^( *)```(?:yaml)?\n(.*?)^\1```$", section, re.MULTILINE | re.DOTALL)
    return ["\n".join(line[len(space) :] for line in body.splitlines()) for space, body in found]


def commands(block: str) -> list[list[str]]:
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def policy_of(page: str, heading: str) -> str:
    return next(body for body in blocks(page, heading) if "kind: KVTierPolicy" in body)


def helm_install(release: Release, arguments: list[str]) -> dict[str, Any]:
    """``helm install NAME CHART`` with the options that the pages use."""
    assert arguments[:4] == ["helm", "install", "kvtier", "charts/kvtier"]
    values: dict[str, Any] = {}
    options = iter(arguments[4:])
    for option in options:
        match option:
            case "--create-namespace":
                pass
            case "--namespace":
                assert next(options) == release.namespace
            case "--set-json":
                key, _, value = next(options).partition("=")
                values[key] = json.loads(value)
            case _:
                raise AssertionError(f"an option that this test does not know: {option}")
    return release.install(values, chart=REPOSITORY / "charts" / "kvtier")


@pytest.fixture
def release(full_cluster: Any, full_api: Any) -> Iterator[Release]:
    without_definition(full_cluster)
    with Release(full_cluster.kubeconfig, full_cluster.context) as found:
        try:
            yield found
        finally:
            found.uninstall()
            full_cluster.kubectl("delete", "namespace", "serving", "--ignore-not-found")
            full_cluster.kubectl(
                "delete", "crd", "kvtierpolicies.kvtier.io", "--ignore-not-found", seconds=300
            )


@pytest.mark.parametrize(
    ("page", "policy_section"),
    [("README.md", "A policy"), ("docs/quickstart.md", "Attach your own vLLM on one machine")],
)
def test_the_commands_for_a_cluster_work_as_written(
    release: Release,
    full_cluster: Any,
    full_api: Any,
    nodes: ModuleType,
    tmp_path: Path,
    page: str,
    policy_section: str,
) -> None:
    """The operator's pods do not run on this cluster. The controller runs on this machine instead,
    with the settings and the account of the installation.
    """
    (tmp_path / "chat.yaml").write_text(policy_of(page, policy_section))
    block = next(body for body in blocks(page, "Run it on Kubernetes") if "helm install" in body)
    first, *others = commands(block)
    installed = helm_install(release, first)
    if not any(each[:3] == ["kubectl", "create", "namespace"] for each in others):
        _existing_deployment(full_cluster)
    home = tmp_path / "controller"
    home.mkdir()
    with operator("controller", full_cluster, full_api, settings_of(installed), home):
        for program, *arguments in others:
            assert program == "kubectl"
            arguments = [
                str(tmp_path / each) if each == "chat.yaml" else each for each in arguments
            ]
            full_cluster.kubectl(*arguments, seconds=90)

        def ready() -> Any:
            found = json.loads(
                full_cluster.kubectl("get", "-n", "serving", "kvtp", "chat", "-o", "json")
            )
            held = {
                each["type"]: each for each in (found.get("status") or {}).get("conditions") or ()
            }
            return held if held.get("Ready", {}).get("status") == "True" else None

        conditions = nodes.wait_for("the policy is Ready", ready)
    assert (conditions["Accepted"]["status"], conditions["Accepted"]["reason"]) == (
        "True",
        "Accepted",
    )
    assert rendered(installed)


def _existing_deployment(cluster: Any) -> None:
    """What the quickstart takes for granted: a namespace with the Deployment of an engine."""
    cluster.kubectl("create", "namespace", "serving")
    options = ("--image=vllm/vllm-openai", "--replicas=0")
    cluster.kubectl("create", "deployment", "chat", "-n", "serving", *options)


@pytest.mark.parametrize(
    ("page", "section", "policy_section"),
    [
        ("README.md", "Attach an engine without Kubernetes", "A policy"),
        ("docs/quickstart.md", *2 * ("Attach your own vLLM on one machine",)),
    ],
)
def test_the_commands_without_a_cluster_work_as_written(
    tmp_path: Path, page: str, section: str, policy_section: str
) -> None:
    (tmp_path / "chat.yaml").write_text(policy_of(page, policy_section))
    found = [
        each
        for block in blocks(page, section)
        for each in (commands(block) if "kind:" not in block else [])
        if each[0] == "kvtier"
    ]
    assert [each[1] for each in found if each[1] != "validate"] == ["payload", "render", "render"]
    environment = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    for _, *arguments in found:
        arguments = [each.replace("~", str(tmp_path)) for each in arguments]
        done = subprocess.run(
            [sys.executable, "-m", "kvtier.cli.main", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert {"KVTIER_TOPOLOGY", "PYTHONHASHSEED"} <= {
        name.removeprefix("export ") for name in variables
    }


def test_the_commands_for_the_local_cluster_name_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, objects and options of the section. A test of the whole loop does the same steps with
    code of its own.
    """
    import local_cluster

    home = tmp_path / "build" / "cluster"
    home.mkdir(parents=True)
    monkeypatch.setattr(local_cluster, "HOME", home)
    # The directory of the file tier belongs to a group that only root can set.
    monkeypatch.setattr(local_cluster.operators, "storage", lambda *_: [])
    (tmp_path / "kubeconfig").touch()
    local_cluster._write(SimpleNamespace(kubeconfig=tmp_path / "kubeconfig", assets=tmp_path))
    policy, engine = (
        yaml.safe_load((home / f"{n}.yaml").read_text()) for n in ("policy", "engine")
    )
    objects = {f"kvtp/{policy['metadata']['name']}", f"deployment/{engine['metadata']['name']}"}
    label = ",".join(f"{k}={v}" for k, v in policy["spec"]["podSelector"]["matchLabels"].items())
    assert engine["spec"]["template"]["metadata"]["labels"].items() >= {tuple(label.split("="))}

    programs = set()
    for block in blocks("README.md", "Try it on a cluster of this machine"):
        for program, *arguments in commands(block):
            programs.add(program.rpartition("/")[2])
            options = dict(pairwise(arguments))
            for file in (options[each] for each in ("-f", "--values") if each in options):
                assert (home / file).is_file(), file
            assert options.get("-n", local_cluster.NAMESPACE) == local_cluster.NAMESPACE
            named = {each for each in arguments if re.match("(kvtp|deployment)/", each)}
            assert named <= objects
            match program:
                case "helm":
                    _helm_parser().parse_args(arguments)
                    assert (home / arguments[2]).is_file(), arguments[2]
                case "cd":
                    assert (tmp_path / arguments[0]) == home
                case "../../.venv/bin/python":
                    script, command = arguments
                    assert (REPOSITORY / "build" / "cluster" / script).resolve().is_file()
                    assert command in local_cluster.COMMANDS
    assert programs == {"cd", "export", "helm", "kubectl", "python"}
    text = " ".join((REPOSITORY / "README.md").read_text().split())
    assert f"`kubectl delete pod -n {local_cluster.NAMESPACE} -l {label}`" in text


def _helm_parser() -> argparse.ArgumentParser:
    """Of tools/helm, which is ``helm`` on that cluster."""
    loader = SourceFileLoader("kvtier_tools_helm", str(REPOSITORY / "tools" / "helm"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    found: argparse.ArgumentParser = module.parser()
    return found


def test_the_policy_of_the_readme_needs_no_administrator() -> None:
    policy = yaml.safe_load(policy_of("README.md", "A policy"))
    sources = [
        set(tier["fileSystem"]["volume"])
        for tier in policy["spec"]["tiers"]
        if "fileSystem" in tier
    ]
    assert sources == [{"emptyDir"}]
