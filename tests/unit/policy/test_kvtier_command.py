"""The `kvtier` command: what it prints, where, and with which exit status."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.policies import changed, complete_policy

from kvtier.cli import faults
from kvtier.cli.main import main
from kvtier.config.loader import load
from kvtier.scorecard.runner import ScorecardRow

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A file with a policy of RAM and a directory of this machine."""
    document = changed(complete_policy(), {"spec.tiers": complete_policy()["spec"]["tiers"][:2]})
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


class Outcome:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def kvtier(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


class TestValidate:
    def test_a_valid_policy(self, kvtier: Any, policy: Path) -> None:
        document = yaml.safe_load(policy.read_text())
        del document["spec"]["monitoring"]
        del document["spec"]["tiers"][1]["lookupTimeoutMilliseconds"]
        policy.write_text(yaml.safe_dump(document))
        outcome = kvtier("validate", policy)
        assert (outcome.status, outcome.err) == (0, "")
        assert outcome.out == f"{policy}: default/chat-70b valid\n"

    def test_fields_without_effect_give_warnings_and_do_not_fail(
        self, kvtier: Any, policy: Path
    ) -> None:
        outcome = kvtier("validate", policy)
        assert outcome.status == 0
        assert {line.split(": ")[1] for line in outcome.err.splitlines()} == {
            "spec.monitoring.podMonitor",
        }
        (entry,) = kvtier("validate", "--json", policy).json["files"][0]["policies"]
        assert [each.split(": ")[0] for each in entry["warnings"]] == [
            line.split(": ")[1] for line in outcome.err.splitlines()
        ]

    def test_errors_go_to_standard_error_with_status_two(self, kvtier: Any, tmp_path: Path) -> None:
        bad = tmp_path / "bad.yaml"
        bad.write_text(yaml.safe_dump(changed(complete_policy(), {"spec.chunkTokens": 7})))
        outcome = kvtier("validate", bad)
        assert (outcome.status, outcome.out) == (2, "")
        message = "spec.chunkTokens: Invalid value: 7: must be a multiple of 16 from 16 to 65536"
        assert outcome.err == f"{bad}: {message}\n"

    def test_an_invalid_file_does_not_stop_the_check_of_the_others(
        self, kvtier: Any, policy: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "empty.yaml").write_text("")
        outcome = kvtier("validate", tmp_path / "none.yaml", tmp_path / "empty.yaml", policy)
        assert outcome.status == 2
        assert "No such file" in outcome.err
        assert "the file is empty" in outcome.err
        assert "default/chat-70b valid" in outcome.out

    def test_json(self, kvtier: Any, policy: Path, tmp_path: Path) -> None:
        bad = tmp_path / "bad.yaml"
        bad.write_text(
            policy.read_text()
            + "---\n"
            + yaml.safe_dump(changed(complete_policy(), {"spec.chunkTokens": 7}))
        )
        outcome = kvtier("validate", "--json", policy, bad)
        assert outcome.status == 2
        assert outcome.json["valid"] is False
        good, mixed = outcome.json["files"]
        assert (good["valid"], good["policies"][0]["name"]) == (True, "chat-70b")
        assert [entry["where"] for entry in mixed["policies"]] == ["document 0", "document 1"]
        detail = "must be a multiple of 16 from 16 to 65536"
        assert mixed["policies"][1]["errors"] == [
            {
                "field": "spec.chunkTokens",
                "type": "Invalid value",
                "value": "7",
                "detail": detail,
                "message": f"spec.chunkTokens: Invalid value: 7: {detail}",
            }
        ]

    def test_json_output_is_valid_for_any_file_content(self, kvtier: Any, tmp_path: Path) -> None:
        path = tmp_path / "bad.yaml"
        path.write_text('{kind: "\\ud800"}')
        outcome = kvtier("validate", "--json", path)
        assert outcome.status == 2
        assert not outcome.json["valid"]

    def test_a_policy_defined_twice_is_a_warning(self, kvtier: Any, policy: Path) -> None:
        policy.write_text(policy.read_text() + "---\n" + policy.read_text())
        outcome = kvtier("validate", policy)
        assert outcome.status == 0
        assert "default/chat-70b is defined more than once" in outcome.err

    def test_reads_standard_input(
        self, kvtier: Any, policy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(policy.read_bytes())))
        assert kvtier("validate", "-").out == "standard input: default/chat-70b valid\n"

    def test_file_content_is_shown_unchanged(self, kvtier: Any, tmp_path: Path) -> None:
        bad = tmp_path / "bad.yaml"
        bad.write_text(
            yaml.safe_dump(changed(complete_policy(), {"spec.selection": "[red]x[/red]"}))
        )
        assert 'Unsupported value: "[red]x[/red]"' in kvtier("validate", bad).err


class TestRender:
    def test_prints_all_kubernetes_documents(self, kvtier: Any, policy: Path) -> None:
        outcome = kvtier("render", "-f", policy)
        assert outcome.status == 0
        rendered = list(yaml.safe_load_all(outcome.out))
        assert [document["metadata"]["name"] for document in rendered] == [
            "chat-70b-live",
            "chat-70b-structural",
        ]
        assert kvtier("render", "-f", policy, "--json").json["items"] == rendered
        assert json.loads(rendered[0]["data"]["live.json"])["minLoadTokens"] == 512

    def test_writes_a_topology(self, kvtier: Any, policy: Path, tmp_path: Path) -> None:
        target = tmp_path / "topology"
        outcome = kvtier(
            "render",
            "-f",
            policy,
            "--topology",
            target,
            "--tier-path",
            f"nvme={tmp_path}/kv",
            "--run-directory",
            tmp_path / "run",
            "--http",
            "[::1]:0",
            "--daemon",
            "Sidecar",
            "--generation",
            3,
        )
        assert (outcome.status, outcome.out) == (0, f"{target}\n")
        document = load(target).structural
        assert document.tiers[1].model_dump()["path"] == f"{tmp_path}/kv"
        assert (document.run_directory, document.http.host, document.http.port) == (
            f"{tmp_path}/run",
            "::1",
            0,
        )
        assert (document.daemon, document.live.generation) == ("Sidecar", 3)

    def test_prints_the_topology_as_json(self, kvtier: Any, policy: Path, tmp_path: Path) -> None:
        answer = kvtier("render", "-f", policy, "--topology", tmp_path / "t", "--json").json
        assert answer["directory"] == str(tmp_path / "t")
        assert answer["structural"] == json.loads((tmp_path / "t" / "structural.json").read_text())
        assert answer["live"] == json.loads((tmp_path / "t" / "live.json").read_text())

    def test_prints_arguments_for_a_shell_and_for_programs(
        self, kvtier: Any, policy: Path, tmp_path: Path
    ) -> None:
        words = shlex.split(kvtier("render", "-f", policy, "--engine-args").out)
        assert json.loads(words[1])["kv_connector_extra_config"] == {
            "topology": "/etc/kvtier/topology"
        }
        answer = kvtier(
            "render", "-f", policy, "--engine-args", "--topology", tmp_path / "t", "--json"
        ).json
        assert json.loads(answer[1])["kv_connector_extra_config"] == {
            "topology": str(tmp_path / "t")
        }
        assert (tmp_path / "t" / "structural.json").exists()

    def test_prints_the_configuration_of_another_connector_and_its_gaps(
        self, kvtier: Any, policy: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "other.yaml"
        document = yaml.safe_load(policy.read_text())
        document["spec"].setdefault("engine", {}).update(connector="Offloading", localRanks=1)
        document["spec"]["minLoadTokens"] = 640
        other.write_text(yaml.safe_dump(document))
        outcome = kvtier("render", "-f", other, "--engine-args")
        assert json.loads(shlex.split(outcome.out)[1])["kv_connector"] == "OffloadingConnector"
        assert "spec.minLoadTokens: Forbidden: vLLM's offloading has no such setting" in outcome.err
        answer = kvtier("render", "-f", other, "--engine-env", "--json").json
        assert json.loads(answer["KVTIER_TRANSFER_CONFIG"])["kv_connector"] == "OffloadingConnector"
        assert "KVTIER_TOPOLOGY" not in answer
        refused = kvtier("render", "-f", other, "--topology", tmp_path / "t")
        assert (refused.status != 0, "--topology" in refused.err) == (True, True)

    def test_prints_the_environment(
        self, kvtier: Any, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_PLUGINS", "other")
        outcome = kvtier(
            "render",
            "-f",
            policy,
            "--topology",
            tmp_path / "t",
            "--engine-env",
            "--payload",
            tmp_path / "p",
            "--env",
            "PYTHONPATH=/x",
            "--env",
            "VLLM_PLUGINS",
            "--env",
            "PYTHONHASHSEED=3",
        )
        assert outcome.out.splitlines() == [
            f"KVTIER_TOPOLOGY={tmp_path}/t",
            f"PYTHONPATH={tmp_path}/p:/x",
            "PYTHONHASHSEED=3",
            "VLLM_PLUGINS=other,kvtier",
        ]
        assert "contains no connector" in outcome.err
        assert "PYTHONHASHSEED is 3" in outcome.err

    def test_a_variable_that_is_not_set_is_ignored(
        self, kvtier: Any, policy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        outcome = kvtier("render", "-f", policy, "--engine-env", "--env", "VLLM_PLUGINS", "--json")
        assert outcome.json == {"KVTIER_TOPOLOGY": "/etc/kvtier/topology", "PYTHONHASHSEED": "0"}

    def test_renders_the_same_every_time(self, kvtier: Any, policy: Path) -> None:
        assert kvtier("render", "-f", policy).out == kvtier("render", "-f", policy).out

    @pytest.mark.parametrize(
        ("options", "part"),
        [
            (["--tier-path", "nvme=/x"], "--tier-path"),
            (["--http", "127.0.0.1:1"], "--http"),
            (["--env", "A=b"], "--env"),
            (["--payload", "/p"], "--payload"),
            (["--engine-args", "--engine-env"], "--engine-args"),
            (["--topology", "T", "--tier-path", "nvme"], "NAME=DIR"),
            (["--topology", "T", "--tier-path", "other=/x"], "nvme"),
            (
                ["--topology", "T", "--tier-path", "nvme=/x", "--tier-path", "nvme=/y"],
                "set each tier once",
            ),
            (["--topology", "T", "--run-directory", "/dev/shm/" + "x" * 100], "runDirectory"),
            (["--topology", "T", "--http", "9400"], "HOST:PORT"),
            (["--topology", "T", "--http", "h:99999"], "HOST:PORT"),
            (["--engine-env", "--env", "=x"], "KEY=VALUE"),
            (["--policy", "other"], "chat-70b"),
            (["--topology", "T", "--daemon", "Other"], "Engine"),
            (["--generation", "-1"], "0"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else None,
    )
    def test_an_invalid_combination_of_options_is_an_error(
        self, kvtier: Any, policy: Path, tmp_path: Path, options: list[str], part: str
    ) -> None:
        words = [str(tmp_path / "T") if word == "T" else word for word in options]
        outcome = kvtier("render", "-f", policy, *words)
        assert (outcome.status, outcome.out) == (2, "")
        assert part in outcome.err
        assert not (tmp_path / "T").exists()

    def test_two_tiers_must_not_share_a_directory(
        self, kvtier: Any, policy: Path, tmp_path: Path
    ) -> None:
        document = yaml.safe_load(policy.read_text())
        document["spec"]["tiers"].append({**document["spec"]["tiers"][1], "name": "twin"})
        policy.write_text(yaml.safe_dump(document))
        outcome = kvtier("render", "-f", policy, "--topology", tmp_path / "T")
        assert outcome.status == 2
        assert "twin" in outcome.err
        assert not (tmp_path / "T").exists()

    def test_a_policy_is_selected_by_name(self, kvtier: Any, policy: Path, tmp_path: Path) -> None:
        other = changed(yaml.safe_load(policy.read_text()), {"metadata.name": "other"})
        policy.write_text(policy.read_text() + "---\n" + yaml.safe_dump(other))
        assert len(kvtier("render", "-f", policy, "--json").json["items"]) == 4
        outcome = kvtier("render", "-f", policy, "--topology", tmp_path / "t")
        assert outcome.status == 2
        assert "chat-70b, other" in outcome.err
        assert (
            kvtier("render", "-f", policy, "--topology", tmp_path / "t", "--policy", "other").status
            == 0
        )

    def test_an_invalid_policy_is_an_error_with_all_messages(
        self, kvtier: Any, policy: Path
    ) -> None:
        policy.write_text(
            yaml.safe_dump(changed(complete_policy(), {"spec.chunkTokens": 7, "spec.zzz": 1}))
        )
        outcome = kvtier("render", "-f", policy)
        assert (outcome.status, outcome.out) == (2, "")
        assert "spec.chunkTokens: Invalid value: 7" in outcome.err
        assert "spec.zzz" in outcome.err

    def test_the_policy_is_read_from_standard_input(
        self, kvtier: Any, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = io.TextIOWrapper(io.BytesIO(policy.read_bytes()))
        monkeypatch.setattr(sys, "stdin", content)
        outcome = kvtier("render", "-f", "-", "--topology", tmp_path / "t")
        assert (outcome.status, outcome.err) == (0, "")
        assert (tmp_path / "t" / "structural.json").exists()

    def test_a_missing_file_is_an_error(self, kvtier: Any, tmp_path: Path) -> None:
        outcome = kvtier("render", "-f", tmp_path / "none.yaml")
        assert outcome.status == 1
        assert "none.yaml" in outcome.err


class TestExplain:
    @pytest.mark.parametrize(
        "name",
        [
            "spec.tiers.fileSystem.capacity",
            "spec.tiers[].fileSystem.capacity",
            "spec.tiers[1].fileSystem.capacity",
            "tiers.fileSystem.capacity",
            "kvtp.spec.tiers.fileSystem.capacity",
        ],
    )
    def test_a_field_is_found_by_any_form_of_its_path(self, kvtier: Any, name: str) -> None:
        outcome = kvtier("explain", name)
        assert outcome.status == 0
        for part in (
            "spec.tiers.fileSystem.capacity",
            "quantity",
            "live: applies to running engines",
        ):
            assert part in outcome.out

    def test_json(self, kvtier: Any) -> None:
        answer = kvtier("explain", "spec.chunkTokens", "--json").json
        assert answer == {
            "path": "spec.chunkTokens",
            "type": "integer",
            "description": "Number of tokens in a chunk, the unit of storage and lookup. If not "
            "set, 64, and 256 with another connector than KVTier.",
            "required": False,
            "default": None,
            "change": "structural",
            "accepted": "a multiple of 16 from 16 to 65536",
            "enum": [],
            "rules": [],
            "fields": [],
        }

    def test_an_object_lists_its_fields_and_rules(self, kvtier: Any) -> None:
        answer = kvtier("explain", "spec.tiers.fileSystem", "--json").json
        assert "spec.tiers.fileSystem.readThreads" in [field["path"] for field in answer["fields"]]
        assert "lowWatermarkPercent: must be below highWatermarkPercent" in answer["rules"]

    def test_without_a_field_it_shows_the_tree(self, kvtier: Any) -> None:
        assert "claimTemplate object S" in kvtier("explain").out
        paths = [field["path"] for field in kvtier("explain", "--json").json["fields"]]
        assert "spec.tiers[].fileSystem.volume.nfs.server" in paths
        assert "status.conditions[].type" in paths

    @pytest.mark.parametrize(
        ("name", "part"),
        [
            ("spec.tiers.fileSystem.capasity", "did you mean spec.tiers.fileSystem.capacity?"),
            ("spec.teirs", "did you mean spec.tiers?"),
            ("spec.capacity", "spec.tiers[].memory.capacity"),
            ("spec.chunkTokens.more", "has no subfields"),
            ("spec.breaker.zzz", "failureThreshold, periodSeconds"),
        ],
    )
    def test_an_unknown_field_is_an_error_with_the_closest_name(
        self, kvtier: Any, name: str, part: str
    ) -> None:
        outcome = kvtier("explain", name)
        assert (outcome.status, outcome.out) == (2, "")
        assert part in outcome.err

    def test_every_field_can_be_explained(self, kvtier: Any) -> None:
        for field in kvtier("explain", "--json").json["fields"]:
            if "<key>" not in field["path"]:
                assert kvtier("explain", field["path"]).status == 0, field["path"]


class TestPayload:
    def test_an_interpreter_finds_the_plugin_in_the_payload(
        self, kvtier: Any, tmp_path: Path
    ) -> None:
        assert kvtier("payload", tmp_path / "p").out == f"{tmp_path / 'p'}\n"
        program = (
            "import importlib.metadata as m, kvtier; "
            "print(kvtier.__file__); "
            "entries = m.entry_points(group='vllm.general_plugins'); "
            "print([entry.value for entry in entries if entry.name == 'kvtier'])"
        )
        found = subprocess.run(
            [sys.executable, "-S", "-c", program],
            env={"PYTHONPATH": str(tmp_path / "p")},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert found.splitlines() == [
            str(tmp_path / "p" / "kvtier" / "__init__.py"),
            "['kvtier.engines.vllm.plugin:register']",
        ]

    def test_replaces_an_existing_payload_and_keeps_other_files(
        self, kvtier: Any, tmp_path: Path
    ) -> None:
        (tmp_path / "kvtier-0.0.1.dist-info").mkdir()
        (tmp_path / "kvtier").mkdir()
        (tmp_path / "kvtier" / "gone.py").write_text("")
        (tmp_path / "mine.txt").write_text("")
        for _ in range(2):
            answer = kvtier("payload", tmp_path, "--json").json
        assert answer["directory"] == str(tmp_path)
        names = sorted(path.name for path in tmp_path.iterdir())
        metadata = f"kvtier-{answer['version']}.dist-info"
        assert names == ["kvtier", metadata, "kvtier-atom", "mine.txt"]
        assert not (tmp_path / "kvtier" / "gone.py").exists()
        assert not list(tmp_path.rglob("__pycache__"))

    def test_can_be_read_by_other_users(self, kvtier: Any, tmp_path: Path) -> None:
        kvtier("payload", tmp_path / "p")
        for path in [tmp_path / "p", *(tmp_path / "p").rglob("*")]:
            assert path.stat().st_mode & 0o044 == 0o044, path


class TestTables:
    @pytest.mark.parametrize("columns", ["80", "20"])
    @pytest.mark.parametrize("forced", ["", "1"])
    def test_a_table_in_a_pipe_has_its_full_width(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        columns: str,
        forced: str,
    ) -> None:
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("TERM", "dumb")
        if forced:
            monkeypatch.setenv("FORCE_COLOR", forced)
        row = ScorecardRow("hang", "pass", "r" * 300, notes=["[red]not markup[/red]"])
        faults.show([row], [])
        lines = capsys.readouterr().out.splitlines()
        (line,) = [line for line in lines if "hang" in line]
        assert "r" * 300 + "; [red]not markup[/red]" in line
        assert "wait beyond limit (s)" in "".join(lines)


class TestWithoutPackages:
    def test_the_command_names_the_packages_to_install(self, tmp_path: Path) -> None:
        for missing in ("typer", "rich"):
            blocked = tmp_path / missing
            blocked.mkdir()
            (blocked / f"{missing}.py").write_text(
                f"raise ModuleNotFoundError('No module named {missing}', name='{missing}')"
            )
            outcome = _run(["-m", "kvtier.cli.main", "validate", "x"], [blocked])
            assert (outcome.returncode, outcome.stdout) == (1, "")
            assert "install kvtier[cli]" in outcome.stderr

    def test_rendering_needs_only_pydantic_and_yaml(self) -> None:
        program = (
            "import sys, kvtier.payload, kvtier.cli.render;"
            "import kvtier.config.loader, kvtier.config.writer;"
            "import kvtier_operator.api.documents, kvtier_operator.render.engine;"
            "import kvtier_operator.render.documents;"
            "foreign = {name.split('.')[0] for name in sys.modules} & "
            "{'typer', 'rich', 'click', 'torch', 'vllm', 'zmq', 'kubernetes', 'msgspec', 'numpy'};"
            "print(sorted(foreign))"
        )
        assert _run(["-c", program], []).stdout == "[]\n"

    def test_version_and_help(self, kvtier: Any) -> None:
        assert kvtier("--version").out.startswith("kvtier ")
        assert "validate" in kvtier("--help").out
        assert kvtier("nonsense").status == 2


def _run(arguments: list[str], path: list[Path]) -> subprocess.CompletedProcess[str]:
    sources = [*path, REPOSITORY / "connector", REPOSITORY / "operator"]
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PYTHONPATH": ":".join(str(source) for source in sources)},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
