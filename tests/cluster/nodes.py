"""Fake nodes, and pods whose status is set as a kubelet would set it.

For clusters without a node (``full_cluster``): controllers create pods of Deployments and the
scheduler binds them to a ``FakeNode``. This module writes their statuses as a kubelet would.
Everything goes through ``rest.Api``.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

NODE_INFO = (
    "machineID",
    "systemUUID",
    "bootID",
    "kernelVersion",
    "osImage",
    "containerRuntimeVersion",
)
MERGE = "application/merge-patch+json"
LEASE_SECONDS = 10.0
"""The node controller calls a node lost after 40 s without a renewed lease."""


def now() -> str:
    """As Kubernetes writes a point in time."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def ok(answer: tuple[int, Any]) -> Any:
    """The body of a successful response."""
    status, body = answer
    if status >= 300:
        raise AssertionError(f"{status}: {body.get('message', body)}")
    return body


def wait_for(what: str, ready: Callable[[], Any], seconds: float = 60, period: float = 0.2) -> Any:
    """What ``ready`` returns once it is true; fails after ``seconds`` and says what was awaited."""
    deadline = time.monotonic() + seconds
    while True:
        found = ready()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(period)


def make_namespace(api: Any, name: str, labels: Mapping[str, str] | None = None) -> str:
    """A namespace with a default account, which ServiceAccount admission requires. Without
    controllers the account is created here.
    """
    ok(
        api.request(
            "POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": dict(labels or {})}}
        )
    )
    account = f"/api/v1/namespaces/{name}/serviceaccounts"
    deadline = time.monotonic() + 3
    while api.request("GET", f"{account}/default")[0] == 404:
        if time.monotonic() > deadline:
            api.request("POST", account, {"metadata": {"name": "default"}})
        time.sleep(0.1)
    return name


class FakeNode:
    """A Ready Node that the scheduler uses while the block runs. No pod runs on it."""

    def __init__(
        self,
        api: Any,
        name: str,
        cpu: str = "64",
        memory: str = "512Gi",
        version: str = "v1.37.2",
        **capacity: str,
    ) -> None:
        self._api, self.name, self._version = api, name, version
        self._capacity = {
            "cpu": cpu,
            "memory": memory,
            "pods": "110",
            "ephemeral-storage": "1Ti",
            **capacity,
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Self:
        labels = {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux"}
        ok(
            self._api.request(
                "POST", "/api/v1/nodes", {"metadata": {"name": self.name, "labels": labels}}
            )
        )
        self._beat()
        # The admission plugin taints a new node, and the controller removes the taint once the node
        # is Ready. Removing it here is faster.
        ok(
            self._api.request(
                "PATCH",
                f"/api/v1/nodes/{self.name}",
                {"spec": {"taints": None}},
                content_type=MERGE,
            )
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        self._api.request("DELETE", f"/api/v1/nodes/{self.name}")

    def _beat(self) -> None:
        kinds = {
            "Ready": "True",
            "MemoryPressure": "False",
            "DiskPressure": "False",
            "PIDPressure": "False",
        }
        conditions = [
            {
                "type": kind,
                "status": status,
                "reason": "Test",
                "message": "",
                "lastHeartbeatTime": now(),
            }
            for kind, status in kinds.items()
        ]
        status = {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "conditions": conditions,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "nodeInfo": {
                "kubeletVersion": self._version,
                **dict.fromkeys(NODE_INFO, "test"),
                "kubeProxyVersion": self._version,
                "operatingSystem": "linux",
                "architecture": "amd64",
            },
        }
        ok(
            self._api.request(
                "PATCH",
                f"/api/v1/nodes/{self.name}/status",
                {"status": status},
                content_type="application/merge-patch+json",
            )
        )

    def _renew(self) -> None:
        while not self._stop.wait(LEASE_SECONDS):
            try:
                self._beat()
            except (AssertionError, OSError):
                continue


def set_status(api: Any, namespace: str, name: str, status: Mapping[str, Any]) -> Any:
    """Writes (merges) a pod's status, as its kubelet would."""
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
    return ok(api.request("PATCH", path, {"status": dict(status)}, content_type=MERGE))


def container_state(
    name: str, state: Mapping[str, Any], *, restarts: int = 0, image: str = "test"
) -> dict[str, Any]:
    """One entry of ``containerStatuses``. ``state`` is as in the API, for example
    ``{"running": {"startedAt": ...}}``.
    """
    running = "running" in state
    return {
        "name": name,
        "state": dict(state),
        "ready": running,
        "started": running,
        "restartCount": restarts,
        "image": image,
        "imageID": "",
        "containerID": f"containerd://{name}-{restarts}" if "waiting" not in state else "",
    }


def run_pod(api: Any, namespace: str, name: str, address: str = "127.0.0.1") -> Any:
    """The pod runs: every container and sidecar is ready, init containers have succeeded and
    ``podIP`` is ``address``.
    """
    pod = ok(api.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}"))
    running = {"running": {"startedAt": now()}}
    ended = {
        "terminated": {
            "exitCode": 0,
            "reason": "Completed",
            "startedAt": now(),
            "finishedAt": now(),
        }
    }
    inits = [
        {
            **container_state(
                each["name"], running if each.get("restartPolicy") == "Always" else ended
            ),
            "ready": True,
        }
        for each in pod["spec"].get("initContainers", ())
    ]
    mains = [container_state(each["name"], running) for each in pod["spec"]["containers"]]
    return set_status(
        api,
        namespace,
        name,
        {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "hostIP": "127.0.0.1",
            "hostIPs": [{"ip": "127.0.0.1"}],
            "startTime": now(),
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": now()}
                for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
            ],
            "initContainerStatuses": inits,
            "containerStatuses": mains,
        },
    )


def hold_pod(
    api: Any,
    namespace: str,
    name: str,
    container: str,
    reason: str,
    message: str,
    others: Sequence[str] = (),
) -> Any:
    """The pod waits: ``container`` (an init container or not) is in state waiting with ``reason``
    (``ImagePullBackOff``, ``CrashLoopBackOff``, ``CreateContainerConfigError``); later
    containers have not started.
    """
    pod = ok(api.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}"))
    waiting = {"waiting": {"reason": reason, "message": message}}
    pending = {"waiting": {"reason": "PodInitializing"}}
    running = {"running": {"startedAt": now()}}

    def state(each: Mapping[str, Any]) -> Mapping[str, Any]:
        return (
            waiting if each["name"] == container else running if each["name"] in others else pending
        )

    return set_status(
        api,
        namespace,
        name,
        {
            "phase": "Pending",
            "startTime": now(),
            "initContainerStatuses": [
                container_state(each["name"], state(each))
                for each in pod["spec"].get("initContainers", ())
            ],
            "containerStatuses": [
                container_state(each["name"], state(each)) for each in pod["spec"]["containers"]
            ],
        },
    )


def finish_deletion(api: Any, namespace: str, name: str) -> None:
    """A deleted pod goes, as when its kubelet has ended its containers."""
    api.request(
        "DELETE",
        f"/api/v1/namespaces/{namespace}/pods/{name}",
        {"gracePeriodSeconds": 0, "kind": "DeleteOptions", "apiVersion": "v1"},
    )
