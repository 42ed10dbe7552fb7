"""What a command says, however it is written."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvtier_operator.render.command import MAX_TEXT, expanded, read


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({"args": ["--a", "1", "--b=2", "--c", "--d_e", "x"]}, [("a", "1"), ("b", "2"), ("c", ""), ("d-e", "x")]),
        ({"command": ["sh", "-c", "vllm serve m --a 'x y' --b"]}, [("a", "x y"), ("b", "")]),
        ({"command": ["sh", "-c", "vllm serve m \\\n  --a 1 \\\n  --b 2"]}, [("a", "1"), ("b", "2")]),
        (
            {"command": ["sh", "-c", "bash -c 'vllm --a 1' && (vllm --b 2); vllm --c 3;"]},
            [("a", "1"), ("b", "2"), ("c", "3")],
        ),
        ({"command": ["sh", "-c", "vllm --a 'unfinished"]}, [("a", "'unfinished")]),
        ({"args": ["$(A)", "${B:-2}"], "env": [{"name": "A", "value": "-tp"}]}, [("tensor-parallel-size", "2")]),
        ({"args": ["--a", "$$(A)"], "env": [{"name": "A", "value": "1"}]}, [("a", "$$(A)")]),
        ({"env": [{"name": "ARGS", "value": "--a 1"}]}, [("a", "1")]),
        ({"args": ["--a", "1", "--a", "2"]}, [("a", "1"), ("a", "2")]),
        ({}, []),
    ],
)
def test_options_are_found(container: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert list(read(container).options) == expected


def test_the_last_of_several_values_counts() -> None:
    assert read({"args": ["--a", "1", "--a=2"]}).option("a") == "2"
    assert read({"args": ["--a", "1"]}).option("b") is None


def test_a_variable_from_elsewhere_hides_an_earlier_value() -> None:
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)"}, {"name": "A", "valueFrom": {"fieldRef": {}}}]
    assert read({"env": env}).variables == {"B": "1"}


def test_variables_that_expand_without_end_cost_little() -> None:
    env = [{"name": "V0", "value": "--x y " * 1000}]
    env += [{"name": f"V{index}", "value": f"$(V{index - 1})" * 50} for index in range(1, 100)]
    began = time.process_time()
    read({"args": ["$(V99)"] * 1000 + ["sh", "-c", "a 'b \"c " * 50_000], "env": env})
    assert time.process_time() - began < 2
    assert len(expanded("$A" * 100, {"A": "x" * MAX_TEXT})) < 4 * MAX_TEXT
