"""``kvtier doctor``: findings with severity and remedy, and an exit status."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support import pod_objects, pods
from tests.unit.commands.test_top import report
from tests.unit.commands.test_why import Answers, installed, policy_document

from kvtier import __version__
from kvtier.cli.cluster.access import ClusterReader
from kvtier.cli.cluster.doctor_pod import ExecError, PodDoctorOptions, examine_pod
from kvtier.cli.doctor import findings, local, mounts
from kvtier.cli.doctor.findings import Finding, Severity
from kvtier.cli.doctor.local import CheckedDirectory, DoctorOptions
from kvtier.cli.main import main
from kvtier.config import loader
from kvtier_operator.api.pods import Pod
from kvtier_operator.controller.pods.reports import NO_REPORT, LastReport
from kvtier_operator.kube.resources import PODS

MIB = 1 << 20
MOUNT_INFO = """\
20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
21 20 0:5 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k
22 20 0:44 / /mnt/nfs rw,relatime - nfs4 nas:/kv rw,vers=4.2,hard,timeo=600
23 20 0:45 / /mnt/soft rw,noatime - nfs4 nas:/kv rw,vers=4.2,soft,timeo=50,retrans=2
24 20 0:46 / /mnt/ro ro,relatime - xfs /dev/nvme0n1 rw
25 20 0:47 / /mnt/with\\040space rw - xfs /dev/nvme1n1 rw,strictatime
26 20 0:48 / /layer rw - overlay overlay rw
broken line
"""


def found(check: str, everything: Sequence[Finding]) -> list[Finding]:
    return [each for each in everything if each.check == check]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "kv").mkdir()
    document = {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": "chat"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "vllm"}},
            "tiers": [
                {"name": "ram", "memory": {"capacity": "16Mi"}},
                {
                    "name": "disk",
                    "fileSystem": {
                        "capacity": "1Gi",
                        "sharing": "Node",
                        "volume": {"hostPath": {"path": str(tmp_path / "kv")}},
                    },
                },
            ],
        },
    }
    path = tmp_path / "chat.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def topology(policy: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "topology"
    assert main(["render", "-f", str(policy), "--topology", str(directory)]) == 0
    return directory


def test_a_machine_that_can_serve(
    topology: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    arguments = ["doctor", "--topology", str(topology), "--size", "2Mi", "-o", "json"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    checks = {each["check"]: each for each in document["findings"]}
    assert checks.keys() >= {
        "topology",
        "versions",
        "shared-memory",
        "locked-memory",
        "mount",
        "rights",
        "space",
        "direct-io",
        "speed",
    }
    assert all(each["remedy"] for each in document["findings"] if each["severity"] == "error")
    assert "GB/s" in checks["speed"]["message"]
    assert os.listdir(tmp_path / "kv") == [], "the test file is removed"


def test_a_missing_directory_is_an_error_with_the_command_that_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none"
    assert main(["doctor", "--path", str(missing)]) == 1
    out = capsys.readouterr().out
    assert f"install -d -o root -g 3000 -m 2770 {missing}" in out
    assert out.splitlines()[-1].startswith("1 error")


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    everything = local.examine(DoctorOptions(directories=(str(file),), size_bytes=0))
    assert [each.severity for each in found("rights", everything)] == [Severity.ERROR]


def test_a_mount_that_does_not_answer_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The child that hangs is killed, and not waited for."""
    (tmp_path / "kvtier.py").write_text("")
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(hanging))
    began = time.monotonic()
    measured = local.measure("/mnt/x", 0, 0.5)
    assert time.monotonic() - began < 60
    assert measured["error"] == "does not answer within 0.5 s"


def test_a_topology_that_cannot_be_read(tmp_path: Path) -> None:
    everything = local.examine(DoctorOptions(topology=tmp_path))
    (error,) = found("topology", everything)
    assert error.severity is Severity.ERROR
    assert findings.exit_status(everything) == 1


def test_mounts_are_found_by_the_longest_directory() -> None:
    parsed = mounts.parse(MOUNT_INFO.splitlines())
    kinds = {
        path: getattr(mounts.mount_of(path, parsed), "kind", None)
        for path in ("/", "/mnt/nfs/kv", "/mnt/nfsx", "/dev/shm", "/mnt/with space/kv")
    }
    assert list(kinds.values()) == ["ext4", "nfs4", "ext4", "tmpfs", "xfs"]


@pytest.mark.parametrize(
    ("path", "severities", "says"),
    [
        ("/mnt/nfs", ["error"], "soft,timeo=50,retrans=2"),
        ("/mnt/soft", ["ok"], ""),
        ("/mnt/ro", ["error", "ok"], "rw"),
        ("/layer", ["warning"], "volume"),
        ("/dev/shm", ["warning"], "memory tier"),
        ("/mnt/with space", ["ok", "info"], "noatime"),
    ],
)
def test_mount_options(path: str, severities: list[str], says: str) -> None:
    mount = mounts.mount_of(path, mounts.parse(MOUNT_INFO.splitlines()))
    assert mount is not None
    results = list(local.mount_options(CheckedDirectory(path, path), mount))
    assert [each.severity.value for each in results] == severities
    assert says in " ".join(each.remedy for each in results)


def measured(**values: Any) -> dict[str, Any]:
    return {
        "directory": True,
        "uid": 0,
        "gid": 3000,
        "mode": 0o2770,
        "sizeBytes": 100 << 30,
        "availableBytes": 50 << 30,
        "files": 1 << 20,
        "availableFiles": 1 << 20,
        "writable": True,
        "directIO": True,
        "readBytesPerSecond": 3_000_000_000,
        "writeBytesPerSecond": 2_000_000_000,
        "readLatencySeconds": 0.0001,
        "testedBytes": 64 << 20,
        **values,
    }


@pytest.mark.parametrize(
    ("values", "tier", "severity", "says"),
    [
        ({}, {}, "ok", ""),
        ({"writable": False, "writeError": "Permission denied"}, {}, "error", "install -d"),
        ({"gid": 0}, {}, "warning", "install -d"),
        ({"mode": 0o777}, {}, "warning", "install -d"),
        ({}, {"capacity_bytes": 200 << 30}, "error", "fileSystem.capacity"),
        ({"availableFiles": 10}, {}, "warning", "inodes"),
        ({"directIO": False}, {"direct_io": "Always"}, "error", "directIO: Auto"),
        ({"directIO": False}, {}, "info", ""),
        ({"readBytesPerSecond": 20_000_000}, {}, "warning", "explain-plan"),
        ({"readLatencySeconds": 0.5}, {}, "warning", "explain-plan"),
    ],
)
def test_what_was_measured_is_judged(
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    tier: dict[str, Any],
    severity: str,
    says: str,
) -> None:
    monkeypatch.setattr(local, "measure", lambda *arguments: measured(**values))
    directory = CheckedDirectory("tier disk", "/mnt/x", storage_gid=3000, **tier)
    results = list(local.storage(directory, (), DoctorOptions()))
    worst = min(results, key=lambda each: findings.ORDER.index(each.severity))
    assert worst.severity.value == severity
    assert says in worst.remedy


def test_a_pool_that_does_not_fit_is_an_error(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = yaml.safe_load(policy.read_text())
    document["spec"]["tiers"][0]["memory"]["capacity"] = "900Ti"
    policy.write_text(yaml.safe_dump(document))
    directory = tmp_path / "large"
    assert main(["render", "-f", str(policy), "--topology", str(directory)]) == 0
    everything = local.examine(DoctorOptions(topology=directory, size_bytes=0))
    (shared,) = found("shared-memory", everything)
    assert shared.severity is Severity.ERROR
    assert "reduce the memory tier" in shared.remedy
    monkeypatch.setattr(local, "_cgroup_limit", lambda: 64 * MIB)
    everything = list(local.shared_memory(loader.load(directory), mounts.mounts()))
    assert [each.severity for each in found("memory-limit", everything)] == [Severity.ERROR]


def test_a_pool_on_a_disk_is_an_error(topology: Path) -> None:
    on_disk = mounts.parse(["20 1 8:1 / / rw - ext4 /dev/sda1 rw"])
    (error,) = local.shared_memory(loader.load(topology), on_disk)
    assert error.severity is Severity.ERROR
    assert "not in memory" in error.message


@pytest.mark.parametrize(
    ("seed", "severity"),
    [("0", "ok"), ("7", "warning"), ("random", "error"), (None, "error")],
)
def test_the_hash_seed_of_an_engines_environment(
    topology: Path, seed: str | None, severity: str
) -> None:
    environment = {"KVTIER_TOPOLOGY": str(topology)}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    (result,) = local.hash_seed(loader.load(topology), environment)
    assert result.severity.value == severity
    assert list(local.hash_seed(loader.load(topology), {})) == [], "this is no engine"


def pod_findings(
    pod: dict[str, Any], answer: LastReport = NO_REPORT, run: Any = None
) -> tuple[list[Finding], ClusterReader]:
    reader = ClusterReader(installed((PODS, pod)), "serving")
    options = PodDoctorOptions(inside=run is not None)
    return asyncio.run(examine_pod(reader, "chat-1", Answers(answer), options, run)), reader


def test_a_pod_with_a_broken_tier_and_images_of_two_releases() -> None:
    pod = pods.running(pods.injected_pod())
    pod["metadata"]["annotations"]["kvtier.io/version"] = __version__
    pod["metadata"]["annotations"]["kvtier.io/notes"] = '["PYTHONHASHSEED is 7"]'
    pod["spec"]["containers"][0]["env"] = [{"name": "PYTHONHASHSEED", "value": "7"}]
    everything, _ = pod_findings(pod, report())
    severities = {(each.check, each.severity.value) for each in everything}
    assert severities >= {
        ("attached", "ok"),
        ("injection-note", "warning"),
        ("versions", "error"),
        ("hash-seed", "warning"),
        ("memory-limit", "ok"),
        ("tier", "error"),
    }
    assert findings.exit_status(everything) == 1


def test_checks_inside_the_pod_are_added_with_their_place() -> None:
    commands = []

    async def run(pod: Pod, command: Sequence[str]) -> str:
        commands.append(list(command))
        entry = Finding("speed", Severity.WARNING, "tier disk", "slow", "faster disk")
        return "a line of a log\n" + json.dumps(findings.to_json([entry]))

    everything, _ = pod_findings(pods.running(pods.injected_pod()), run=run)
    (speed,) = found("speed", everything)
    assert speed.subject == "chat-1/kvtier-tierd: tier disk"
    assert commands[0][:4] == ["kvtier", "doctor", "-o", "json"]


@pytest.mark.parametrize("output", ["", "{", '{"findings": [7, {"check": 1}]}', "[]"])
def test_a_pod_that_answers_nonsense(output: str) -> None:
    async def run(pod: Pod, command: Sequence[str]) -> str:
        return output

    everything, _ = pod_findings(pods.running(pods.injected_pod()), run=run)
    assert found("speed", everything) == []


def test_a_pod_without_the_sidecar_says_what_to_run_instead() -> None:
    pod = pods.running(pods.injected_pod())
    pod["spec"]["initContainers"] = []

    async def run(pod: Pod, command: Sequence[str]) -> str:
        raise AssertionError("there is no such container")

    _, reader = pod_findings(pod, run=run)
    assert any("no container kvtier-tierd" in each for each in reader.not_checked)


def test_without_the_right_to_exec_it_is_named() -> None:
    async def run(pod: Pod, command: Sequence[str]) -> str:
        raise ExecError("the right to get and create pods/exec is missing")

    _, reader = pod_findings(pods.running(pods.injected_pod()), run=run)
    assert any("pods/exec" in each for each in reader.not_checked)


def test_a_pod_without_tiers_is_an_error_and_says_what_to_do() -> None:
    pod = pods.running(pods.bare_pod())
    pod["spec"]["containers"] = [pod_objects.engine(args=["--nnodes", "2"])]
    everything, _ = pod_findings(pod)
    (attached,) = found("attached", everything)
    assert attached.severity is Severity.ERROR
    assert "run tensor and pipeline parallelism within a pod" in attached.remedy


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "pod-1", "--path", "/tmp"]) == 2
    assert "must not be combined" in capsys.readouterr().err
    assert main(["doctor", "--size", "lots"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["why", "../secrets/x"],
        ["why", ""],
        ["doctor", "a/b"],
        ["why", "a", "-n", "x/../y"],
        ["plan", "-", "--operator-namespace", "A B"],
        ["top", "-n", "-"],
    ],
)
def test_names_cannot_lead_to_other_paths(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = yaml.safe_dump(policy_document()).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(policy)))
    assert main(arguments) == 2
    assert "must be a name" in capsys.readouterr().err


def test_each_volume_of_a_tier_is_checked(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = yaml.safe_load(policy.read_text())
    document["spec"]["tiers"][1]["fileSystem"] = {
        "sharing": "Node",
        "volumes": [
            {"name": name, "capacity": "1Gi", "hostPath": {"path": str(tmp_path / name)}}
            for name in ("d0", "d1")
        ],
    }
    policy.write_text(yaml.safe_dump(document))
    (tmp_path / "d0").mkdir()
    directory = tmp_path / "volumes"
    assert main(["render", "-f", str(policy), "--topology", str(directory)]) == 0
    capsys.readouterr()
    assert main(["doctor", "--topology", str(directory), "--size", "2Mi", "-o", "json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    subjects = {
        each["subject"]: each["severity"] for each in found if "tier disk/" in each["subject"]
    }
    missing = f"tier disk/d1 ({tmp_path / 'd1'})"
    assert subjects[missing] == "error"
    assert any(name.startswith("tier disk/d0 ") for name in subjects)
