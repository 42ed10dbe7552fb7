"""Reading what is named on a command line.

`kvtier render --topology`: a policy as a topology directory on this machine, without a cluster.

Policies for connectors other than KVTier's own, as `kvtier render` answers for their engines.

`kvtier render`: one request, one answer in two forms (text for people and shells, a document for programs).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvtier.config import writer
from kvtier.config.models import Daemon, HttpEndpoint, Structural, Topology
from kvtier.errors import ConfigurationError
from kvtier.tierd.run_directory import RunDirectory
from kvtier_operator.api.documents import MAX_FILE_BYTES, parse
from kvtier_operator.api.engine import Connector
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.validation import InvalidDocumentError
from kvtier_operator.render import connectors, documents, engine
from kvtier_operator.render.documents import (
    Placement,
    local_run_directory,
    local_tier_paths,
    pod_placement,
    structural,
    topology,
)
from kvtier_operator.render.engine import attaching_variables

STANDARD_INPUT = "-"


def read(name: str) -> bytes:
    """A file's content, or standard input's for ``-``; at most one byte more than is accepted. Raises ``OSError``."""
    if name == STANDARD_INPUT:
        return sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    with Path(name).open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def shown_name(name: str) -> str:
    """The file's name as messages show it."""
    return "standard input" if name == STANDARD_INPUT else name


TIERS_DIRECTORY = "tiers"
"""Below the topology directory: file tiers whose volume only a pod would bring along."""


@dataclass(frozen=True, slots=True)
class Written:
    """A topology on disk: its absolute directory, the documents, and what a pod would have got otherwise."""

    directory: Path
    topology: Topology
    notes: tuple[str, ...]


def place(
    policy: KVTierPolicy,
    directory: Path | str,
    *,
    tier_paths: Mapping[str, str] | None = None,
    run_directory: str | None = None,
    http: HttpEndpoint | None = None,
    daemon: Daemon = Daemon.ENGINE,
    generation: int = 0,
) -> Written:
    """The topology that ``write`` would write. Raises ``ConfigurationError``.

    ``daemon`` is Engine unless asked otherwise: on a plain machine there is no sidecar. Files keep the user's group
    unless the policy names one.
    """
    target = Path(directory).absolute()
    overrides = {name: str(Path(path).absolute()) for name, path in (tier_paths or {}).items()}
    paths, notes = local_tier_paths(policy, overrides, str(target / TIERS_DIRECTORY))
    security = policy.spec.security
    placement = Placement(
        run_directory=str(Path(run_directory).absolute())
        if run_directory
        else local_run_directory(policy, os.getuid()),
        tier_paths=paths,
        http=http or HttpEndpoint(),
        daemon=daemon,
        storage_gid=security.storage_gid if "storage_gid" in security.model_fields_set else None,
        secrets_directory=str(target / "secrets"),
    )
    RunDirectory(
        placement.run_directory, shared=daemon is Daemon.SIDECAR
    )  # refuses what no engine could use
    return Written(target, topology(policy, placement, generation), tuple(notes))


def write(
    policy: KVTierPolicy,
    directory: Path | str,
    *,
    tier_paths: Mapping[str, str] | None = None,
    run_directory: str | None = None,
    http: HttpEndpoint | None = None,
    daemon: Daemon = Daemon.ENGINE,
    generation: int = 0,
) -> Written:
    """Writes structural.json and live.json into ``directory``. Raises ``ConfigurationError`` and ``OSError``."""
    placed = place(
        policy,
        directory,
        tier_paths=tier_paths,
        run_directory=run_directory,
        http=http,
        daemon=daemon,
        generation=generation,
    )
    writer.write(placed.directory, placed.topology)
    own = placed.directory / TIERS_DIRECTORY
    if any(
        getattr(tier, "path", "").startswith(f"{own}/") for tier in placed.topology.structural.tiers
    ):
        # tierd makes a tier's directory but not its parent: where a mount is missing, that would be the wrong disk.
        own.mkdir(exist_ok=True)
    return placed


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """What is rendered, and what a person should know about it."""

    rendered: connectors.Rendered
    hash_seed: str
    notes: tuple[str, ...]

    def variables(self, payload: str | None, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment that configures an engine whose command stays as it is."""
        return {
            connectors.TRANSFER_CONFIG_VARIABLE: self.rendered.transfer_config_text,
            **self.rendered.environment,
            **attaching_variables(self.hash_seed, payload, inherited),
        }


def other_engine(policy: KVTierPolicy) -> OtherEngine:
    """The configuration with paths as in pods. Raises ``ConfigurationError``."""
    ranks = policy.spec.engine.local_ranks
    rendered = connectors.render(policy, dict(pod_placement(policy).tier_paths), ranks or 1)
    notes = [refusal.message for refusal in connectors.unsupported_fields(policy)]
    if ranks is None:
        notes.append("spec.engine.localRanks is not set: sizes per rank are for one rank")
    return OtherEngine(rendered, policy.spec.engine.hash_seed, tuple(notes))


class _Dumper(yaml.SafeDumper):
    """Writes documents inside documents as blocks that people can read."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True, slots=True)
class Request:
    """The options of the command, as given."""

    file: str
    policy: str | None = None
    topology: Path | None = None
    engine_args: bool = False
    engine_env: bool = False
    payload: Path | None = None
    env: tuple[str, ...] = ()
    tier_paths: tuple[str, ...] = ()
    run_directory: Path | None = None
    http: str | None = None
    daemon: Daemon | None = None
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Rendered:
    """The answer: ``text`` or, for programs, ``document``; ``notes`` are for people and go to standard error."""

    text: str
    document: Any
    notes: tuple[str, ...] = ()


def render(request: Request) -> Rendered:
    """Does what was asked for. Raises ``ConfigurationError`` (refused) and ``OSError`` (files)."""
    policies = chosen_policies(request.file, request.policy)
    _check_options(request)
    if request.topology is None and not request.engine_args and not request.engine_env:
        rendered = [
            document
            for policy in policies
            for document in documents.kubernetes(policy, request.generation)
        ]
        text = yaml.dump_all(
            rendered, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True
        )
        return Rendered(text, {"apiVersion": "v1", "kind": "List", "items": rendered})
    return _for_engine(request, chosen_policy(request.file, request.policy))


def chosen_policies(file: str, name: str | None) -> list[KVTierPolicy]:
    """The policies of a file, all or those of that name. Raises ``ConfigurationError`` (refused) and ``OSError``."""
    checked = parse(read(file))
    errors = [error for entry in checked for error in entry.errors]
    if errors:
        raise InvalidDocumentError(errors)
    policies = [entry.policy for entry in checked if entry.policy is not None]
    if name is None:
        return policies
    chosen = [policy for policy in policies if policy.metadata.name == name]
    if not chosen:
        raise ConfigurationError(
            "--policy", name, "one of " + ", ".join(policy.metadata.name for policy in policies)
        )
    return chosen


def chosen_policy(file: str, name: str | None) -> KVTierPolicy:
    """The one policy that a file holds, or that was chosen by name."""
    policies = chosen_policies(file, name)
    if len(policies) != 1:
        names = ", ".join(policy.metadata.name for policy in policies)
        raise ConfigurationError(
            file, names, "one policy, chosen with --policy NAME, is rendered at a time"
        )
    return policies[0]


def _check_options(request: Request) -> None:
    if request.engine_args and request.engine_env:
        raise ConfigurationError(
            "--engine-args", "--engine-env", "one of the two attaches an engine"
        )
    if request.topology is None:
        for option, given in (
            ("--tier-path", request.tier_paths),
            ("--run-directory", request.run_directory),
            ("--http", request.http),
            ("--daemon", request.daemon),
        ):
            if given:
                shown = " ".join(given) if isinstance(given, tuple) else str(given)
                raise ConfigurationError(option, shown, "it is for --topology DIR")
    if not request.engine_env and (request.env or request.payload is not None):
        option, value = (
            ("--env", request.env[0]) if request.env else ("--payload", str(request.payload))
        )
        raise ConfigurationError(option, value, "it is for --engine-env")


def _for_engine(request: Request, policy: KVTierPolicy) -> Rendered:
    if policy.spec.engine.connector is not Connector.KVTIER:
        return _for_other_connector(request, policy)
    if request.engine_args or request.engine_env:
        engine.check(policy)
    notes: list[str] = []
    if request.topology is not None:
        written = write(
            policy,
            request.topology,
            tier_paths=_pairs("--tier-path", request.tier_paths),
            run_directory=str(request.run_directory) if request.run_directory is not None else None,
            http=_endpoint(request.http),
            daemon=request.daemon or Daemon.ENGINE,
            generation=request.generation,
        )
        notes += written.notes
        directory, document = str(written.directory), written.topology.structural
        if not request.engine_args and not request.engine_env:
            return Rendered(
                f"{written.directory}",
                {"directory": directory, **written.topology.model_dump(mode="json", by_alias=True)},
                tuple(notes),
            )
    else:
        directory, document = (
            documents.POD_TOPOLOGY_DIRECTORY,
            structural(policy, pod_placement(policy), request.generation),
        )
    if request.engine_args:
        arguments = engine.arguments(directory)
        return Rendered(shlex.join(arguments), arguments, tuple(notes))
    return _environment(request, document, directory, notes)


def _for_other_connector(request: Request, policy: KVTierPolicy) -> Rendered:
    if request.topology is not None:
        raise ConfigurationError(
            "--topology", str(request.topology), "KVTier's own connector is what reads a topology"
        )
    found = other_engine(policy)
    if request.engine_args:
        arguments = found.rendered.arguments()
        words = [
            f"{name}={shlex.quote(value)}" for name, value in found.rendered.environment.items()
        ]
        notes = (f"in the engine's environment: {' '.join(words)}",) if words else ()
        return Rendered(shlex.join(arguments), arguments, (*found.notes, *notes))
    payload = str(request.payload.absolute()) if request.payload is not None else None
    variables = found.variables(payload, _inherited(request.env))
    return Rendered(
        "\n".join(f"{name}={value}" for name, value in variables.items()), variables, found.notes
    )


def _environment(
    request: Request, document: Structural, directory: str, notes: list[str]
) -> Rendered:
    inherited = _inherited(request.env)
    payload = str(request.payload.absolute()) if request.payload is not None else None
    if request.payload is not None and not (request.payload / "kvtier").is_dir():
        notes.append(
            f"{request.payload} holds no connector on this machine; kvtier payload {request.payload} writes it"
        )
    variables = engine.environment(document, directory, payload, inherited)
    notes += engine.conflicts(document, inherited)
    for name, value in variables.items():
        if "\n" in value:
            raise ConfigurationError(name, value, "a value without line ends")
    return Rendered(
        "\n".join(f"{name}={value}" for name, value in variables.items()), variables, tuple(notes)
    )


def _pair(option: str, given: str) -> tuple[str, str]:
    name, separator, value = given.partition("=")
    if not separator or not name or not value:
        raise ConfigurationError(option, given, "NAME=DIR is the form")
    return name, value


def _pairs(option: str, given: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for entry in given:
        name, value = _pair(option, entry)
        if name in pairs:
            raise ConfigurationError(option, entry, f"{name} once; it is {pairs[name]} already")
        pairs[name] = value
    return pairs


def _inherited(given: tuple[str, ...]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for entry in given:
        name, separator, value = entry.partition("=")
        if not name:
            raise ConfigurationError("--env", entry, "KEY=VALUE or KEY is the form")
        if separator:
            variables[name] = value
        elif name in os.environ:
            variables[name] = os.environ[name]
    return variables


def _endpoint(given: str | None) -> HttpEndpoint | None:
    if given is None:
        return None
    host, separator, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise ConfigurationError(
            "--http", given, "HOST:PORT is the form, such as 127.0.0.1:9400 or [::1]:0"
        )
    return HttpEndpoint(host=host, port=int(port))
