"""``kvtier doctor POD``: checks of a running pod, from its objects, its report and, through exec,
from inside its tierd container.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

import aiohttp

from kvtier import __version__
from kvtier.cli.cluster.access import ClusterReader, api_client, right
from kvtier.cli.cluster.reports import PodStatusSource, read_reports
from kvtier.cli.cluster.why import PodExplanation, explain_pod
from kvtier.cli.doctor.findings import Finding, Severity, from_json
from kvtier_operator.api.names import POLICY_ANNOTATION, TIERD_CONTAINER, VERSION_ANNOTATION
from kvtier_operator.api.pods import Pod, decode_pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.status import TierState
from kvtier_operator.api.stored import read_stored
from kvtier_operator.api.validation import InvalidDocumentError
from kvtier_operator.controller import objects
from kvtier_operator.controller.pods.pod_view import PodState
from kvtier_operator.controller.pods.reports import NO_REPORT, LastReport, PodReport
from kvtier_operator.injection.environment import SEED
from kvtier_operator.injection.resources import MEMORY, format_amount, parse_amounts
from kvtier_operator.kube.resources import NODES, PODS, POLICIES
from kvtier_operator.render.documents import POD_TOPOLOGY_DIRECTORY

EXEC_SECONDS = 120.0
MAX_OUTPUT = 1 << 20
EXEC_PROTOCOL = "v4.channel.k8s.io"
STANDARD_OUTPUT = b"\x01"
SEVERITIES = {
    PodState.ATTACHED.value: Severity.OK,
    PodState.STARTING.value: Severity.INFO,
    PodState.NOT_POLLED.value: Severity.INFO,
    PodState.UNREACHABLE.value: Severity.WARNING,
    "Finished": Severity.INFO,
    "Terminating": Severity.INFO,
}
"""Of a pod's state; every other is an error."""
INSIDE = ("kvtier", "doctor", "-o", "json", "--topology", POD_TOPOLOGY_DIRECTORY)
RunInside = Callable[[Pod, Sequence[str]], Awaitable[str]]


class ExecError(Exception):
    """The command could not be run in the pod; the message says why."""


@dataclass(frozen=True, slots=True)
class PodDoctorOptions:
    """``inside``: also check from inside the pod. ``size``: of the file for the test of speed."""

    inside: bool = True
    size: str = "64Mi"
    seconds: float = 30.0


async def examine_pod(
    reader: ClusterReader,
    name: str,
    source: PodStatusSource,
    options: PodDoctorOptions = PodDoctorOptions(),
    run_inside: RunInside | None = None,
) -> list[Finding]:
    """Checks one pod. Raises ``CommandError``; what may not be read is noted in the reader."""
    explained = await explain_pod(reader, name, source)
    pod = decode_pod(await reader.get(PODS, reader.namespace, name))
    found = list(_attachment(explained))
    policy = await _policy(reader, pod)
    last = NO_REPORT
    if policy is not None and not pod.has_ended:
        reports = await read_reports(reader, source, [pod], policy.metadata.name)
        last = reports.get(pod.metadata.uid, NO_REPORT)
    found += _versions(pod, last.report)
    found += await _node(reader, pod)
    if policy is not None:
        found += _seed(pod, policy)
        found += _memory(pod, policy)
    found += _reported(last)
    can_run = any(each.name == TIERD_CONTAINER for each in pod.spec.init_containers)
    if options.inside and can_run and not pod.has_ended:
        run = run_inside or exec_in(reader)
        found += await _inside(reader, pod, run, options)
    elif options.inside and not pod.has_ended:
        reader.not_checked.append(
            f"inside the pod: it has no container {TIERD_CONTAINER}; with engine.daemon: Engine, "
            f"run kvtier doctor --topology {POD_TOPOLOGY_DIRECTORY} in the engine's container"
        )
    return found


def _attachment(explained: PodExplanation) -> Iterator[Finding]:
    subject = f"pod {explained.pod}"
    severity = SEVERITIES.get(explained.state, Severity.ERROR)
    message = f"{explained.state} ({explained.reason}): {explained.message}"
    remedy = "" if severity is Severity.OK else f"kvtier why {explained.pod}"
    if explained.now is not None and explained.now.message:
        remedy = explained.now.message
    yield Finding("attached", severity, subject, message, remedy)
    for note in explained.notes:
        remedy = "change the pod template, then replace the pod"
        yield Finding("injection-note", Severity.WARNING, subject, note, remedy)


async def _policy(reader: ClusterReader, pod: Pod) -> KVTierPolicy | None:
    name = pod.metadata.annotations.get(POLICY_ANNOTATION)
    if not name:
        return None
    document = await reader.try_get(POLICIES, reader.namespace, name, "the pod's policy")
    if document is None:
        return None
    try:
        return read_stored(document).policy
    except InvalidDocumentError:
        return None


def _versions(pod: Pod, report: PodReport | None) -> Iterator[Finding]:
    """Versions of the injected images, tierd and the engine, next to this command's."""
    subject = f"pod {pod.metadata.name}"
    injected = pod.metadata.annotations.get(VERSION_ANNOTATION)
    if injected is None:
        return
    replace = "replace the pod: it keeps the images that it started with"
    tierd = report.version if report is not None else ""
    if tierd and tierd != injected:
        message = f"tierd is {tierd}, and {injected} was injected: images of different releases"
        remedy = "set images.payload and images.tierd to one release, then replace the pod"
        yield Finding("versions", Severity.ERROR, subject, message, remedy)
    elif injected != __version__:
        message = f"was injected by KVTier {injected}, and this command is {__version__}"
        yield Finding("versions", Severity.INFO, subject, message, replace)
    else:
        yield Finding("versions", Severity.OK, subject, f"was injected by KVTier {injected}")
    if report is not None and report.sessions_refused:
        message = f"tierd rejected {report.sessions_refused} sessions of the engine"
        remedy = "connector and tierd have different versions; the log of tierd has both"
        yield Finding("versions", Severity.ERROR, subject, message, remedy)
    for engine in report.engines if report is not None else ():
        yield Finding("versions", Severity.OK, subject, f"the engine is {engine}")


async def _node(reader: ClusterReader, pod: Pod) -> list[Finding]:
    if not pod.spec.node_name:
        return []
    node = await reader.try_get(NODES, None, pod.spec.node_name, "the node")
    info = objects.status(node or {}).get("nodeInfo") or {}
    if not info:
        return []
    text = f"kubelet {info.get('kubeletVersion')}, kernel {info.get('kernelVersion')}"
    return [Finding("node", Severity.OK, f"node {pod.spec.node_name}", text)]


def _seed(pod: Pod, policy: KVTierPolicy) -> Iterator[Finding]:
    """PYTHONHASHSEED of the engine's container."""
    name = objects.engine_container(pod, policy.spec.engine.container_name)
    engine = next((each for each in pod.spec.containers if each.name == name), None)
    if engine is None:
        return
    wanted, subject = policy.spec.engine.hash_seed, f"container {name}"
    values = [each for each in engine.env if each.name == SEED]
    found = values[-1].value if values else None
    if found == wanted:
        yield Finding("hash-seed", Severity.OK, subject, f"{SEED} is {wanted}")
        return
    yield Finding(
        "hash-seed",
        Severity.WARNING,
        subject,
        f"{SEED} is {found or 'not set as a value'}, and the policy's hashSeed is {wanted}: "
        "engines with different seeds share no objects",
        f"remove {SEED} from the pod template, or set spec.engine.hashSeed to its value",
    )


def _memory(pod: Pod, policy: KVTierPolicy) -> Iterator[Finding]:
    """The tierd container's memory limit against the policy's memory tier."""
    tierd = next((each for each in pod.spec.init_containers if each.name == TIERD_CONTAINER), None)
    tier = next((each.memory for each in policy.spec.tiers if each.memory is not None), None)
    if tierd is None or tier is None:
        return
    limit = parse_amounts(tierd.resources.limits).get(MEMORY)
    if limit is None:
        return
    subject, pool = f"container {TIERD_CONTAINER}", tier.capacity.size_bytes
    text = (
        f"its memory limit is {format_amount(MEMORY, limit)}, the memory tier {tier.capacity.text}"
    )
    if limit < pool:
        remedy = "replace the pod: the policy's memory tier has grown since"
        yield Finding("memory-limit", Severity.WARNING, subject, text, remedy)
    else:
        yield Finding("memory-limit", Severity.OK, subject, text)


def _reported(last: LastReport) -> Iterator[Finding]:
    """What tierd reports about itself and its tiers."""
    report = last.report
    if report is None:
        return
    for kind, message in report.conditions:
        remedy = f"see the row {kind} of the page Troubleshooting"
        yield Finding("condition", Severity.WARNING, kind, message, remedy)
    for each in report.live_errors:
        remedy = "correct the value in the policy; tierd keeps the last valid one"
        yield Finding("live-values", Severity.WARNING, "live values", each, remedy)
    for tier in report.tiers:
        subject = f"tier {tier.name}"
        if tier.state is TierState.HEALTHY:
            yield Finding("tier", Severity.OK, subject, "Healthy")
            continue
        severity = Severity.ERROR if tier.state is TierState.BREAKER_OPEN else Severity.WARNING
        message = f"{tier.state.value}: {tier.last_error or 'no error is reported'}"
        remedy = "repair the storage; probing is automatic"
        yield Finding("tier", severity, subject, message, remedy)


async def _inside(
    reader: ClusterReader, pod: Pod, run: RunInside, options: PodDoctorOptions
) -> list[Finding]:
    command = [*INSIDE, "--size", options.size, "--seconds", f"{options.seconds:g}"]
    where = f"{pod.metadata.name}/{TIERD_CONTAINER}"
    try:
        output = await run(pod, command)
        return from_json(json.loads(output[output.index("{") :]), where)
    except ExecError as error:
        what = "inside the pod (storage, shared memory, speed)"
        reader.not_checked.append(f"{what}: {error}")
        return []
    except ValueError:
        reader.not_checked.append(f"inside the pod: kvtier doctor did not answer in {where}")
        return []


def exec_in(reader: ClusterReader) -> RunInside:
    """Runs a command in the tierd container, as ``kubectl exec`` does."""

    async def run(pod: Pod, command: Sequence[str]) -> str:
        client = api_client(reader)
        if client is None:
            raise ExecError("this client cannot run commands in pods")
        namespace, name = pod.metadata.namespace, pod.metadata.name
        access = client.credentials
        query = [("container", TIERD_CONTAINER), ("stdout", "1"), ("stderr", "0")]
        query += [("command", each) for each in command]
        url = f"{access.server}{PODS.path(namespace, name, 'exec')}?{urlencode(query)}"
        authorization = await access.authorization()
        headers = {"Authorization": authorization} if authorization else {}
        tls = access.tls() if url.startswith("https:") else None
        try:
            async with (
                asyncio.timeout(EXEC_SECONDS),
                aiohttp.ClientSession(trust_env=False) as session,
                session.ws_connect(
                    url,
                    headers=headers,
                    protocols=(EXEC_PROTOCOL,),
                    ssl=tls if tls is not None else True,
                    server_hostname=access.server_name,
                ) as socket,
            ):
                return await _output(socket)
        except TimeoutError:
            raise ExecError(f"no answer in {EXEC_SECONDS:g} s") from None
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 403:
                needed = right("get and create", PODS, namespace, "exec")
                raise ExecError(f"the right to {needed} is missing") from None
            raise ExecError(f"HTTP {error.status}: {error.message}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ExecError(f"{type(error).__name__}: {error}"[:256]) from None

    return run


async def _output(socket: aiohttp.ClientWebSocketResponse) -> str:
    """Standard output of the command. Each message begins with the number of its channel."""
    output = bytearray()
    async for message in socket:
        data = message.data.encode() if isinstance(message.data, str) else message.data
        if data[:1] == STANDARD_OUTPUT and len(output) < MAX_OUTPUT:
            output += data[1:]
    return output[:MAX_OUTPUT].decode(errors="replace")
