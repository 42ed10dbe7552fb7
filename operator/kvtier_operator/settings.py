"""Settings of the operator: a YAML file that the chart writes and the operator reads at start.

Field names are camelCase, as in policies; unknown fields are errors. A change needs a restart,
which the chart triggers with a checksum in the pods' annotations.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from kvtier.errors import ConfigurationError
from kvtier.listening import EVERY_ADDRESS
from kvtier_operator.api.allowlist import AllowedVolume, PolicyBounds
from kvtier_operator.api.names import INJECT_LABEL
from kvtier_operator.api.selector import LabelSelector

DEFAULT_FILE = Path("/etc/kvtier-operator/settings.yaml")


class Section(BaseModel):
    """Base of all sections: frozen, camelCase, no unknown fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )


class PullPolicy(StrEnum):
    """``imagePullPolicy`` of injected containers."""

    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"
    ALWAYS = "Always"


class Images(Section):
    """Images of injected containers, by digest in releases.

    ``pull_secret`` must exist in the pods' namespaces.
    """

    payload: str = "kvtier/payload:dev"
    tierd: str = "kvtier/payload:dev"
    pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    pull_secret: str = ""


class Storage(Section):
    """What the operator may create.

    Without ``create_volumes`` an NFS tier needs an existing claim.
    """

    create_volumes: bool = False


class RolloutSettings(Section):
    """Whether the operator may patch workloads for ``rollout.strategy: RestartWorkloads``."""

    enabled: bool = False


class CertificateMode(StrEnum):
    """Source of the webhook's certificate: a mounted directory (such as cert-manager's), or
    created and rotated by the operator."""

    MOUNTED = "Mounted"
    SELF_MANAGED = "SelfManaged"


class Certificates(Section):
    """``directory`` has ``tls.crt``, ``tls.key`` and, if mounted, ``ca.crt``. Self-managed
    certificates are stored in the Secret ``secret_name`` of the operator's namespace, and their CA
    in the ``caBundle`` of the named configurations.
    """

    mode: CertificateMode = CertificateMode.SELF_MANAGED
    directory: Path = Path("/etc/kvtier-operator/certificates")
    secret_name: str = "kvtier-webhook-certificates"  # noqa: S105  (a name)
    service_name: str = "kvtier-webhook"
    extra_names: tuple[str, ...] = ()
    """DNS names and addresses of the webhook beside those of its Service."""
    mutating_configuration: str = "kvtier"
    validating_configuration: str = "kvtier"
    lifetime_seconds: Annotated[int, Field(ge=60)] = 90 * 24 * 3600
    renew_before_seconds: Annotated[int, Field(ge=10)] = 30 * 24 * 3600


class Webhook(Section):
    """The admission server. ``port`` 0: any free port."""

    host: str = EVERY_ADDRESS
    """The API server is on another host."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 9443
    drain_seconds: Annotated[float, Field(ge=0, le=60)] = 5
    """How long the server serves after SIGTERM, until every API server uses another replica."""
    namespace_selector: LabelSelector = LabelSelector.model_validate(
        {"matchLabels": {INJECT_LABEL: "enabled"}}
    )
    """Namespaces in which the API server calls the webhook for pods, as the webhook configuration
    has it."""
    certificates: Certificates = Certificates()


class LeaderElection(Section):
    """Leader election among the controller's replicas.

    Another replica takes over at most ``lease_seconds + 2 * retry_seconds`` after the leader was
    killed. If ``enabled`` is false, run only one replica.
    """

    enabled: bool = True
    lease_seconds: Annotated[int, Field(ge=5, le=300)] = 10
    renew_deadline_seconds: Annotated[float, Field(ge=2)] = 6
    retry_seconds: Annotated[float, Field(ge=1)] = 2

    @model_validator(mode="after")
    def _ordered(self) -> LeaderElection:
        if not 1.2 * self.retry_seconds < self.renew_deadline_seconds < self.lease_seconds - 1:
            raise ValueError(
                "renewDeadlineSeconds must be more than 1.2 * retrySeconds, and less than "
                "leaseSeconds - 1"
            )
        return self


class ControllerSettings(Section):
    """Periods and bounds of the controller."""

    resync_seconds: Annotated[float, Field(gt=0)] = 300
    poll_seconds: Annotated[float, Field(gt=0)] = 30
    """Interval of polling /status of each attached pod."""
    poll_timeout_seconds: Annotated[float, Field(gt=0)] = 3
    poll_concurrency: Annotated[int, Field(ge=1, le=256)] = 16
    status_bytes_seconds: Annotated[float, Field(gt=0)] = 300
    """Minimum interval of writing bytes and percentages to a status.

    Conditions, states and pod counts are written at once.
    """
    max_reconciles_per_second: Annotated[float, Field(gt=0)] = 20
    leader_election: LeaderElection = LeaderElection()


class MonitoringSettings(Section):
    """The HTTP server of the operator: /metrics, /healthz, /readyz."""

    host: str = EVERY_ADDRESS
    """The kubelet and Prometheus use other addresses than the loopback interface's."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 9402


class Settings(Section):
    """All settings. ``namespace``: of the operator. ``watch_namespaces``: empty means all."""

    namespace: str = "kvtier-system"
    watch_namespaces: tuple[str, ...] = ()
    images: Images = Images()
    storage: Storage = Storage()
    rollout: RolloutSettings = RolloutSettings()
    allowed_volumes: tuple[AllowedVolume, ...] = ()
    policy_bounds: PolicyBounds = Field(default_factory=lambda: PolicyBounds.model_validate({}))
    webhook: Webhook = Webhook()
    controller: ControllerSettings = ControllerSettings()
    monitoring: MonitoringSettings = MonitoringSettings()
    cluster_domain: str = "cluster.local"


def load(path: Path = DEFAULT_FILE) -> Settings:
    """Reads the file, or returns the defaults if it does not exist.

    Raises ``ConfigurationError``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Settings()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(str(path), str(error), "must be a readable YAML file") from error
    try:
        return Settings.model_validate(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        raise ConfigurationError(str(path), str(error).splitlines()[0], "must be YAML") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(
            f"{path}: {field}",
            str(first.get("input")),
            str(first["msg"]).removeprefix("Value error, "),
        ) from error
