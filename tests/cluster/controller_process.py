"""``kvtier-operator controller`` as a process, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from tests.support import controllers

STOP_SECONDS = 10


class Process:
    """The command, with settings in a file, logging into one."""

    def __init__(self, cluster: Any, home: Path, namespace: str, **controller: Any) -> None:
        self.home = home
        self.log = home / "controller.log"
        settings = controllers.settings(
            namespace,
            storage={"createVolumes": True},
            allowedVolumes=[
                {"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/kv"}}
            ],
            # Slow enough that a kill finds some policies done and some not started.
            controller={"maxReconcilesPerSecond": 8, **controller},
        )
        self._settings = home / "settings.yaml"
        self._settings.write_text(yaml.safe_dump(settings.model_dump(mode="json", by_alias=True)))
        self._cluster = cluster
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvtier_operator.main", "controller"),
                    *("--settings", str(self._settings), "--log-format", "json"),
                    *(
                        "--kubeconfig",
                        str(self._cluster.kubeconfig),
                        "--context",
                        self._cluster.context,
                    ),
                ],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
            )

    def end(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)

    def lines(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        return [
            json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")
        ]

    def ask(self, path: str) -> tuple[int, str]:
        ports = [line["port"] for line in self.lines() if "port" in line]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, IndexError):
            return 0, ""
