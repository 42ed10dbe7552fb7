"""Alerts, as data. Generates the rules of the chart and docs/runbooks.md.

``promtool`` tests each alert, firing and not firing: ``tests/unit/monitoring/test_alerts.py``.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import yaml

RULES_FILE = "charts/kvtier/files/monitoring/rules.yaml"
RUNBOOKS_FILE = "docs/runbooks.md"
RUNBOOKS_URL = "RUNBOOKS_URL"
"""Stands in the generated files for the value ``monitoring.runbooksUrl`` of the chart."""
POLICY = "policy_namespace, policy"
POD_TIER = "namespace, pod, policy, tier"
POD = "namespace, pod, policy"
IN_POD = "{{ $labels.namespace }}/{{ $labels.pod }}"
OF_POLICY = "{{ $labels.policy_namespace }}/{{ $labels.policy }}"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. ``meaning``: what happens and who is affected; ``steps``: what to do, in order."""

    name: str
    expr: str
    hold: str
    severity: str
    summary: str
    meaning: str
    steps: tuple[str, ...]

    def rule(self) -> dict[str, object]:
        """The rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.meaning,
                "runbook_url": f"{RUNBOOKS_URL}#{self.name.lower()}",
            },
        }


def _pods(state: str) -> str:
    return f"max by ({POLICY}) (kvtier_operator_policy_{state}_pods)"


GROUPS: dict[str, tuple[Alert, ...]] = {
    "kvtier.operator": (
        Alert(
            "KVTierOperatorDown",
            "(sum(kvtier_operator_leader) or vector(0)) == 0",
            "5m",
            "critical",
            "No controller of KVTier leads.",
            "No controller replica is the leader, or none is scraped. Pods keep their tiers and "
            "serve. Changes of policies are not applied and status is not updated.",
            (
                "`kubectl -n kvtier-system get pods,lease`: are controller pods running, and who "
                "holds the Lease `kvtier-controller`?",
                "Read the log of the controller. A replica that cannot renew the Lease logs why.",
                "If pods run and lead, Prometheus does not scrape port 9402: check its targets.",
            ),
        ),
        Alert(
            "KVTierWebhookDown",
            "(sum(kvtier_webhook_ready) or vector(0)) == 0",
            "5m",
            "critical",
            "No webhook of KVTier is ready.",
            "No webhook replica is ready, or none is scraped. New pods start without tiers. Pods "
            "that run are not affected.",
            (
                "`kubectl -n kvtier-system get pods`: are webhook pods running and ready?",
                "`/readyz` on port 9402 of a webhook pod says what is missing.",
                "After the fix, restart the pods that started meanwhile: the condition `Attached` "
                "names them with reason `Missed`.",
            ),
        ),
        Alert(
            "KVTierCertificateExpires",
            "min(kvtier_webhook_certificate_expiry_timestamp_seconds > 0) - time() < 14 * 86400",
            "1h",
            "warning",
            "The webhook's certificate expires in {{ $value | humanizeDuration }}.",
            "The certificate was not renewed in time. After it expires, new pods start without "
            "tiers.",
            (
                "With `SelfManaged` certificates, read the controller's log and "
                "`kvtier_operator_certificate_failures_total`.",
                "With `Mounted` certificates, check the Certificate of cert-manager, or replace "
                "the Secret.",
            ),
        ),
        Alert(
            "KVTierReconcileFaults",
            'sum(increase(kvtier_operator_reconcile_errors_total{reason="Fault"}[15m])) > 0',
            "5m",
            "warning",
            "The controller of KVTier has an internal error.",
            "A reconcile fails with an error that KVTier does not expect, which is a bug. It is "
            "retried; other policies are not affected.",
            (
                "Find the traceback in the controller's log: `internal error`.",
                "Report it with the policy and the traceback.",
            ),
        ),
    ),
    "kvtier.policies": (
        Alert(
            "KVTierPolicyNotReady",
            f'max by ({POLICY}) (kvtier_operator_policy_condition{{condition="Ready"}}) < 1',
            "15m",
            "warning",
            f"Policy {OF_POLICY} is not Ready.",
            "The policy is not in force, or only in part.",
            (
                "`kubectl describe kvtierpolicy`: the first condition that is not True says why.",
                "[Troubleshooting](troubleshooting.md) explains each reason and what to do.",
            ),
        ),
        Alert(
            "KVTierPodsNotAttached",
            f"{_pods('selected')} - {_pods('attached')} > 0",
            "30m",
            "warning",
            f"{{{{ $value }}}} pods that policy {OF_POLICY} selects have no tiers.",
            "The pods serve, but without tiers: prompts are computed that could be loaded.",
            (
                "The condition `Attached` names a pod and a reason, and `status.skippedPods` "
                "lists pods that were skipped.",
                "If a pod should have no tiers, narrow the policy's `podSelector` or give the pod "
                "the label `kvtier.io/inject: disabled`.",
            ),
        ),
        Alert(
            "KVTierConfigurationOutdated",
            f"{_pods('outdated')} > 0",
            "6h",
            "info",
            f"{{{{ $value }}}} pods of policy {OF_POLICY} have an earlier structure.",
            "A structural change of the policy applies to new pods only. These pods serve with the "
            "structure that they started with.",
            (
                "Restart the workloads at a convenient time, or set `rollout.strategy: "
                "RestartWorkloads`.",
                "The condition `UpToDate` lists the pods.",
            ),
        ),
    ),
    "kvtier.tiers": (
        Alert(
            "KVTierTierUnavailable",
            f'max by ({POD_TIER}) (kvtier_tier_state{{state="BreakerOpen"}}) > 0',
            "5m",
            "warning",
            f"Tier {{{{ $labels.tier }}}} of {IN_POD} is not used: its breaker is open.",
            "The tier failed or hung repeatedly. Requests are not delayed by it; what it holds is "
            "computed again. It is probed and used again when it works.",
            (
                "`lastError` and `cause` of the tier in `/status` name the error.",
                "Check the storage: mount, permissions, free space, latency. `kvtier faults` "
                "tests a directory.",
            ),
        ),
        Alert(
            "KVTierVolumeUnavailable",
            f'max by ({POD_TIER}, volume) (kvtier_volume_state{{state="BreakerOpen"}}) > 0',
            "5m",
            "warning",
            f"Volume {{{{ $labels.volume }}}} of tier {{{{ $labels.tier }}}} of {IN_POD} is not "
            "used.",
            "One of the disks of a tier failed or hung repeatedly. The others serve. What it holds "
            "is computed again and stored on the others. It is used again when a probe succeeds.",
            (
                "`volumes` of the tier in `/status` has its `lastError` and `cause`.",
                "Check or replace the disk. A volume can be removed from the policy: new pods do "
                "not mount it, and the others keep what they hold.",
            ),
        ),
        Alert(
            "KVTierSlotsQuarantined",
            f'max by ({POD}) (kvtier_pool_bytes{{use="quarantined"}}) > 0',
            "15m",
            "warning",
            f"{{{{ $value | humanize1024 }}}}B of RAM of {IN_POD} are in quarantine.",
            "A process that may still access this memory has not ended, or a read hangs in a "
            "mount. The memory is not used until that is over.",
            (
                "`kvtier_quarantined_processes` above 0: an engine process vanished. It is freed "
                "when its end is proven.",
                "`kvtier_tier_late_reads_running` above 0: a mount hangs. Repair it; the reads end "
                "then.",
            ),
        ),
        Alert(
            "KVTierCorruptObjects",
            f'sum by ({POD_TIER}) (increase(kvtier_tier_reads_failed_total{{reason="corrupt"}}'
            "[30m])) > 0",
            "0m",
            "warning",
            f"Tier {{{{ $labels.tier }}}} of {IN_POD} returned damaged objects.",
            "The storage returned other bytes than were stored. The objects were detected, dropped "
            "and computed again: no token is wrong.",
            (
                "Check the disk or the network storage for errors.",
                "`kvtier verify DIRECTORY` checks every object of a file tier.",
            ),
        ),
        Alert(
            "KVTierReadTimeouts",
            f"sum by ({POD_TIER}) (rate(kvtier_tier_reads_timed_out_total[10m]))"
            f" > 0.05 * sum by ({POD_TIER}) (rate(kvtier_tier_reads_total[10m])"
            " + rate(kvtier_tier_reads_timed_out_total[10m]))",
            "10m",
            "warning",
            f"Reads from tier {{{{ $labels.tier }}}} of {IN_POD} time out.",
            "More than 5% of the reads do not end within their deadline. Each such request waits "
            "up to `loadTimeoutMilliseconds`, and its tokens are computed.",
            (
                "Compare the storage's latency and load with what it can deliver.",
                "Set `selection: Cost`, lower `loadTimeoutMilliseconds`, or lower the tier's "
                "`loadWeight`. All are live.",
            ),
        ),
        Alert(
            "KVTierLoadTimeouts",
            "sum by (namespace, pod, model_name) "
            '(increase(vllm:kvtier_load_failures_total{reason="limit"}[15m])) > 0',
            "5m",
            "warning",
            f"Loads into GPU memory of {IN_POD} time out.",
            "Copies from RAM to GPU memory did not end within their limit. The tokens were "
            "computed after the wait.",
            (
                "Look for a suspended or overloaded tierd: `kvtier_loop_asleep_total`, CPU limits "
                "of the sidecar.",
                "Look at `vllm:kvtier_load_duration_seconds` and at the node's PCIe traffic.",
            ),
        ),
        Alert(
            "KVTierEngineWithoutTiers",
            "sum by (namespace, pod, model_name) (vllm:kvtier_processes_without_tiers) > 0",
            "5m",
            "warning",
            f"The engine in {IN_POD} serves without tiers.",
            "KVTier is turned off in this engine: since its start, because something does not fit "
            "(`vllm:kvtier_off_total`), or after an unexpected error "
            "(`vllm:kvtier_errors_total`), after which it is used again in 10 s, 1 and 6 minutes, "
            "but not after the fourth.",
            (
                "Search the engine's log for `KVTier: serving without tiers`.",
                "`UnsupportedGeometryError`: this version does not serve the model.",
                "An error in a hook is a bug: report it with the traceback.",
            ),
        ),
        Alert(
            "KVTierProtocolViolations",
            f"sum by ({POD}) (increase(kvtier_protocol_violations_total[30m])) > 0",
            "0m",
            "warning",
            f"Engine and tierd of {IN_POD} disagree about their protocol.",
            "tierd rejected a message of the engine, which is a bug. The load or store was "
            "dropped.",
            ("Report it with the log of the sidecar and the label `reason` of the counter.",),
        ),
        Alert(
            "KVTierTierEarnsNothing",
            "sum by (namespace, policy, tier) (increase(kvtier_loaded_tokens_total[6h])) == 0"
            " and sum by (namespace, policy, tier) (increase(kvtier_tier_writes_total[6h])) > 0",
            "1h",
            "info",
            "Tier {{ $labels.tier }} of policy {{ $labels.namespace }}/{{ $labels.policy }} is "
            "written and never loaded.",
            "In six hours, objects were written to the tier and no token was loaded from it. It "
            "costs writes and capacity.",
            (
                "Prompts may not repeat, or what repeats is in RAM.",
                "With `selection: Cost`, `kvtier_tier_too_slow_total` counts when the tier was too "
                "slow to help.",
                "Set the tier's `storePolicy` to `Reused` or `None`, or remove it.",
            ),
        ),
    ),
    "kvtier.capacity": (
        Alert(
            "KVTierDiskFilling",
            f"min by ({POD_TIER}) (kvtier_tier_volume_available_bytes"
            " / kvtier_tier_volume_size_bytes) < 0.05",
            "15m",
            "warning",
            f"The file system of tier {{{{ $labels.tier }}}} of {IN_POD} has "
            "{{ $value | humanizePercentage }} free.",
            "The tier keeps to its capacity, so the capacity is too large for the file system or "
            "something else fills it. When it is full, writes fail and the tier is only read.",
            (
                "Compare `kvtier_tier_used_bytes` with what the file system holds.",
                "Lower the tier's `capacity`, which is live, or enlarge the file system.",
            ),
        ),
        Alert(
            "KVTierDiskFull",
            f"sum by ({POD_TIER}) (increase(kvtier_tier_writes_failed_total"
            '{reason=~"no_space|min_free"}[15m])) > 0',
            "15m",
            "warning",
            f"Tier {{{{ $labels.tier }}}} of {IN_POD} cannot store objects: no space.",
            "The file system is full or read-only, a quota is reached, or less is free than "
            "`minFree` leaves to others. What the tier holds is still served.",
            ("As for [KVTierDiskFilling](#kvtierdiskfilling). Check mount options and quotas.",),
        ),
        Alert(
            "KVTierCapacityExceedsDisk",
            f'max by ({POD}) (kvtier_condition{{type="CapacityExceedsDisk"}}) > 0',
            "15m",
            "warning",
            f"A tier of {IN_POD} has a capacity that its disk has no room for.",
            "The capacity of a tier, up to its high watermark, exceeds its file system less "
            "`minFree`. The tier evicts earlier than its capacity says, and works otherwise.",
            (
                "The condition in `/status`, and `TiersHealthy` of the policy, name the tier and "
                "give the sizes.",
                "Lower the tier's `capacity`, which is live, or use a larger disk.",
            ),
        ),
        Alert(
            "KVTierSharedMemoryLow",
            f"max by ({POD}) (kvtier_run_volume_available_bytes) < 2 * 1024 * 1024"
            f" and max by ({POD}) (kvtier_run_volume_size_bytes) > 0",
            "5m",
            "warning",
            f"The memory volume of {IN_POD} has {{{{ $value | humanize1024 }}}}B free.",
            "The volume of the run directory holds the pool, which is allocated in advance, and a "
            "few small files. Without room for those, a new tierd or engine cannot attach.",
            (
                "Look for foreign files in the run directory.",
                "Lower the memory tier's `capacity`, or enlarge the volume.",
            ),
        ),
        Alert(
            "KVTierPoolTooSmall",
            f'max by ({POD}) (kvtier_condition{{type=~"PoolSmaller|PoolMissing"}}) > 0',
            "5m",
            "warning",
            f"The memory tier of {IN_POD} has less memory than configured.",
            "The volume of the run directory has no room for the memory tier's capacity.",
            (
                "The condition in `/status` gives both sizes.",
                "Lower the memory tier's `capacity`, or enlarge `/dev/shm` or the volume.",
            ),
        ),
    ),
}
ALERTS = tuple(alert for group in GROUPS.values() for alert in group)


def rules() -> dict[str, object]:
    """The document of rules."""
    return {
        "groups": [
            {"name": name, "rules": [alert.rule() for alert in group]}
            for name, group in GROUPS.items()
        ]
    }


def rules_text() -> str:
    """A rule file of Prometheus."""
    return "# Generated by `make generate`.\n" + yaml.safe_dump(
        rules(), sort_keys=False, width=120, allow_unicode=True
    )


RUNBOOKS = """\
# Runbooks

Generated by `make generate`. What each alert of the chart means and what to do. No alert means that
answers are wrong: what cannot be verified is computed again.

| alert | severity | fires after |
|---|---|---|
"""


def runbooks_text() -> str:
    """The page of runbooks."""
    parts = [RUNBOOKS]
    parts += [
        f"| [{alert.name}](#{alert.name.lower()}) | {alert.severity} | {alert.hold} |\n"
        for alert in ALERTS
    ]
    for alert in ALERTS:
        parts.append(f"\n## {alert.name}\n\n{_wrapped(alert.meaning)}\n\n")
        parts.append(f"```promql\n{alert.expr}\n```\n\n")
        parts += [
            f"{number}. {_wrapped(step, '   ')}\n" for number, step in enumerate(alert.steps, 1)
        ]
    return "".join(parts)


def _wrapped(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(
        text,
        width=97,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def files() -> dict[str, str]:
    """Paths in the repository, and contents."""
    return {RULES_FILE: rules_text(), RUNBOOKS_FILE: runbooks_text()}
