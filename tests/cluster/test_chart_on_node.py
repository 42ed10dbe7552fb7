"""Upgrading, uninstalling and reinstalling the chart while an engine serves."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)

import charts
import operators
import stub_engine_pods
from nodes import wait_for


class Caller:
    """Asks an engine again and again; ``failed`` is what went wrong."""

    def __init__(self, pod: dict[str, Any]) -> None:
        self.loaded, self.failed = 0, list[str]()
        self._pod, self._stop = pod, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Caller:  # noqa: PYI034
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            try:
                done = stub_engine_pods.do(self._pod, "load", n=8)["done"]
            except OSError as error:
                self.failed.append(str(error))
                continue
            self.loaded += done
            if done != 8:
                self.failed.append(
                    f"{done} of 8 chunks loaded at {time.time():.1f}: "
                    f"{stub_engine_pods.seen(self._pod)}"
                )


def test_an_engine_serves_from_its_tiers_while_the_chart_is_upgraded_and_reinstalled(
    operator_on_node: Any, tmp_path: Path
) -> None:
    release, cluster = operator_on_node.release, operator_on_node.cluster
    with operator_on_node.namespace("lifecycle") as place:
        place.apply_policy(stub_engine_pods.policy())
        place.apply(stub_engine_pods.deployment())
        pod = place.ready()
        place.attached(pod)
        assert stub_engine_pods.do(pod, "store", n=8)["done"] == 8
        with Caller(pod) as caller:
            release.upgrade(
                operator_on_node.values, chart=charts.changed_chart(tmp_path, "0.2.0", "laterField")
            )
            wait_for("the operator runs", lambda: operators.available(cluster), 120, period=0.5)
            assert place.condition("Ready")["status"] == "True"
            time.sleep(3)
            release.uninstall()
            wait_for("the operator is gone", lambda: "kvtier" not in _pods(cluster), 60, period=0.5)
            # A new pod starts, without tiers: no webhook is called.
            plain = stub_engine_pods.deployment(name="later")
            place.apply(plain)
            assert not stub_engine_pods.injected(place.ready(app="later"))
            operators.install(cluster, release, operator_on_node.values)
            wait_for(
                "the pod is attached again",
                lambda: place.condition("Attached").get("status") == "True",
                60,
            )
            time.sleep(3)
        assert caller.failed == []
        assert caller.loaded > 80
        after = place.pods()[0]
        assert after["metadata"]["uid"] == pod["metadata"]["uid"]
        assert {each["restartCount"] for each in _statuses(after)} == {0}
        # Neither an upgrade nor a reinstallation makes pods outdated.
        counts = place.policy()["status"]["pods"]
        assert (counts["attached"], counts["current"], counts.get("outdated", 0)) == (1, 1, 0)


def _pods(cluster: Any) -> str:
    return str(cluster.kubectl("-n", charts.NAMESPACE, "get", "pods", "-o", "name"))


def _statuses(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["status"]["containerStatuses"], *pod["status"]["initContainerStatuses"]]
