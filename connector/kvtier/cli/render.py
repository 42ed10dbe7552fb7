"""``kvtier render``: renders a policy without a cluster.

Three outputs: the Kubernetes documents for clusters without the operator, a topology directory for
engines on this machine, and the arguments or the environment that attach an engine. Each has two
forms: text for people and shells, and a document for programs.

Needs neither typer nor rich, so that the demo can use it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvtier.cli.inputs import (
    OptionError,
    load_policies,
    only_policy,
    parse_assignment,
    parse_endpoint,
)
from kvtier.config import writer
from kvtier.config.models import Daemon, FileSystemTierDocument, HttpEndpoint, Structural, Topology
from kvtier.tierd.run_directory import RunDirectory
from kvtier_operator.api.engine import Connector, EngineType
from kvtier_operator.api.policy import KVTierPolicy
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

TIERS_DIRECTORY = "tiers"
"""Below the topology directory: file tiers whose volume exists only in pods."""


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """The options of the command, unparsed."""

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
class RenderResult:
    """``text`` for people and shells, ``document`` for programs. ``notes`` go to standard error."""

    text: str
    document: Any
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Where a topology on this machine differs from one in a pod.

    ``tier_paths`` are directories of file tiers by name. Without a sidecar on a plain machine,
    the engine starts tierd.
    """

    tier_paths: Mapping[str, str] = field(default_factory=dict)
    run_directory: str | None = None
    http: HttpEndpoint | None = None
    daemon: Daemon = Daemon.ENGINE
    generation: int = 0


@dataclass(frozen=True, slots=True)
class LocalTopology:
    """A topology on this machine: its absolute directory, and notes about differences to a pod."""

    directory: Path
    topology: Topology
    notes: tuple[str, ...]


def render(options: RenderOptions) -> RenderResult:
    """Renders what the options select. Raises ``ConfigurationError`` and ``OSError``."""
    policies = load_policies(options.file, options.policy)
    _check_combination(options)
    if options.topology is None and not options.engine_args and not options.engine_env:
        return _render_kubernetes(policies, options.generation)
    policy = only_policy(options.file, policies)
    if policy.spec.engine.connector is not Connector.KVTIER:
        return _render_other_connector(options, policy)
    return _render_engine(options, policy)


def place_topology(
    policy: KVTierPolicy, directory: Path | str, options: LocalOptions = LocalOptions()
) -> LocalTopology:
    """The topology that ``write_topology`` would write. Raises ``ConfigurationError``.

    Files keep the group of the user unless the policy sets one.
    """
    target = Path(directory).absolute()
    overrides = {name: str(Path(path).absolute()) for name, path in options.tier_paths.items()}
    paths, notes = local_tier_paths(policy, overrides, str(target / TIERS_DIRECTORY))
    security = policy.spec.security
    placement = Placement(
        run_directory=str(Path(options.run_directory).absolute())
        if options.run_directory
        else local_run_directory(policy, os.getuid()),
        tier_paths=paths,
        http=options.http or HttpEndpoint(),
        daemon=options.daemon,
        storage_gid=security.storage_gid if "storage_gid" in security.model_fields_set else None,
        secrets_directory=str(target / "secrets"),
    )
    # Raises if no engine could use the run directory.
    RunDirectory(placement.run_directory, shared=options.daemon is Daemon.SIDECAR)
    return LocalTopology(target, topology(policy, placement, options.generation), tuple(notes))


def write_topology(
    policy: KVTierPolicy, directory: Path | str, options: LocalOptions = LocalOptions()
) -> LocalTopology:
    """Writes structural.json and live.json. Raises ``ConfigurationError`` and ``OSError``."""
    placed = place_topology(policy, directory, options)
    writer.write(placed.directory, placed.topology)
    tiers = placed.directory / TIERS_DIRECTORY
    for tier in placed.topology.structural.tiers:
        for each in tier.directories if isinstance(tier, FileSystemTierDocument) else ():
            if each.path.startswith(f"{tiers}/"):
                # tierd creates the directory itself but not its parent, which may be a missing
                # mount.
                Path(each.path).parent.mkdir(parents=True, exist_ok=True)
    return placed


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings, such as embedded documents, as block scalars."""


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_string)


def _check_combination(options: RenderOptions) -> None:
    if options.engine_args and options.engine_env:
        raise OptionError("--engine-args", "true", "must not be combined with --engine-env")
    if options.topology is None:
        for option, value in (
            ("--tier-path", " ".join(options.tier_paths)),
            ("--run-directory", options.run_directory),
            ("--http", options.http),
            ("--daemon", options.daemon),
        ):
            if value:
                raise OptionError(option, value, "requires --topology")
    if not options.engine_env:
        for option, value in (("--env", " ".join(options.env)), ("--payload", options.payload)):
            if value:
                raise OptionError(option, value, "requires --engine-env")


def _render_kubernetes(policies: list[KVTierPolicy], generation: int) -> RenderResult:
    items = [
        document for policy in policies for document in documents.kubernetes(policy, generation)
    ]
    text = yaml.dump_all(items, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return RenderResult(text, {"apiVersion": "v1", "kind": "List", "items": items})


def _render_engine(options: RenderOptions, policy: KVTierPolicy) -> RenderResult:
    if options.engine_args or options.engine_env:
        engine.check(policy)
    if options.topology is None:
        document = structural(policy, pod_placement(policy), options.generation)
        return _render_attachment(options, document, documents.POD_TOPOLOGY_DIRECTORY, ())
    written = write_topology(policy, options.topology, _local_options(options))
    directory = str(written.directory)
    if options.engine_args or options.engine_env:
        document = written.topology.structural
        return _render_attachment(options, document, directory, written.notes)
    content = written.topology.model_dump(mode="json", by_alias=True)
    return RenderResult(directory, {"directory": directory, **content}, written.notes)


def _local_options(options: RenderOptions) -> LocalOptions:
    return LocalOptions(
        tier_paths=_parse_tier_paths(options.tier_paths),
        run_directory=str(options.run_directory) if options.run_directory is not None else None,
        http=parse_endpoint("--http", options.http) if options.http is not None else None,
        daemon=options.daemon or Daemon.ENGINE,
        generation=options.generation,
    )


def _render_attachment(
    options: RenderOptions, document: Structural, directory: str, notes: tuple[str, ...]
) -> RenderResult:
    """The arguments or the environment that attach an engine to the topology in ``directory``."""
    if options.engine_args:
        arguments = engine.arguments(directory, EngineType(document.engine_type))
        return RenderResult(shlex.join(arguments), arguments, notes)
    inherited = _parse_environment(options.env)
    variables = engine.environment(document, directory, _payload(options), inherited)
    added = list(notes)
    payload = options.payload
    if payload is not None and not (payload / "kvtier").is_dir():
        added.append(
            f"{payload} contains no connector on this machine; run: kvtier payload {payload}"
        )
    added += engine.conflicts(document, inherited)
    for name, value in variables.items():
        if "\n" in value:
            raise OptionError(name, value, "must not contain a newline")
    return RenderResult(_assignments(variables), variables, tuple(added))


def _render_other_connector(options: RenderOptions, policy: KVTierPolicy) -> RenderResult:
    """The configuration of vLLM's or LMCache's connector, with paths as in pods."""
    if options.topology is not None:
        connector = policy.spec.engine.connector.value
        requirement = f"must not be set for connector {connector}, which reads no topology"
        raise OptionError("--topology", options.topology, requirement)
    ranks = policy.spec.engine.local_ranks
    rendered = connectors.render(policy, dict(pod_placement(policy).tier_paths), ranks or 1)
    notes = [gap.message for gap in connectors.unsupported_fields(policy)]
    if ranks is None:
        notes.append("spec.engine.localRanks is not set: sizes per rank assume one rank")
    if options.engine_args:
        arguments = rendered.arguments()
        words = [f"{name}={shlex.quote(value)}" for name, value in rendered.environment.items()]
        if words:
            notes.append(f"also set in the environment of the engine: {' '.join(words)}")
        return RenderResult(shlex.join(arguments), arguments, tuple(notes))
    inherited = _parse_environment(options.env)
    variables = {
        connectors.TRANSFER_CONFIG_VARIABLE: rendered.transfer_config_text,
        **rendered.environment,
        **attaching_variables(policy.spec.engine.hash_seed, _payload(options), inherited),
    }
    return RenderResult(_assignments(variables), variables, tuple(notes))


def _payload(options: RenderOptions) -> str | None:
    return str(options.payload.absolute()) if options.payload is not None else None


def _assignments(variables: Mapping[str, str]) -> str:
    return "\n".join(f"{name}={value}" for name, value in variables.items())


def _parse_tier_paths(texts: tuple[str, ...]) -> dict[str, str]:
    paths: dict[str, str] = {}
    for text in texts:
        name, path = parse_assignment("--tier-path", text, "NAME=DIR")
        if name in paths:
            requirement = f"must set each tier once; {name} is already set to {paths[name]}"
            raise OptionError("--tier-path", text, requirement)
        paths[name] = path
    return paths


def _parse_environment(texts: tuple[str, ...]) -> dict[str, str]:
    """``KEY=VALUE``, or ``KEY`` for the value in this process's environment, if it is set."""
    variables: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not name:
            raise OptionError("--env", text, "must have the form KEY=VALUE or KEY")
        if separator:
            variables[name] = value
        elif name in os.environ:
            variables[name] = os.environ[name]
    return variables
