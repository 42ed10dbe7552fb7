"""Running the controller inside a test or a benchmark, against a real API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from tests.support.api_faults import KilledError

from kvtier_operator.api import crd
from kvtier_operator.controller.children.observe import NAMESPACE_LABEL
from kvtier_operator.controller.controller import Controller, ControllerOptions
from kvtier_operator.controller.enqueue import MANAGED
from kvtier_operator.kube.client import ApiClient
from kvtier_operator.kube.kopf_thread import Pace
from kvtier_operator.kube.queue import Pauses
from kvtier_operator.kube.resources import (
    CLAIMS,
    CONFIG_MAPS,
    NAMESPACES,
    POLICIES,
    SECRETS,
    VOLUMES,
    ApiError,
    Kind,
    Object,
)
from kvtier_operator.settings import Settings

DEFINITIONS = Kind(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False
)
WAIT_SECONDS = 60.0
QUICK = Pace(
    first_pause_seconds=0.05, last_pause_seconds=0.5, restart_seconds=0.5, absent_seconds=5.0
)
QUICK_PAUSES = Pauses(first_seconds=0.05, last_seconds=0.5)


def settings(namespace: str | None = None, **sections: Any) -> Settings:
    """Settings for tests: only ``namespace`` is watched, without certificates and election."""
    return Settings.model_validate(
        {
            "rollout": {"enabled": True},
            "watchNamespaces": [namespace] if namespace else [],
            "webhook": {"certificates": {"mode": "Mounted"}},
            "monitoring": {"host": "127.0.0.1", "port": 0},
            "controller": {
                "leaderElection": {"enabled": False},
                **(sections.pop("controller", None) or {}),
            },
            **sections,
        }
    )


def policy(
    namespace: str, name: str = "chat", *, tiers: Sequence[Mapping[str, Any]] = (), **spec: Any
) -> dict[str, Any]:
    """A small policy: memory, and the tiers given."""
    ram = {"name": "ram", "memory": {"capacity": "1Gi"}}
    return {
        "apiVersion": POLICIES.api_version,
        "kind": POLICIES.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"podSelector": {"matchLabels": {"app": name}}, "tiers": [ram, *tiers], **spec},
    }


def file_tier(
    name: str, volume: Mapping[str, Any], sharing: str = "Cluster", **rest: Any
) -> dict[str, Any]:
    """A file tier on a volume."""
    return {
        "name": name,
        "fileSystem": {"capacity": "10Gi", "sharing": sharing, "volume": volume},
        **rest,
    }


async def until(
    what: str, check: Callable[[], Awaitable[Any]], seconds: float = WAIT_SECONDS
) -> Any:
    """Polls until the result is true and returns it. ``AssertionError`` names what was missing."""
    deadline = time.monotonic() + seconds
    while True:
        found = await check()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {seconds:g} s: {what}")
        await asyncio.sleep(0.05)


async def install_definition(client: ApiClient) -> None:
    """The CRD, served."""
    await client.apply(DEFINITIONS, crd.definition())

    async def served() -> bool:
        try:
            await client.list(POLICIES, "default")
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    await until("the definition is served", served)


async def make_namespace(client: ApiClient, name: str) -> str:
    """A namespace with a name of its own."""
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": f"{name}-"}}
    return str((await client.create(NAMESPACES, None, body))["metadata"]["name"])


async def drop_namespace(client: ApiClient, name: str) -> None:
    """Deletes it and the volumes that were made for its policies."""
    for volume in await client.list(VOLUMES, labels=f"{NAMESPACE_LABEL}={name}"):
        metadata = volume["metadata"]
        await client.delete(VOLUMES, None, metadata["name"], uid=metadata["uid"])
    found = await client.get(NAMESPACES, None, name)
    await client.delete(NAMESPACES, None, name, uid=found["metadata"]["uid"])


@contextlib.asynccontextmanager
async def running(
    client: Any, chosen: Settings, *, pace: Pace = QUICK, registry: CollectorRegistry | None = None
) -> AsyncIterator[Controller]:
    """Runs the controller while the block runs. A ``KilledError`` in it ends it silently."""
    stop = asyncio.Event()
    controller = Controller(
        chosen,
        client,
        registry or CollectorRegistry(),
        options=ControllerOptions(pace=pace, pauses=QUICK_PAUSES),
    )
    task = asyncio.ensure_future(_run(controller, stop))
    try:
        yield controller
    finally:
        stop.set()
        await task


async def _run(controller: Controller, stop: asyncio.Event) -> None:
    try:
        await controller.run(stop)
    except KilledError:
        pass
    except BaseExceptionGroup as group:
        if group.split(KilledError)[1] is not None:
            raise


async def settled(
    controller: Controller, client: ApiClient, namespace: str, name: str = "chat"
) -> Object:
    """The policy, once its status has its generation and the controller is idle."""

    async def at_rest() -> Object | None:
        found = await client.get(POLICIES, namespace, name)
        seen = (found.get("status") or {}).get("observedGeneration")
        behind = seen != found["metadata"]["generation"]
        if behind or not controller.cache.synced() or controller.queue.busy:
            return None
        return found

    found: Object = await until(f"policy {name} is settled", at_rest)
    return found


def condition(found: Object, name: str) -> dict[str, Any]:
    """Status, reason and message of a condition; empty where there is none."""
    for each in (found.get("status") or {}).get("conditions") or ():
        if each["type"] == name:
            return {key: each.get(key, "") for key in ("status", "reason", "message")}
    return {}


async def belongings(client: ApiClient, namespace: str) -> dict[str, Any]:
    """Everything that was made for the policies of a namespace, and their statuses, without what
    differs between two runs (uids, versions, times, tokens, the namespace's name): equal runs give
    equal answers.
    """
    found: dict[str, Any] = {}
    uids: dict[str, str] = {}
    for each in await client.list(POLICIES, namespace):
        uids[each["metadata"]["uid"]] = f"uid-of-{each['metadata']['name']}"
        found[f"status {each['metadata']['name']}"] = each.get("status")
    for kind, place, labels in (
        (CONFIG_MAPS, namespace, MANAGED),
        (CLAIMS, namespace, MANAGED),
        (SECRETS, namespace, MANAGED),
        (VOLUMES, None, f"{NAMESPACE_LABEL}={namespace}"),
    ):
        for each in await client.list(kind, place, labels=labels):
            metadata = each["metadata"]
            body = {key: value for key, value in each.items() if key not in ("metadata", "status")}
            if kind is SECRETS:
                body["data"] = dict.fromkeys(each["data"], "random")
            kept = {key: metadata.get(key) for key in ("labels", "ownerReferences")}
            kept["leaving"] = "deletionTimestamp" in metadata
            found[f"{kind.kind} {metadata['name']}"] = {**body, "metadata": kept}
    text = json.dumps(found, sort_keys=True).replace(namespace, "NAMESPACE")
    for uid, name in uids.items():
        text = text.replace(uid, name)
    text = re.sub(r'"lastTransitionTime": "[^"]*"', '"lastTransitionTime": ""', text)
    # Names of volumes and claims end in a hash over the policy's uid.
    text = re.sub(r"(-[a-z0-9]+)-[0-9a-f]{8}\b", r"\1-HASH", text)
    document: dict[str, Any] = json.loads(text)
    return document
