"""The sizing tables are computed, committed, and agree with the engine's own geometry."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tools.sizing.__main__ import PAGE, page
from tools.sizing.shapes import (
    GIB,
    GPUS,
    MODELS,
    Gpu,
    ModelShape,
    break_even_bytes_per_second,
    gpu_tokens,
    gpus_needed,
    prefill_tokens_per_second,
)

from kvtier.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[3]
LLAMA = next(model for model in MODELS if model.name == "Llama 3.1 8B")


def test_the_page_is_what_the_code_computes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make generate"


def test_the_bytes_per_token_are_those_of_the_default_of_explain_plan() -> None:
    from kvtier.cli.app import explain_plan

    help_text = str(explain_plan.__annotations__["bytes_per_token"])
    assert "131072 for Llama 3 8B" in help_text
    assert LLAMA.kv_bytes_per_token == 131_072


@pytest.mark.parametrize(("share", "loads"), [(0.8, False), (1.25, True)])
def test_the_break_even_speed_is_where_kvtier_begins_to_load(
    share: float, loads: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = next(each for each in GPUS if each.name == "H200")
    speed = share * break_even_bytes_per_second(LLAMA, gpu, 1) / 1e9
    arguments = ["explain-plan", "32768", "--file", str(REPOSITORY / "examples/three-tiers.yaml")]
    arguments += ["--held", "nvme=32768", "--speed", f"nvme=0.1,{speed:.3f}", "--json"]
    arguments += ["--tokens-per-second", str(prefill_tokens_per_second(LLAMA, gpu, 1))]
    assert main([*arguments, "--bytes-per-token", str(LLAMA.kv_bytes_per_token)]) == 0
    assert (json.loads(capsys.readouterr().out)["chosen"] is not None) is loads


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_memory_is_not_sold_twice(model: ModelShape) -> None:
    for gpu in GPUS:
        count = gpus_needed(model, gpu)
        if count is None:
            continue
        held = gpu_tokens(model, gpu, count) * model.kv_bytes_per_token + model.weight_bytes
        assert held <= 0.9 * gpu.gib * GIB * count
        assert gpu_tokens(model, gpu, count) > 0


def test_a_model_that_fits_nowhere_is_left_out() -> None:
    assert gpus_needed(ModelShape("huge", 100, 8, 128, 5000), Gpu("small", 100, 24, 32)) is None


def test_every_row_has_a_number_in_each_column() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| ") and "---" not in line]
    for row in rows[1:]:
        for cell in row.strip("| ").split(" | ")[-2:]:
            assert re.fullmatch(r"[\d.,]+|tokens in .*|break-even.*|prefill.*", cell), row
