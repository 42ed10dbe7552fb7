"""``kvtier validate`` reads YAML as kubectl and the API server do."""

from __future__ import annotations

import json
import math
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvtier_operator.api import documents
from kvtier_operator.api.documents import parse
from kvtier_operator.api.yaml_scalars import parse_scalar

SEED = 20261129
ALPHABET = "000112345789+-..__eExXoObBaAfFtTyYnN:~"
GENERATED = 4_000
KNOWN = """
1234e56 1e3 y n Y N yes no on off true false null ~ 0o100 0100 08 09.5 0x1F 0b101 0o8 12:30:45 1:2
1_000 1__0 1_ _1 +1 -1 +0x1 -0b1 1. .5 -.5 +.5e3 1.0 1e400 -1e400 1e-7 18446744073709551615
18446744073709551616 9223372036854775807 9223372036854775808 -9223372036854775808
-9223372036854775809 2026-11-29 2026-11-29T10:00:00Z 1e18 1e19 1e20 1e21 1e22 64Gi 1.5Gi 1e 0x 0b 0o
0.0 -0 00 0_7 1.2.3 .. . +. 1e+5 1E5 0X1f 0B1 0O7 .1_1 .1__1 ._1 .1_ .1_1e1_0 1_1.5
9007199254740993.0 1234567890123456789.0 True TRUE tRUE Null NULL nULL Yes YES
oN 0e0 -0.0 1e-400
"""
"""Besides generated ones."""
UNUSABLE = (".inf", "-.INF", ".NaN")
"""Numbers that JSON has not."""
INTEGERS = """
256 256.0 2.56e2 0x100 0400 0o400 0b100000000 2_56 1e3 1234e56 y 12:30:45 '256' 08 1e19
"""
SIZES = """
64Gi 1e9 1E9 1234e56 1_000_000 0x4000000 '64Gi' 1.5e9 y 1e400 64000000.0 12:30:45 0o100 ~
9223372036854775806 9223372036854775807 9223372036854775808 '1234e56' '-1' '1e9' '8E'
"""


def scalars() -> list[str]:
    choose = random.Random(SEED)
    found = {
        "".join(choose.choice(ALPHABET) for _ in range(choose.randint(1, 7)))
        for _ in range(GENERATED)
    }
    plain = [text for text in found if not text.endswith(":") and text != "-"]
    return sorted({*plain, *KNOWN.split()})


def policy(text: str = "256", capacity: str = "64Gi", namespace: str = "default") -> str:
    return f"""
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {{name: scalars, namespace: {namespace}}}
spec:
  podSelector: {{matchLabels: {{app: chat}}}}
  chunkTokens: {text}
  tiers:
  - name: ram
    memory:
      capacity: {capacity}
"""


def by_kubectl(cluster: Any, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(cluster.assets / "kubectl"), f"--kubeconfig={cluster.kubeconfig}"]
    command += [f"--context={cluster.context}", "create", "-f", "-", *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    return bool(left == right) or (
        isinstance(left, float) and math.isclose(left, right, rel_tol=1e-15)
    )


def _integer(text: str) -> int | float:
    return int(text) if -(1 << 63) <= int(text) < 1 << 63 else float(text)


def test_scalars_have_the_values_that_kubectl_sends(full_cluster: Any) -> None:
    texts = scalars()
    lines = "".join(f"\n- {text}" for text in texts)
    body = f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: a}}\nvalues:{lines}\n"
    done = by_kubectl(full_cluster, body, "--dry-run=client", "--validate=false", "-o", "json")
    assert done.returncode == 0, done.stderr[-2000:]
    # The JSON of a large float has no exponent; what reads it makes a float of it again.
    sent = json.loads(done.stdout, parse_int=_integer)["values"]
    read = documents._raw_documents(body)[0]["values"]
    different = [
        (text, ours, theirs)
        for text, ours, theirs in zip(texts, read, sent, strict=True)
        if not same(ours, theirs)
    ]
    assert different == []
    assert {type(value) for value in read} == {type(None), bool, int, float, str}
    assert [parse_scalar(text) for text in texts] == read


@pytest.mark.parametrize("text", UNUSABLE)
def test_numbers_that_json_has_not_are_errors_in_both(full_cluster: Any, text: str) -> None:
    body = policy(text)
    assert by_kubectl(full_cluster, body, "--dry-run=client", "--validate=false").returncode != 0
    assert parse(body)[0].errors


@pytest.mark.parametrize("field", ["text", "capacity"])
def test_policies_are_valid_exactly_if_the_api_server_takes_them(
    full_cluster: Any, full_api: Any, nodes: Any, field: str, tmp_path: Path
) -> None:
    from tests.cluster import admission

    different = []
    with admission.definition(full_cluster, full_api, nodes):
        for text in (INTEGERS if field == "text" else SIZES).split():
            body = policy(**{field: text})
            done = by_kubectl(full_cluster, body, "--dry-run=server")
            if (done.returncode == 0) != (not parse(body)[0].errors):
                different.append((text, done.stderr, parse(body)[0].errors))
    assert different == []
