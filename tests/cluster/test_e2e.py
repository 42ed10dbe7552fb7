"""End-to-end test. `make demo-cluster` runs the same steps and prints the results."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vllm is not installed: install the extra `engine`",
    ),
    pytest.mark.engine,
]


@pytest.fixture(scope="module")
def loop(node_cluster: Any, node_images: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The loop, run once; and its result."""
    from e2e import EndToEndRun

    from kvtier.cli.demo_display import Display

    done = EndToEndRun(
        node_cluster, tmp_path_factory.mktemp("loop"), Display(fancy=False), images_loaded=True
    )
    return done, done.run()


def test_tokens_equal_those_of_an_engine_without_kvtier_at_every_step(loop: Any) -> None:
    assert [(row.stage, row.prompt) for row in loop[0].rows if not row.equal] == []
    assert loop[1]["identical_tokens"]


def test_the_engine_is_attached_with_its_command_and_memory_limit_unchanged(loop: Any) -> None:
    assert loop[1]["attached_pods"] == 1
    assert loop[1]["command_untouched"]
    assert loop[1]["engine_memory_limit_unchanged"]


def test_an_empty_gpu_cache_is_filled_from_ram(loop: Any) -> None:
    assert loop[1]["loaded_tokens_ram"] == 2 * 768


def test_the_memory_tier_survives_a_restart_of_the_engine_container(loop: Any) -> None:
    assert loop[1]["loaded_tokens_ram_after_container_restart"] == 2 * 768


def test_the_file_tier_survives_a_replacement_of_the_pod(loop: Any) -> None:
    # A brings the shared prefix into RAM, where B finds it.
    by_prompt = {
        row.prompt: (row.ram, row.file) for row in loop[0].rows if row.stage == "pod replaced"
    }
    assert by_prompt == {"A": (0, 768), "B": (512, 256)}


def test_a_changed_weight_changes_what_the_running_engine_loads_without_a_new_pod(
    loop: Any,
) -> None:
    assert loop[1]["pod_untouched"]
    assert loop[1]["live_change_seconds"] < 120
    assert (
        loop[1]["loaded_tokens_ram_after_live_change"],
        loop[1]["loaded_tokens_file_after_live_change"],
    ) == (512, 0)


def test_kubectl_shows_the_result(loop: Any) -> None:
    headings, row = loop[0].output.get.splitlines()
    assert headings.split()[:4] == ["NAME", "READY", "REASON", "PODS"]
    assert row.split()[1] == "True"
    assert "1/1" in row
    for word in ("Attached", "StorageReady", "TiersHealthy", "Tuned", "disk", "ram", "Events"):
        assert word in loop[0].output.describe


def test_every_panel_of_the_dashboards_has_data(loop: Any) -> None:
    """Panels that have data only after a fault are left out. What else is empty says what the
    policy would need.
    """
    from demo_dashboard import NO_DATA

    if loop[0].dashboards.missing:
        pytest.skip(f"{loop[0].dashboards.missing} is missing")
    boards = {board for board, *_ in loop[0].panels}
    assert boards == {"On call", "Capacity", "Operator"}
    empty = {panel: why for _, panel, why, value in loop[0].panels if value == NO_DATA}
    assert empty == {"State of volumes": "needs a tier with several volumes"}
