"""Ports of tierd's HTTP server in pods that share the node's network (``hostNetwork``). Pure.

Such a pod must not declare the port: a declared port is the node's, so the scheduler would keep
pods with the same template apart, and a rolling update with as many replicas as nodes would never
end. tierd and the operator derive the same few ports from the pod's uid instead.
"""

from __future__ import annotations

import hashlib

HOST_POD_VARIABLE = "KVTIER_HOST_NETWORK_POD"
"""The uid of a pod with ``hostNetwork``, in the container that runs tierd."""
HOST_PORTS = range(20_000, 30_000)
"""Below the ports that Kubernetes gives to NodePorts, and those that Linux gives to clients."""
CANDIDATES = 4
"""Ports of one pod. Two of sixteen pods on a node have the same first port in one of 83 nodes."""


def host_ports(pod_uid: str) -> tuple[int, ...]:
    """The ports of a pod, in the order in which they are tried.

    The first is 20000 plus what the relabeling action ``hashmod`` of Prometheus gives for the uid
    with modulus 10000, so that a scrape configuration can find it.
    """
    digest = hashlib.md5(pod_uid.encode(), usedforsecurity=False).digest()
    first = int.from_bytes(digest[8:], "big")
    size = len(HOST_PORTS)
    return tuple(HOST_PORTS[(first + step) % size] for step in range(CANDIDATES))
