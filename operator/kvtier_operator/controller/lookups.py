"""Reads from the API server that are needed only while something is wrong: Events of a pod that
does not start, nodes, the namespace's label, the StorageClass of a pending claim. Answers are
cached for ``FRESH_SECONDS``. A read that fails counts as "not known".
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api.pods import OwnerReference, Pod, PodSpec, decode, decode_pod
from kvtier_operator.api.selector import LabelSelector, matches
from kvtier_operator.controller import objects
from kvtier_operator.kube.resources import (
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    REPLICA_SETS,
    STATEFUL_SETS,
    STORAGE_CLASSES,
    ApiError,
    Client,
    NotingCache,
    Object,
)

logger = logging.getLogger(__name__)
FRESH_SECONDS = 30.0
MAX_CACHED = 1024
TEMPLATE_OWNERS = {"ReplicaSet": REPLICA_SETS, "StatefulSet": STATEFUL_SETS}
"""Owners of pods whose pod template the controller may read."""


class Lookups:
    """For one event loop. ``clock``: monotonic. ``injected``: the webhook's namespaceSelector."""

    def __init__(self, client: Client, clock: Callable[[], float], injected: LabelSelector) -> None:
        self._client = client
        self._injected = injected
        self._clock = clock
        self._answers: OrderedDict[tuple[str, ...], tuple[float, Any]] = OrderedDict()

    async def injection_enabled(self, namespace: str) -> bool | None:
        """Whether the API server calls the webhook for pods of the namespace, by its labels; None:
        not known.
        """
        found = await self._cached(
            ("namespace", namespace), lambda: self._client.get(NAMESPACES, None, namespace)
        )
        return None if found is None else matches(self._injected, objects.labels(found))

    async def nodes(self) -> Sequence[Object]:
        """All nodes."""
        return await self._cached(("nodes",), lambda: self._client.list(NODES)) or ()

    async def pod(self, pod: Pod) -> Pod | None:
        """The complete pod: the one in the watch cache has no tolerations."""
        namespace, name = pod.metadata.namespace, pod.metadata.name
        found: Object | None = await self._cached(
            ("pod", pod.metadata.uid), lambda: self._client.get(PODS, namespace, name)
        )
        return None if found is None else decode_pod(found)

    async def events(self, pod: Pod) -> Sequence[Object]:
        """Events about a pod."""
        uid, namespace = pod.metadata.uid, pod.metadata.namespace
        fields = f"involvedObject.uid={uid}"
        found = await self._cached(
            ("events", uid), lambda: self._client.list(EVENTS, namespace, fields=fields)
        )
        return [
            event for event in found or () if (event.get("involvedObject") or {}).get("uid") == uid
        ]

    async def binds_on_first_use(self, storage_class: str) -> bool:
        """Whether claims of a StorageClass are known to stay unbound until a pod uses them."""
        found = await self._cached(
            ("storageclass", storage_class),
            lambda: self._client.get(STORAGE_CLASSES, None, storage_class),
        )
        return found is not None and found.get("volumeBindingMode") == "WaitForFirstConsumer"

    async def pod_template(self, namespace: str, owner: OwnerReference) -> PodSpec | None:
        """The spec of an owner's pod template; None if its kind is not in ``TEMPLATE_OWNERS``."""
        kind = TEMPLATE_OWNERS.get(owner.kind)
        if kind is None:
            return None
        found = await self._cached(
            ("owner", owner.uid), lambda: self._client.get(kind, namespace, owner.name)
        )
        if found is None:
            return None
        return decode(objects.spec(objects.spec(found).get("template") or {}), PodSpec)

    async def _cached(self, key: tuple[str, ...], read: Callable[[], Awaitable[Any]]) -> Any:
        now = self._clock()
        known = self._answers.get(key)
        if known is not None and now - known[0] < FRESH_SECONDS:
            return known[1]
        try:
            answer = await read()
        except ApiError as error:
            logger.info("could not read %s: %s", key[0], error)
            answer = None
        self._answers[key] = (now, answer)
        self._answers.move_to_end(key)
        while len(self._answers) > MAX_CACHED:
            self._answers.popitem(last=False)
        return answer


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """How a reconcile reads and changes the cluster: the watch cache, calls, and cached on-demand
    reads.
    """

    cache: NotingCache
    client: Client
    lookups: Lookups
