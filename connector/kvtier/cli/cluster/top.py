"""``kvtier top``: tiers of running engines, from the reports of their tierds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtier.cli.cluster.access import ClusterReader
from kvtier.cli.cluster.reports import PodStatusSource, read_reports, read_url
from kvtier.cli.console import console, print_table
from kvtier.config.models import TenantKind
from kvtier.errors import KVTierError
from kvtier.tenants import tenant_id
from kvtier_operator.api.names import POLICY_ANNOTATION
from kvtier_operator.api.pods import Pod, decode_pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.stored import read_stored
from kvtier_operator.api.validation import InvalidDocumentError
from kvtier_operator.controller import objects
from kvtier_operator.controller.pods import pod_view
from kvtier_operator.controller.pods.reports import NO_REPORT, LastReport, PodReport
from kvtier_operator.injection.governing import governing
from kvtier_operator.kube.resources import PODS, POLICIES

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
STYLES = {"Healthy": "green", "Degraded": "yellow", "BreakerOpen": "red", "Attached": "green"}
MAX_TENANTS = 5
"""Tenants of a tier that are listed in text."""
_DIGITS = 8
MAX_REFRESH_FAILURES = 5
"""Failed refreshes in a row after which a live view ends."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine: a pod, or a tierd at a URL. ``report``: None if it did not answer."""

    name: str
    policy: str
    node: str
    state: str
    message: str
    report: PodReport | None
    policy_tenant: str = ""
    """The digest of the tenant that the whole policy is with ``tenants.by: Policy``."""


@dataclass(frozen=True, slots=True)
class TopView:
    """All engines at one time, and what could not be read."""

    rows: tuple[EngineRow, ...]
    not_checked: tuple[str, ...] = ()


async def read_cluster(
    reader: ClusterReader, source: PodStatusSource, policy: str | None = None
) -> TopView:
    """The engines of a namespace, or those of one policy. Raises ``CommandError``."""
    reader.not_checked.clear()
    policies = await _policies(reader)
    if policy is not None and all(each.metadata.name != policy for each in policies):
        await reader.get(POLICIES, reader.namespace, policy)
    documents = await reader.list(PODS, reader.namespace)
    pods = [decode_pod(each) for each in documents]
    rows: list[EngineRow] = []
    for each in policies:
        if policy is not None and each.metadata.name != policy:
            continue
        own = [pod for pod in pods if _belongs(pod, each, policies)]
        reports = await read_reports(reader, source, own, each.metadata.name)
        rows += [_row(each, pod, reports.get(pod.metadata.uid, NO_REPORT)) for pod in own]
    rows.sort(key=lambda row: (row.policy, row.name))
    return TopView(tuple(rows), tuple(dict.fromkeys(reader.not_checked)))


async def _policies(reader: ClusterReader) -> list[KVTierPolicy]:
    found = []
    for document in await reader.list(POLICIES, reader.namespace):
        try:
            found.append(read_stored(document).policy)
        except InvalidDocumentError:
            continue
    return found


def _belongs(pod: Pod, policy: KVTierPolicy, policies: Sequence[KVTierPolicy]) -> bool:
    """Whether the pod runs, and with this policy's tiers."""
    if pod.has_ended or pod.is_terminating:
        return False
    if not objects.is_injected(pod) and not pod_view.mounts_config_maps(policy, pod):
        return False
    name = pod.metadata.annotations.get(POLICY_ANNOTATION)
    if name:
        return name == policy.metadata.name
    found = governing(policies, pod.metadata.namespace, pod.metadata.labels)
    return found is not None and found.metadata.name == policy.metadata.name


def _row(policy: KVTierPolicy, pod: Pod, last: LastReport) -> EngineRow:
    view = pod_view.view(policy, pod, last, time.time())
    return EngineRow(
        pod.metadata.name,
        policy.metadata.name,
        view.node,
        view.state.value,
        view.message,
        last.report,
        tenant_id(
            f"{policy.metadata.namespace}/{policy.metadata.name}",
            TenantKind.POLICY.value,
            policy.spec.isolation.salt,
        ).hex(),
    )


async def read_urls(urls: Sequence[str], token: str | None) -> TopView:
    """The tierds at these URLs, for engines outside Kubernetes."""
    answers = await asyncio.gather(*(asyncio.to_thread(read_url, each, token) for each in urls))
    rows = []
    for url, last in zip(urls, answers, strict=True):
        report = last.report
        state, message = "Unreachable", last.error
        if report is not None:
            state = "Attached" if report.attached else "NotAttached"
            message = "" if report.attached else "no engine has attached"
        rows.append(EngineRow(url, "", "", state, message, report))
    return TopView(tuple(rows))


def to_json(view: TopView) -> dict[str, Any]:
    """The output of ``-o json``."""
    return {"engines": [_engine_json(row) for row in view.rows], "notChecked": [*view.not_checked]}


def _engine_json(row: EngineRow) -> dict[str, Any]:
    report = row.report
    found: dict[str, Any] = {
        "name": row.name,
        "policy": row.policy or None,
        "node": row.node or None,
        "state": row.state,
        "message": row.message or None,
    }
    if report is None:
        return {**found, "tiers": []}
    return {
        **found,
        "version": report.version,
        "engines": list(report.engines),
        "promptTokens": report.prompt_tokens,
        "conditions": [{"type": kind, "message": text} for kind, text in report.conditions],
        "tiers": [
            {
                "name": tier.name,
                "state": tier.state.value,
                "usedBytes": tier.used_bytes,
                "capacityBytes": tier.capacity_bytes,
                "hitTokens": tier.hit_tokens,
                "lastError": tier.last_error or None,
                "tenants": tier.tenants,
                "tenantShareBytes": tier.tenant_share_bytes or None,
                "largestTenants": [
                    {
                        "tenant": tenant,
                        "policy": row.policy if tenant == row.policy_tenant else None,
                        "usedBytes": used,
                    }
                    for tenant, used in tier.largest_tenants
                ],
            }
            for tier in report.tiers
        ],
    }


def size(number: int) -> str:
    """Bytes for people, such as ``1.5 GiB``."""
    value, unit = float(number), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return (
        f"{value:.0f} {UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {UNITS[unit]}"
    )


def table(view: TopView) -> Table:
    """One line for each tier of each engine. HITS: share of the prompt tokens of the last five
    minutes that were loaded from the tier.
    """
    found = Table(box=None, pad_edge=False)
    # Engines outside Kubernetes have neither policy nor node.
    in_cluster = any(row.policy for row in view.rows)
    heads = ("ENGINE", "POLICY", "NODE", "STATE") if in_cluster else ("ENGINE", "STATE")
    for title in (*heads, "TIER", "HEALTH"):
        found.add_column(title, overflow="fold")
    for title in ("USED", "CAPACITY", "FULL", "HITS"):
        found.add_column(title, justify="right")
    for row in view.rows:
        named = (row.name, row.policy, row.node) if in_cluster else (row.name,)
        head = [Text(each or "-") for each in named]
        head.append(Text(row.state, style=STYLES.get(row.state, "yellow")))
        tiers = row.report.tiers if row.report is not None else ()
        if not tiers:
            found.add_row(*head, *[Text("-")] * 6)
        for tier in tiers:
            full = (
                f"{100 * tier.used_bytes / tier.capacity_bytes:.0f}%"
                if tier.capacity_bytes
                else "-"
            )
            found.add_row(
                *head,
                Text(tier.name),
                Text(tier.state.value, style=STYLES.get(tier.state.value, "yellow")),
                Text(size(tier.used_bytes)),
                Text(size(tier.capacity_bytes) if tier.capacity_bytes else "-"),
                Text(full),
                Text(_hits(tier.hit_tokens, row.report)),
            )
            head = [Text("")] * len(heads)
    return found


def tenant_table(view: TopView) -> Table | None:
    """One line for each of the largest tenants of each tier, by the beginning of its digest; None
    if there are no tenants. SHARE: what one of them may hold.
    """
    found = Table(box=None, pad_edge=False)
    for title in ("ENGINE", "TIER", "TENANT"):
        found.add_column(title, overflow="fold")
    for title in ("USED", "SHARE", "FULL"):
        found.add_column(title, justify="right")
    for row in view.rows:
        for tier in row.report.tiers if row.report is not None else ():
            share = tier.tenant_share_bytes
            for tenant, used in tier.largest_tenants[:MAX_TENANTS]:
                own = tenant == row.policy_tenant
                found.add_row(
                    Text(row.name),
                    Text(tier.name),
                    Text(f"policy {row.policy}" if own else tenant[:_DIGITS]),
                    Text(size(used)),
                    Text(size(share) if share else "-"),
                    Text(f"{100 * used / share:.0f}%" if share else "-"),
                )
            shown = min(MAX_TENANTS, len(tier.largest_tenants))
            if shown and tier.tenants > shown:
                more = Text(f"and {tier.tenants - shown} more")
                found.add_row(Text(row.name), Text(tier.name), more, *[Text("")] * 3)
    return found if found.row_count else None


def _hits(tokens: int | None, report: PodReport | None) -> str:
    prompt = report.prompt_tokens if report is not None else None
    return f"{100 * tokens / prompt:.0f}%" if tokens is not None and prompt else "-"


def remarks(view: TopView) -> list[str]:
    """What the table has no room for: errors, and what could not be read."""
    found = []
    for row in view.rows:
        if row.state != "Attached" and row.message:
            found.append(f"{row.name}: {row.message}")
        if row.report is None:
            continue
        found += [f"{row.name}: {kind}: {text}" for kind, text in row.report.conditions]
        found += [
            f"{row.name}: tier {tier.name}: {tier.last_error}"
            for tier in row.report.tiers
            if tier.last_error and tier.state.value != "Healthy"
        ]
    return [*found, *(f"not checked: {each}" for each in view.not_checked)]


def show(view: TopView) -> None:
    """Prints the view once."""
    if view.rows:
        print_table(table(view))
        tenants = tenant_table(view)
        if tenants is not None:
            console().print()
            print_table(tenants)
    else:
        console().print(Text("no engine with tiers runs"))
    for each in remarks(view):
        console().print(Text(each, style="yellow"))


async def follow(read: Callable[[], Awaitable[TopView]], seconds: float) -> None:
    """Shows the view on the terminal until it is interrupted. One failed refresh keeps the last
    view; several in a row raise the error.
    """
    failures, last = 0, ""
    with Live(console=console(), screen=False, auto_refresh=False) as display:
        while True:
            try:
                view = await read()
                failures = 0
            except KVTierError as error:
                failures += 1
                if failures >= MAX_REFRESH_FAILURES:
                    raise
                if str(error) != last:
                    last = str(error)
                    display.console.print(
                        Text(f"the view is not refreshed: {last}", style="yellow")
                    )
                await asyncio.sleep(seconds)
                continue
            notes = [Text(each, style="yellow") for each in remarks(view)]
            clock = Text(time.strftime("%H:%M:%S"), style="dim")
            tenants = tenant_table(view)
            tables = [table(view)] if tenants is None else [table(view), Text(), tenants]
            display.update(Group(clock, *tables, *notes), refresh=True)
            await asyncio.sleep(seconds)
