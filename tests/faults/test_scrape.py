"""A real Prometheus scrapes a tierd that requires a bearer token, as a monitor configures it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.prometheus import Prometheus, Target, needs_prometheus

from kvtier.harness.tierd_testbed import TierdTestbed, environment, wait_for

pytestmark = needs_prometheus


def test_tierd_is_scraped_with_the_token_only(tmp_path: Path) -> None:
    testbed = TierdTestbed(tmp_path / "tierd")
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    token.write_text("secret")
    wrong.write_text("guess")
    command = [sys.executable, "-m", "kvtier.tierd"]
    command += ["--topology", str(testbed.topology_directory), "--token-file", str(token)]
    tierd = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    address = testbed.run_directory / "http.json"
    prometheus: Prometheus | None = None
    try:
        wait_for(address.exists, "tierd serves")
        found = json.loads(address.read_text())
        at = f"{found['host']}:{found['port']}"
        labels = {"namespace": "serving", "pod": "engine-0", "policy": "chat"}
        targets = [Target("with", at, labels, token), Target("without", at, labels, wrong)]
        prometheus = Prometheus(tmp_path / "prometheus", targets)
        running = prometheus
        running.wait_ready()

        def up(job: str) -> list[str]:
            return [each["value"][1] for each in running.query(f'up{{job="{job}"}}')]

        running.wait(lambda: up("with") == ["1"], lambda: str(up("with")))
        running.wait(lambda: up("without") == ["0"], lambda: str(up("without")))
        (info,) = running.query("kvtier_tierd_info")
        assert info["metric"]["namespace"] == "serving"
        assert info["metric"]["policy"] == "chat"
    finally:
        if prometheus is not None:
            prometheus.close()
        tierd.kill()
        tierd.wait(30)
        testbed.close()
    assert not os.path.exists(address)
