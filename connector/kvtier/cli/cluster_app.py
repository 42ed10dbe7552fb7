"""The commands that read a cluster or this machine: ``top``, ``why``, ``plan`` and ``doctor``.

As ``kubectl-kvtier`` on PATH they are ``kubectl kvtier top`` and so on. Packages for the cluster
are imported only by the commands that need them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvtier.cli.console import console, print_json
from kvtier.cli.doctor import findings
from kvtier.cli.doctor import local as doctor_local
from kvtier.cli.inputs import CommandError, OptionError, load_policies, parse_size

if TYPE_CHECKING:
    from kvtier.cli.cluster.access import ClusterOptions, ClusterReader

URL = re.compile(r"https?://[^/\s]+", re.IGNORECASE)
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
MAX_NAME = 253
MAX_TOKEN_BYTES = 4_096
MIN_INTERVAL = 0.5
Result = TypeVar("Result")


class OutputFormat(StrEnum):
    """Format of the output."""

    TEXT = "text"
    JSON = "json"


Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="The kubeconfig. Default: KUBECONFIG, ~/.kube/config, or the pod's."
    ),
]
Context = Annotated[
    str | None, typer.Option(metavar="NAME", help="The context. Default: the current one.")
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="The namespace. Default: the context's."),
]
OperatorNamespace = Annotated[
    str, typer.Option(help="The namespace of the operator, whose settings are read.")
]
Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="Format of the output.")]
DEFAULT_OPERATOR_NAMESPACE = "kvtier-system"


def add_commands(app: typer.Typer) -> None:
    """Adds the commands to ``kvtier``."""
    for command in (top, why, plan, doctor):
        app.command()(command)


def top(
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only engines of this policy.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit. The default in a pipe.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=MIN_INTERVAL, metavar="SECONDS", help="Between refreshes.")
    ] = 2.0,
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="A tierd outside Kubernetes, as http://HOST:PORT; repeatable."
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --url: file with the bearer token.")
    ] = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Show the tiers of running engines: state, use, and share of the prompts that they served.

    Needs the rights to list kvtierpolicies and pods, to get the Secret POLICY-token, and to get
    pods/proxy. With --url it needs no cluster.
    """
    follow = not once and output is OutputFormat.TEXT and sys.stdout.isatty()
    if url:
        _top_of_urls(url, token_file, interval if follow else None, output)
        return
    options = _options(kubeconfig, context, namespace)

    def run() -> None:
        from kvtier.cli.cluster import top as view
        from kvtier.cli.cluster.reports import ProxiedStatus

        async def command(reader: ClusterReader) -> None:
            source = ProxiedStatus(reader)

            async def read() -> view.TopView:
                return await view.read_cluster(reader, source, policy)

            if follow:
                await view.follow(read, interval)
            else:
                _print(await read(), view.to_json, view.show, output)

        _on_cluster(options, command)

    _interruptible(run)


def _top_of_urls(
    urls: list[str], token_file: Path | None, interval: float | None, output: OutputFormat
) -> None:
    for each in urls:
        if not URL.match(each):
            raise OptionError("--url", each, "must have the form http://HOST:PORT")
    token = _token(token_file)

    def run() -> None:
        view = _cluster_module("top")

        async def read() -> Any:
            return await view.read_urls(urls, token)

        async def command() -> None:
            if interval is not None:
                await view.follow(read, interval)
            else:
                _print(await read(), view.to_json, view.show, output)

        asyncio.run(command())

    _interruptible(run)


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    with file.open("rb") as opened:
        content = opened.read(MAX_TOKEN_BYTES + 1)
    token = content.decode("latin-1").strip()
    if len(content) > MAX_TOKEN_BYTES or not token.isascii() or not token.isprintable():
        raise OptionError("--token-file", file, "must hold one bearer token")
    return token


def why(
    pod: Annotated[str, typer.Argument(metavar="POD", help="Name of the pod.")],
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    operator_namespace: OperatorNamespace = DEFAULT_OPERATOR_NAMESPACE,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Explain why a pod is or is not attached, and what would happen if it were created now.

    The answer is computed by the code of the controller and of the webhook. What may not be read is
    listed as "not checked", with the missing right.
    """
    options = _options(kubeconfig, context, namespace, operator_namespace)
    name = _pod_name(pod)

    async def command(reader: ClusterReader) -> Any:
        from kvtier.cli.cluster.reports import ProxiedStatus
        from kvtier.cli.cluster.why import explain_pod

        return await explain_pod(reader, name, ProxiedStatus(reader))

    found = _on_cluster(options, command)
    module = _cluster_module("why")
    _print(found, module.to_json, module.show, output)


def plan(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The policy file; - is standard input.")
    ],
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    operator_namespace: OperatorNamespace = DEFAULT_OPERATOR_NAMESPACE,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Show what applying a policy would do to running pods: live, outdated or restarted.

    Nothing is written. Exit status: 0 if the policies would be accepted; 2 if not.
    """
    policies = load_policies(file)
    module = _cluster_module("plan")
    options = _options(kubeconfig, context, namespace, operator_namespace)

    async def command(reader: ClusterReader) -> list[Any]:
        default, plans = reader.namespace, []
        for policy in policies:
            reader.namespace = module.policy_namespace(policy, namespace, default)
            reader.not_checked.clear()
            plans.append(await module.plan_policy(reader, policy))
        return plans

    plans = _on_cluster(options, command)
    if output is OutputFormat.JSON:
        print_json(module.to_json(plans))
    else:
        for each in plans:
            module.show(each)
    raise typer.Exit(2 if any(each.errors for each in plans) else 0)


def doctor(
    pod: Annotated[
        str | None,
        typer.Argument(metavar="[POD]", help="A pod. Default: this machine, or this pod."),
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The topology directory. Default: KVTIER_TOPOLOGY."),
    ] = None,
    path: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="A directory that a tier will use; repeatable."),
    ] = None,
    size: Annotated[
        str, typer.Option(help="Size of the file for the test of speed; 0: no test.")
    ] = "256Mi",
    seconds: Annotated[
        float, typer.Option(min=1, max=600, help="Time limit of the test of one directory.")
    ] = 30.0,
    inside: Annotated[
        bool, typer.Option(help="With POD: also run the checks inside the pod (exec).")
    ] = True,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    operator_namespace: OperatorNamespace = DEFAULT_OPERATOR_NAMESPACE,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Check a machine or a pod: shared and locked memory, mounts, direct I/O, speed, versions.

    Each finding has a severity and a remedy. Exit status: 0 without errors; 1 with one.
    """
    size_bytes = 0 if size in ("0", "0Mi", "0Gi") else parse_size("--size", size)
    not_checked: list[str] = []
    if pod is None:
        found = doctor_local.examine(
            doctor_local.DoctorOptions(topology, tuple(path or ()), size_bytes, seconds)
        )
    else:
        if path or topology is not None:
            raise OptionError("POD", pod, "must not be combined with --path or --topology")
        options = _options(kubeconfig, context, namespace, operator_namespace)
        name = _pod_name(pod)

        async def command(reader: ClusterReader) -> list[findings.Finding]:
            from kvtier.cli.cluster.doctor_pod import PodDoctorOptions, examine_pod
            from kvtier.cli.cluster.reports import ProxiedStatus

            pod_options = PodDoctorOptions(inside, size, seconds)
            result = await examine_pod(reader, name, ProxiedStatus(reader), pod_options)
            not_checked.extend(dict.fromkeys(reader.not_checked))
            return result

        found = _on_cluster(options, command)
    if output is OutputFormat.JSON:
        print_json(findings.to_json(found, not_checked))
    else:
        findings.show(found, not_checked)
    raise typer.Exit(findings.exit_status(found))


def _options(
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None,
    operator_namespace: str = DEFAULT_OPERATOR_NAMESPACE,
) -> ClusterOptions:
    for option, name in (
        ("--namespace", namespace),
        ("--operator-namespace", operator_namespace),
    ):
        if name is not None:
            _checked(option, name)
    options: ClusterOptions = _cluster_module("access").ClusterOptions(
        kubeconfig, context, namespace, operator_namespace
    )
    return options


def _pod_name(text: str) -> str:
    """The name in ``POD`` or ``pod/POD``. Raises ``OptionError``."""
    return _checked("POD", text.removeprefix("pods/").removeprefix("pod/"))


def _checked(option: str, name: str) -> str:
    """A name as Kubernetes has them. It becomes a part of a path."""
    if not NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise OptionError(option, name, "must be a name of lower case letters, digits, - and .")
    return name


def _on_cluster(
    options: ClusterOptions, command: Callable[[ClusterReader], Awaitable[Result]]
) -> Result:
    result: Result = _cluster_module("access").run(options, command)
    return result


def _cluster_module(name: str) -> Any:
    """A module of ``kvtier.cli.cluster``. Raises ``CommandError`` if its packages are missing."""
    import importlib

    try:
        return importlib.import_module(f"kvtier.cli.cluster.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in ("kvtier", "kvtier_operator"):
            raise
        raise CommandError(
            "commands that read a cluster need packages that are not installed: install "
            f"kvtier[operator] ({error})"
        ) from error


def _print(
    found: Result,
    to_json: Callable[[Result], dict[str, Any]],
    show: Callable[[Result], None],
    output: OutputFormat,
) -> None:
    if output is OutputFormat.JSON:
        print_json(to_json(found))
    else:
        show(found)


def _interruptible(run: Callable[[], None]) -> None:
    """Ctrl-C ends a live view without a traceback."""
    with contextlib.suppress(KeyboardInterrupt):
        run()
        return
    console().print()
