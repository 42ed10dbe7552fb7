"""A Kubernetes cluster on this machine to try KVTier on, with the README's commands.

    python tests/cluster/local_cluster.py start        keeps running until it is interrupted
    python tests/cluster/local_cluster.py ask          a prompt, twice, with the GPU cache emptied
    python tests/cluster/local_cluster.py dashboards   what the dashboards show now

`start` needs root and the packages of tools/debian-packages. It writes into build/cluster: the
kubeconfig, the chart as an archive and values for it, a policy, a vLLM with a tiny model, and `bin`
with kubectl, helm and kvtier. The images are on the node.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import clusters
import demo_dashboard
import images
import operators
import yaml
from rest import Api
from serving import EnginePod, EngineProcessError, ask, engine_deployment
from stub_engine_pods import STORAGE_GID

from kvtier.cli.demo_display import Display
from kvtier.harness.tiny_model import TinyLlama, prompt, write_llama

REPOSITORY = Path(__file__).resolve().parents[2]
HOME = REPOSITORY / "build" / "cluster"
NAMESPACE, POLICY, APP = "serving", "chat", "vllm"
TIER = HOME / "tier"
CONTEXT = "test"
PROMPT_TOKENS, NEW_TOKENS = 1041, 16
PROMPTS = 4
STORE_SECONDS = 2.0
"""Until what was computed is stored in every tier."""


def policy() -> dict[str, Any]:
    """RAM and a directory of the node. ``Weighted``, because the tiny model recomputes faster than
    it loads. No ``emptyDir``: this node has no ephemeral storage to request. ``minFree`` is 0,
    however full this machine's disk is.
    """
    volume = {"hostPath": {"path": str(TIER)}}
    disk = {"capacity": "1Gi", "minFree": "0", "sharing": "Node", "volume": volume}
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": POLICY},
        "spec": {
            "podSelector": {"matchLabels": {"app": APP}},
            "selection": "Weighted",
            "security": {"storageGid": STORAGE_GID},
            "resources": {"daemon": {"requests": {"cpu": "100m"}}},
            "tiers": [
                {"name": "ram", "memory": {"capacity": "64Mi"}},
                {"name": "disk", "fileSystem": disk},
            ],
        },
    }


def start(display: Display) -> int:
    """Keeps the cluster until it is interrupted."""
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    HOME.chmod(0o755)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        with clusters.cluster(HOME / "state", clusters.Parts.NODE) as cluster:
            display.note("the cluster runs")
            operators.load_images(cluster)
            display.note("the images of operator and sidecar are on the node")
            _write(cluster)
            display.note(f"ready: export KUBECONFIG={HOME / 'kubeconfig'} PATH={HOME}/bin:$PATH")
            stop.wait()
            display.note("the cluster goes")
    except (clusters.NoClusterError, images.NoImagesError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    return 0


def _write(cluster: Any) -> None:
    import helm_python as helm

    with helm.Chart.load(REPOSITORY / "charts" / "kvtier") as chart:
        chart.save(HOME)
    shutil.copy(cluster.kubeconfig, HOME / "kubeconfig")
    operators.storage(HOME, TIER.name)
    values = {"allowedVolumes": [{"namespaces": [NAMESPACE], "hostPath": str(TIER)}]}
    (HOME / "values.yaml").write_text(yaml.safe_dump(values))
    (HOME / "policy.yaml").write_text(yaml.safe_dump(policy(), sort_keys=False))
    model = write_llama(HOME / "model", seed=0)
    engine = engine_deployment(model, APP)
    (HOME / "engine.yaml").write_text(yaml.safe_dump(engine, sort_keys=False))
    binaries = HOME / "bin"
    binaries.mkdir()
    (binaries / "kubectl").symlink_to(cluster.assets / "kubectl")
    (binaries / "helm").symlink_to(REPOSITORY / "tools" / "helm")
    for name in ("kvtier", "kubectl-kvtier"):
        (binaries / name).symlink_to(Path(sys.executable).parent / name)


def _engine() -> tuple[Api, EnginePod]:
    kubeconfig = HOME / "kubeconfig"
    if not kubeconfig.exists():
        raise SystemExit("cluster: run `make cluster` first")
    api = Api(kubeconfig, CONTEXT, NAMESPACE)
    cluster = clusters.Cluster(kubeconfig, CONTEXT, own=False, origin="build/cluster")
    return api, EnginePod(cluster, api, NAMESPACE, APP, HOME / "model")


def ask_twice(display: Display) -> int:
    """Sends a prompt twice, each time with the engine's own cache emptied. It is the same prompt in
    each call, so that a new pod finds it in the file tier.
    """
    _, pod = _engine()
    client = pod.client()
    tokens = prompt(PROMPT_TOKENS, 1, TinyLlama().vocabulary)
    rows, answers = [], []
    for name in ("first", "again"):
        client.reset_prefix_cache()
        answer, loaded, seconds = ask(client, tokens, NEW_TOKENS)
        answers.append(answer)
        computed = PROMPT_TOKENS - sum(loaded.values())
        told = (str(loaded.get("ram", 0)), str(loaded.get("disk", 0)), str(computed))
        rows.append((name, *told, f"{seconds * 1e3:.0f} ms"))
        time.sleep(STORE_SECONDS)
    headings = ("prompt", "from ram", "from disk", "computed", "first token")
    display.table(
        f"Where {PROMPT_TOKENS} prompt tokens came from, with the engine's own cache emptied",
        headings,
        rows,
    )
    print("same answer" if answers[0] == answers[1] else "DIFFERENT ANSWERS")
    return 0 if answers[0] == answers[1] else 1


def dashboards(display: Display) -> int:
    """Scrapes while prompts are answered, and shows what the dashboards would."""
    api, pod = _engine()
    directory = HOME / "prometheus"
    shutil.rmtree(directory, ignore_errors=True)
    data = demo_dashboard.DashboardData(directory, api, pod, POLICY)
    if data.missing:
        print(f"cluster: {data.missing} is not installed", file=sys.stderr)
        return 2
    try:
        data.follow()
        client = pod.client()
        for number in range(PROMPTS):
            tokens = prompt(PROMPT_TOKENS, number, TinyLlama().vocabulary)
            for _ in range(2):
                client.reset_prefix_cache()
                ask(client, tokens, NEW_TOKENS)
                time.sleep(STORE_SECONDS)
        display.table(
            "What the dashboards show", ("dashboard", "panel", "series", "value"), data.rows()
        )
    finally:
        data.close()
    return 0


COMMANDS = {"start": start, "ask": ask_twice, "dashboards": dashboards}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    try:
        return COMMANDS[parser.parse_args().command](Display(fancy=False))
    except (EngineProcessError, OSError, AssertionError, json.JSONDecodeError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
