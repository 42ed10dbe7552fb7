"""Every alert fires when it should and is quiet when it should be, by ``promtool test rules``."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.monitoring.alerts import ALERTS, RUNBOOKS_FILE, rules

PROMTOOL = shutil.which("promtool")
REPOSITORY = Path(__file__).resolve().parents[3]
POD = 'namespace="n",pod="e",policy="p"'
TIER = f'{POD},tier="disk"'
POLICY = 'policy="p",policy_namespace="n"'
ENGINE = 'namespace="n",pod="e",model_name="m",engine="0"'
OF_POD = {"namespace": "n", "pod": "e", "policy": "p"}
OF_TIER = {**OF_POD, "tier": "disk"}
OF_POLICY = {"policy": "p", "policy_namespace": "n"}
OF_ENGINE = {"namespace": "n", "pod": "e", "model_name": "m"}


@dataclass(frozen=True)
class Case:
    """``firing`` and ``quiet``: series and values, one a minute. ``at``: when it is looked at;
    ``before``: when it must not fire yet."""

    firing: dict[str, str]
    quiet: dict[str, str]
    summary: str
    labels: dict[str, str] = field(default_factory=dict)
    at: str = "45m"
    before: str = ""


def policy_pods(**counts: int) -> dict[str, str]:
    return {
        f"kvtier_operator_policy_{state}_pods{{{POLICY}}}": f"{number}x600"
        for state, number in counts.items()
    }


CASES = {
    "KVTierOperatorDown": Case(
        {'kvtier_operator_leader{pod="a"}': "1x10 0x50"},
        {'kvtier_operator_leader{pod="a"}': "0x60", 'kvtier_operator_leader{pod="b"}': "1x60"},
        "No controller of KVTier leads.",
        before="12m",
    ),
    "KVTierWebhookDown": Case(
        {},
        {'kvtier_webhook_ready{pod="a"}': "0x60", 'kvtier_webhook_ready{pod="b"}': "1x60"},
        "No webhook of KVTier is ready.",
    ),
    "KVTierCertificateExpires": Case(
        {
            'kvtier_webhook_certificate_expiry_timestamp_seconds{pod="a"}': "868200x200",
            'kvtier_webhook_certificate_expiry_timestamp_seconds{pod="b"}': "0x200",
        },
        {'kvtier_webhook_certificate_expiry_timestamp_seconds{pod="a"}': "2592000x200"},
        "The webhook's certificate expires in 10d 0h 0m 0s.",
        at="70m",
        before="30m",
    ),
    "KVTierReconcileFaults": Case(
        {'kvtier_operator_reconcile_errors_total{reason="Fault"}': "0x30 1x30"},
        {'kvtier_operator_reconcile_errors_total{reason="Conflict"}': "0+1x60"},
        "The controller of KVTier has an internal error.",
        at="40m",
        before="30m",
    ),
    "KVTierPolicyNotReady": Case(
        {f'kvtier_operator_policy_condition{{{POLICY},condition="Ready"}}': "1x10 0x10 -1x40"},
        {f'kvtier_operator_policy_condition{{{POLICY},condition="Ready"}}': "0x10 1x50"},
        "Policy n/p is not Ready.",
        OF_POLICY,
        before="15m",
    ),
    "KVTierPodsNotAttached": Case(
        policy_pods(selected=4, attached=1),
        policy_pods(selected=4, attached=4),
        "3 pods that policy n/p selects have no tiers.",
        OF_POLICY,
        before="20m",
    ),
    "KVTierConfigurationOutdated": Case(
        policy_pods(outdated=2),
        policy_pods(outdated=0),
        "2 pods of policy n/p have an earlier structure.",
        OF_POLICY,
        at="7h",
        before="5h",
    ),
    "KVTierTierUnavailable": Case(
        {f'kvtier_tier_state{{{TIER},state="BreakerOpen"}}': "0x10 1x50"},
        {
            f'kvtier_tier_state{{{TIER},state="BreakerOpen"}}': "0x60",
            f'kvtier_tier_state{{{TIER},state="Degraded"}}': "1x60",
        },
        "Tier disk of n/e is not used: its breaker is open.",
        OF_TIER,
        before="14m",
    ),
    "KVTierVolumeUnavailable": Case(
        {f'kvtier_volume_state{{{TIER},volume="nvme1",state="BreakerOpen"}}': "0x10 1x50"},
        {
            f'kvtier_volume_state{{{TIER},volume="nvme1",state="BreakerOpen"}}': "0x60",
            f'kvtier_volume_state{{{TIER},volume="nvme0",state="Degraded"}}': "1x60",
        },
        "Volume nvme1 of tier disk of n/e is not used.",
        {**OF_TIER, "volume": "nvme1"},
        before="14m",
    ),
    "KVTierSlotsQuarantined": Case(
        {f'kvtier_pool_bytes{{{POD},use="quarantined"}}': "2097152x60"},
        {f'kvtier_pool_bytes{{{POD},use="quarantined"}}': "2097152x5 0x60"},
        "2MiB of RAM of n/e are in quarantine.",
        OF_POD,
        before="10m",
    ),
    "KVTierCorruptObjects": Case(
        {f'kvtier_tier_reads_failed_total{{{TIER},reason="corrupt"}}': "0x30 1x30"},
        {f'kvtier_tier_reads_failed_total{{{TIER},reason="vanished"}}': "0+1x60"},
        "Tier disk of n/e returned damaged objects.",
        OF_TIER,
        before="29m",
    ),
    "KVTierReadTimeouts": Case(
        {
            f"kvtier_tier_reads_total{{{TIER}}}": "0+10x60",
            f"kvtier_tier_reads_timed_out_total{{{TIER}}}": "0x10 0+5x50",
        },
        {
            f"kvtier_tier_reads_total{{{TIER}}}": "0+1000x60",
            f"kvtier_tier_reads_timed_out_total{{{TIER}}}": "0+1x60",
        },
        "Reads from tier disk of n/e time out.",
        OF_TIER,
        before="10m",
    ),
    "KVTierLoadTimeouts": Case(
        {f'vllm:kvtier_load_failures_total{{{ENGINE},reason="limit"}}': "0x30 1x30"},
        {f'vllm:kvtier_load_failures_total{{{ENGINE},reason="cancelled"}}': "0+1x60"},
        "Loads into GPU memory of n/e time out.",
        OF_ENGINE,
        at="40m",
        before="30m",
    ),
    "KVTierEngineWithoutTiers": Case(
        {f"vllm:kvtier_processes_without_tiers{{{ENGINE}}}": "0x10 1x50"},
        # Off for two minutes after an error, and used again.
        {
            f"vllm:kvtier_processes_without_tiers{{{ENGINE}}}": "0x38 1 1 0x20",
            f'vllm:kvtier_errors_total{{{ENGINE},hook="shutdown"}}': "0x38 1x22",
        },
        "The engine in n/e serves without tiers.",
        OF_ENGINE,
        before="13m",
    ),
    "KVTierProtocolViolations": Case(
        {f'kvtier_protocol_violations_total{{{POD},reason="frames"}}': "0x30 1x30"},
        {f'kvtier_protocol_violations_total{{{POD},reason="frames"}}': "3x60"},
        "Engine and tierd of n/e disagree about their protocol.",
        OF_POD,
        before="29m",
    ),
    "KVTierTierEarnsNothing": Case(
        {
            f"kvtier_loaded_tokens_total{{{TIER}}}": "7x600",
            f"kvtier_tier_writes_total{{{TIER}}}": "0+1x600",
        },
        {
            f"kvtier_loaded_tokens_total{{{TIER}}}": "0x300 9x300",
            f"kvtier_tier_writes_total{{{TIER}}}": "0+1x600",
        },
        "Tier disk of policy n/p is written and never loaded.",
        {"namespace": "n", "policy": "p", "tier": "disk"},
        at="9h",
    ),
    "KVTierDiskFilling": Case(
        {
            f"kvtier_tier_volume_available_bytes{{{TIER}}}": "10x60",
            f"kvtier_tier_volume_size_bytes{{{TIER}}}": "1000x60",
        },
        {
            f"kvtier_tier_volume_available_bytes{{{TIER}}}": "100x60",
            f"kvtier_tier_volume_size_bytes{{{TIER}}}": "1000x60",
        },
        "The file system of tier disk of n/e has 1% free.",
        OF_TIER,
        before="10m",
    ),
    "KVTierDiskFull": Case(
        {f'kvtier_tier_writes_failed_total{{{TIER},reason="no_space"}}': "0x10 0+1x50"},
        {f'kvtier_tier_writes_failed_total{{{TIER},reason="no_space"}}': "0x10 1x50"},
        "Tier disk of n/e cannot store objects: no space.",
        OF_TIER,
        before="20m",
    ),
    "KVTierCapacityExceedsDisk": Case(
        {f'kvtier_condition{{{POD},type="CapacityExceedsDisk"}}': "1x60"},
        {
            f'kvtier_condition{{{POD},type="CapacityExceedsDisk"}}': "0x60",
            f'kvtier_condition{{{POD},type="Draining"}}': "1x60",
        },
        "A tier of n/e has a capacity that its disk has no room for.",
        OF_POD,
        before="3m",
    ),
    "KVTierSharedMemoryLow": Case(
        {
            f"kvtier_run_volume_available_bytes{{{POD}}}": "1048576x60",
            f"kvtier_run_volume_size_bytes{{{POD}}}": "1073741824x60",
        },
        {
            f"kvtier_run_volume_available_bytes{{{POD}}}": "8388608x60",
            f"kvtier_run_volume_size_bytes{{{POD}}}": "1073741824x60",
        },
        "The memory volume of n/e has 1MiB free.",
        OF_POD,
        before="3m",
    ),
    "KVTierPoolTooSmall": Case(
        {f'kvtier_condition{{{POD},type="PoolSmaller"}}': "1x60"},
        {
            f'kvtier_condition{{{POD},type="PoolSmaller"}}': "0x60",
            f'kvtier_condition{{{POD},type="Draining"}}': "1x60",
        },
        "The memory tier of n/e has less memory than configured.",
        OF_POD,
        before="3m",
    ),
}


def test_every_alert_has_a_case_and_a_runbook() -> None:
    assert sorted(CASES) == sorted(alert.name for alert in ALERTS)
    runbooks = (REPOSITORY / RUNBOOKS_FILE).read_text()
    for alert in ALERTS:
        assert f"\n## {alert.name}\n" in runbooks
        assert alert.steps
        assert alert.hold
        assert alert.severity in ("critical", "warning", "info")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian package prometheus) is missing")
@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_and_is_quiet(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (alert,) = (alert for alert in ALERTS if alert.name == name)
    document = yaml.safe_load(yaml.safe_dump(rules()))
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(document))
    annotations = {**alert.rule()["annotations"], "summary": case.summary}  # type: ignore[dict-item]
    expected = {
        "exp_labels": {**case.labels, "severity": alert.severity},
        "exp_annotations": annotations,
    }

    def looked_at(at: str, found: list[dict[str, Any]]) -> dict[str, Any]:
        return {"eval_time": at, "alertname": name, "exp_alerts": found}

    firing = [looked_at(case.at, [expected])]
    if case.before:
        firing.append(looked_at(case.before, []))
    tests = [
        {"interval": "1m", "input_series": _series(series), "alert_rule_test": looks}
        for series, looks in ((case.firing, firing), (case.quiet, [looked_at(case.at, [])]))
    ]
    (tmp_path / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _series(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": series, "values": value} for series, value in values.items()]
