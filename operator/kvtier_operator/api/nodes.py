"""Nodes, decoded into the fields that decide which pods they can run."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvtier_operator.api.pods import ApiObject, ResourceList, decode


class NodeMetadata(ApiObject, frozen=True):
    """``metadata`` of a node."""

    name: str = ""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)


class Taint(ApiObject, frozen=True):
    """A taint. ``effect``: NoSchedule, PreferNoSchedule or NoExecute."""

    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(ApiObject, frozen=True):
    """``spec`` of a node. ``unschedulable``: it is cordoned."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeInfo(ApiObject, frozen=True):
    """``status.nodeInfo``."""

    kubelet_version: str = ""


class NodeStatus(ApiObject, frozen=True):
    """``status`` of a node. ``allocatable``: what pods can use together."""

    allocatable: ResourceList = msgspec.field(default_factory=dict)
    node_info: NodeInfo = NodeInfo()


class Node(ApiObject, frozen=True):
    """A node."""

    metadata: NodeMetadata = NodeMetadata()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


def decode_node(document: Mapping[str, object]) -> Node:
    """The node in a document, which is not changed. Raises ``InvalidObjectError``."""
    return decode(document, Node)
