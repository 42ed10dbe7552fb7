"""Pods, decoded once into the fields that KVTier reads.

``decode_pod`` takes a pod as the API server writes it, as JSON or as a parsed document, and returns
frozen structs with the names of the Kubernetes API in snake case. Fields that KVTier does not read
are ignored. A field that is missing or null has its default. A field of another type than the API's
raises ``InvalidObjectError``. All functions are pure and thread-safe.

A ``Pod`` is for reading only. The webhook's patch is made on the parsed document, so that it keeps
every field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

Decoded = TypeVar("Decoded", bound=msgspec.Struct)
ResourceList = Mapping[str, str | int | float]
"""Quantities by resource name. The API server writes strings; documents that people write may have
numbers."""
_POSITION = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)


class InvalidObjectError(ValueError):
    """The document does not have the form of the Kubernetes API. The message names the field and
    the type that it must have.
    """


class ApiObject(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of the structs that documents of the Kubernetes API are decoded into: immutable, camel
    case in documents.
    """


class Presence(ApiObject, frozen=True):
    """An object of which KVTier reads only whether it is there."""


class OwnerReference(ApiObject, frozen=True):
    """An owner of the pod. ``controller``: the owner manages the pod."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class PodMetadata(ApiObject, frozen=True):
    """``metadata``. Times are text as Kubernetes writes it. ``name`` and ``namespace`` are empty
    while the API server has not set them.
    """

    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    owner_references: tuple[OwnerReference, ...] = ()
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    finalizers: tuple[str, ...] = ()


class ResourceRequirements(ApiObject, frozen=True):
    """``resources`` of a container or of the pod."""

    requests: ResourceList = msgspec.field(default_factory=dict)
    limits: ResourceList = msgspec.field(default_factory=dict)
    claims: tuple[Presence, ...] = ()


class SecurityContext(ApiObject, frozen=True):
    """``securityContext`` of a container, or of the pod."""

    run_as_user: int | None = None
    run_as_group: int | None = None
    run_as_non_root: bool | None = None
    se_linux_options: Mapping[str, str] | None = None
    supplemental_groups: tuple[int, ...] = ()


class EnvVar(ApiObject, frozen=True):
    """A variable. ``value_from`` is None if the value is in the pod."""

    name: str = ""
    value: str = ""
    value_from: Presence | None = None


class ContainerPort(ApiObject, frozen=True):
    """A port of a container."""

    name: str = ""
    container_port: int = 0
    host_port: int = 0


class VolumeMount(ApiObject, frozen=True):
    """A mount of a container."""

    name: str = ""
    mount_path: str = ""
    read_only: bool = False


class Container(ApiObject, frozen=True):
    """A container, or an init container."""

    name: str = ""
    image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()
    env_from: tuple[Presence, ...] = ()
    ports: tuple[ContainerPort, ...] = ()
    resources: ResourceRequirements = ResourceRequirements()
    volume_mounts: tuple[VolumeMount, ...] = ()
    security_context: SecurityContext = SecurityContext()
    restart_policy: str = ""

    @property
    def is_sidecar(self) -> bool:
        """Whether an init container keeps running beside the containers (a native sidecar)."""
        return self.restart_policy == "Always"


class ConfigMapSource(ApiObject, frozen=True):
    """A ConfigMap as a volume or as a part of a projected volume."""

    name: str = ""


class VolumeProjection(ApiObject, frozen=True):
    """A part of a projected volume."""

    config_map: ConfigMapSource | None = None


class ProjectedSource(ApiObject, frozen=True):
    """A projected volume."""

    sources: tuple[VolumeProjection, ...] = ()


class EmptyDirSource(ApiObject, frozen=True):
    """An ``emptyDir`` volume."""

    medium: str = ""
    size_limit: str | int | float | None = None


class HostPathSource(ApiObject, frozen=True):
    """A ``hostPath`` volume."""

    path: str = ""


class ClaimSource(ApiObject, frozen=True):
    """A ``persistentVolumeClaim`` volume."""

    claim_name: str = ""


class NfsSource(ApiObject, frozen=True):
    """An ``nfs`` volume."""

    server: str = ""
    path: str = ""


class ImageSource(ApiObject, frozen=True):
    """An ``image`` volume."""

    reference: str = ""


class PodVolume(ApiObject, frozen=True):
    """A volume. At most one source is set; all are None if it is one that KVTier does not read."""

    name: str = ""
    config_map: ConfigMapSource | None = None
    secret: Presence | None = None
    downward_api: Presence | None = msgspec.field(name="downwardAPI", default=None)
    projected: ProjectedSource | None = None
    image: ImageSource | None = None
    empty_dir: EmptyDirSource | None = None
    host_path: HostPathSource | None = None
    nfs: NfsSource | None = None
    ephemeral: Presence | None = None
    persistent_volume_claim: ClaimSource | None = None

    @property
    def is_read_only(self) -> bool:
        """Whether the kubelet mounts the source read-only, whatever the mount says."""
        sources = (self.config_map, self.secret, self.downward_api, self.projected, self.image)
        return any(source is not None for source in sources)


class Toleration(ApiObject, frozen=True):
    """A toleration."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class PodAffinityTerm(ApiObject, frozen=True):
    """A term of pod affinity or anti-affinity."""

    namespaces: tuple[str, ...] = ()
    namespace_selector: Presence | None = None


class WeightedPodAffinityTerm(ApiObject, frozen=True):
    """A preferred term of pod affinity or anti-affinity."""

    pod_affinity_term: PodAffinityTerm = PodAffinityTerm()


class PodAffinity(ApiObject, frozen=True):
    """Pod affinity or anti-affinity."""

    required: tuple[PodAffinityTerm, ...] = msgspec.field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=()
    )
    preferred: tuple[WeightedPodAffinityTerm, ...] = msgspec.field(
        name="preferredDuringSchedulingIgnoredDuringExecution", default=()
    )

    @property
    def terms(self) -> tuple[PodAffinityTerm, ...]:
        """All terms, required and preferred."""
        return (*self.required, *(weighted.pod_affinity_term for weighted in self.preferred))


class NodeSelectorRequirement(ApiObject, frozen=True):
    """A requirement of a label or field. ``operator``: In, NotIn, Exists, DoesNotExist, Gt, Lt."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class NodeSelectorTerm(ApiObject, frozen=True):
    """Requirements, all of which must match."""

    match_expressions: tuple[NodeSelectorRequirement, ...] = ()
    match_fields: tuple[NodeSelectorRequirement, ...] = ()


class NodeSelector(ApiObject, frozen=True):
    """Terms, one of which must match."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class NodeAffinity(ApiObject, frozen=True):
    """Node affinity, without preferences. ``required``: None if the pod has none."""

    required: NodeSelector | None = msgspec.field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=None
    )


class Affinity(ApiObject, frozen=True):
    """``affinity``."""

    node_affinity: NodeAffinity = NodeAffinity()
    pod_affinity: PodAffinity = PodAffinity()
    pod_anti_affinity: PodAffinity = PodAffinity()


class PodOS(ApiObject, frozen=True):
    """``os``."""

    name: str = ""


class LocalObjectReference(ApiObject, frozen=True):
    """The name of an object in the pod's namespace."""

    name: str = ""


class PodSpec(ApiObject, frozen=True):
    """``spec``. ``host_users`` is None if the pod does not set it."""

    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    volumes: tuple[PodVolume, ...] = ()
    resources: ResourceRequirements = ResourceRequirements()
    overhead: ResourceList = msgspec.field(default_factory=dict)
    node_name: str = ""
    node_selector: Mapping[str, str] = msgspec.field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    affinity: Affinity = Affinity()
    priority: int = 0
    priority_class_name: str = ""
    active_deadline_seconds: int | None = None
    restart_policy: str = ""
    host_network: bool = False
    host_ipc: bool = msgspec.field(name="hostIPC", default=False)
    host_users: bool | None = None
    os: PodOS = PodOS()
    security_context: SecurityContext = SecurityContext()
    image_pull_secrets: tuple[LocalObjectReference, ...] = ()

    @property
    def all_containers(self) -> tuple[Container, ...]:
        """Init containers, then containers."""
        return (*self.init_containers, *self.containers)


class PodCondition(ApiObject, frozen=True):
    """A condition of the pod."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class ContainerStateWaiting(ApiObject, frozen=True):
    """A container that does not run yet."""

    reason: str = ""
    message: str = ""


class ContainerStateRunning(ApiObject, frozen=True):
    """A container that runs."""

    started_at: str | None = None


class ContainerStateTerminated(ApiObject, frozen=True):
    """A container that ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""
    started_at: str | None = None
    finished_at: str | None = None


class ContainerState(ApiObject, frozen=True):
    """The state of a container; at most one is set."""

    waiting: ContainerStateWaiting | None = None
    running: ContainerStateRunning | None = None
    terminated: ContainerStateTerminated | None = None


class ContainerStatus(ApiObject, frozen=True):
    """What the kubelet reports about a container."""

    name: str = ""
    ready: bool = False
    started: bool = False
    restart_count: int = 0
    image: str = ""
    image_id: str = msgspec.field(name="imageID", default="")
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()

    @property
    def has_run(self) -> bool:
        """Whether the container has run at any time."""
        states = (self.state, self.last_state)
        ran = any(state.running is not None or state.terminated is not None for state in states)
        return ran or self.restart_count > 0


class PodStatus(ApiObject, frozen=True):
    """``status``."""

    phase: str = ""
    reason: str = ""
    message: str = ""
    start_time: str | None = None
    pod_ip: str = msgspec.field(name="podIP", default="")
    host_ip: str = msgspec.field(name="hostIP", default="")
    conditions: tuple[PodCondition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()

    def condition(self, kind: str) -> PodCondition | None:
        """The condition of that type, or None."""
        return next((each for each in self.conditions if each.type == kind), None)

    @property
    def all_container_statuses(self) -> tuple[ContainerStatus, ...]:
        """Of init containers, then of containers."""
        return (*self.init_container_statuses, *self.container_statuses)

    def container(self, name: str) -> ContainerStatus | None:
        """The status of the container or init container of that name, or None."""
        return next((each for each in self.all_container_statuses if each.name == name), None)


class Pod(ApiObject, frozen=True):
    """A pod."""

    metadata: PodMetadata = PodMetadata()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def controller(self) -> OwnerReference | None:
        """The owner that manages the pod, or None."""
        owners = self.metadata.owner_references
        return next((owner for owner in owners if owner.controller), None)

    @property
    def is_terminating(self) -> bool:
        """Whether the pod is being deleted."""
        return bool(self.metadata.deletion_timestamp)

    @property
    def has_ended(self) -> bool:
        """Whether all containers have ended and none will be restarted."""
        return self.status.phase in ("Succeeded", "Failed")


def decode_pod(document: bytes | Mapping[str, Any]) -> Pod:
    """The pod in a document: JSON as bytes, or a parsed mapping, which is not changed. Raises
    ``InvalidObjectError``.
    """
    return decode(document, Pod)


def decode(document: bytes | Mapping[str, Any], kind: type[Decoded]) -> Decoded:
    """Like ``decode_pod``, for any struct of this form, such as a pod's part. Raises
    ``InvalidObjectError``.
    """
    try:
        return _decode(document, kind)
    except msgspec.ValidationError:
        # Go writes null for empty lists without omitempty. It is rare, so documents are searched
        # for it only now.
        pass
    except msgspec.DecodeError as error:
        raise InvalidObjectError(f"the document is not JSON: {error}") from None
    try:
        parsed = msgspec.json.decode(document) if isinstance(document, bytes) else document
        return _decode(_without_nulls(parsed), kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidObjectError(_described(error)) from None


def _decode(document: Any, kind: type[Decoded]) -> Decoded:
    if isinstance(document, bytes):
        return msgspec.json.decode(document, type=kind)
    return msgspec.convert(document, kind)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = value.items()
        return {key: _without_nulls(item) for key, item in items if item is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value if item is not None]
    return value


def _described(error: Exception) -> str:
    """msgspec's message as a field error: the path first."""
    match = _POSITION.match(str(error))
    what, path = (match["what"], match["path"]) if match is not None else (str(error), None)
    what = what[:1].lower() + what[1:]
    field = (path or "").removeprefix("$").removeprefix(".")
    return f"{field}: Invalid value: {what}" if field else what
