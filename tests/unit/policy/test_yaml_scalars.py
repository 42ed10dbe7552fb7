"""Plain scalars have the values that kubectl sends (compared with it in the cluster tests)."""

from __future__ import annotations

import math

import pytest

from kvtier_operator.api.documents import load_policy, parse
from kvtier_operator.api.yaml_scalars import parse_scalar

POLICY = """
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {{name: chat, namespace: serving}}
spec:
  podSelector: {{matchLabels: {{app: {label}}}}}
  chunkTokens: {tokens}
  tiers: [{{name: ram, memory: {{capacity: {capacity}}}}}]
"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1234e56", 1.234e59),
        ("1e3", 1000),
        ("1.5e3", 1500),
        ("1.0", 1),
        ("1.5", 1.5),
        ("y", True),
        ("off", False),
        ("0o100", 64),
        ("0100", 64),
        ("08", 8),
        ("0o8", "0o8"),
        ("0b101", 5),
        ("-0x1F", -31),
        ("1_000", 1000),
        (".1_1", 0.11),
        (".1__1", ".1__1"),
        ("_1", "_1"),
        ("12:30:45", "12:30:45"),
        ("1e400", "1e400"),
        ("2026-11-29", "2026-11-29"),
        ("64Gi", "64Gi"),
        ("tRUE", "tRUE"),
        ("~", None),
        ("-.inf", -math.inf),
        ("18446744073709551615", 18446744073709551615.0),
        ("9223372036854775807", 9223372036854775807),
        ("1" * 5000, "1" * 5000),
    ],
)
def test_a_scalar_has_the_value_that_kubectl_sends(text: str, value: object) -> None:
    found = parse_scalar(text)
    assert (type(found), found) == (type(value), value)


def test_policies_are_read_by_these_rules() -> None:
    policy = load_policy(POLICY.format(label="chat", tokens="2.56e2", capacity="1e9"))
    assert policy.spec.chunk_tokens == 256
    assert policy.spec.tiers[0].memory is not None
    assert policy.spec.tiers[0].memory.capacity.size_bytes == 10**9


@pytest.mark.parametrize(
    ("label", "tokens", "capacity"),
    [
        ("y", "256", "1Gi"),
        ("1e3", "256", "1Gi"),
        ("chat", "12:30:45", "1Gi"),
        ("chat", "256", "1234e56"),
        ("chat", "!!int x", "1Gi"),
        ("chat", "!!timestamp 2026-11-29", "1Gi"),
    ],
)
def test_a_scalar_of_another_type_is_an_error(label: str, tokens: str, capacity: str) -> None:
    (found,) = parse(POLICY.format(label=label, tokens=tokens, capacity=capacity))
    assert found.errors


def test_json_numbers_follow_the_same_rules() -> None:
    text = (
        '{"apiVersion": "kvtier.io/v1alpha1", "kind": "KVTierPolicy", "metadata": {"name": "chat"},'
        ' "spec": {"podSelector": {}, "chunkTokens": 2.56e2, "tiers": [{"name": "ram", "memory":'
        ' {"capacity": "1Gi"}}]}}'
    )
    assert load_policy(text).spec.chunk_tokens == 256
