"""Several KV connectors in one real engine, and KVTier beside a P/D connector in a prefill engine
and in a decode engine. Every token equals that of an engine without a connector.

Two engines serve all tests of this file. Both have KVTier and a P/D connector; the prefill engine
also has vLLM's own offloading and its example connector.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier.harness.engine_process import parse_metrics
from kvtier.harness.engine_requests import NEW_TOKENS, ReferenceEngine
from kvtier.harness.engine_testbed import BLOCK_TOKENS, CHUNK_TOKENS, EngineTestbed
from kvtier.harness.tiny_model import prompt

SUPPORT = Path(__file__).parents[1] / "support"
PARAMETERS = {"do_remote_decode": True}


@dataclass
class Pair:
    """A prefill engine and a decode engine, and the directory between them."""

    prefill: EngineTestbed
    decode: EngineTestbed
    shared: Path

    def hand_over(self, tokens: list[int]) -> dict[str, Any]:
        """Prefills a prompt; returns what a router passes to the decode engine."""
        requests = self.prefill.requests()
        name = requests.add(tokens, 1, transfer=PARAMETERS)
        answer: dict[str, Any] = requests.finish([name])[name]["transfer"]
        assert answer["do_remote_prefill"] is True
        return answer

    def decoded(self, tokens: list[int], transfer: dict[str, Any]) -> list[int]:
        return self.decode.requests().run(tokens, NEW_TOKENS, transfer=transfer)

    def counts(self, engine: str) -> dict[str, int]:
        """What the P/D connector's scheduler side has done."""
        file = self.shared / f"SCHEDULER-{engine}.json"
        found: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
        return found


def _multi(testbed: EngineTestbed, *others: dict[str, Any], **weights: int) -> dict[str, Any]:
    kvtier = {
        "kv_connector": "KVTierConnector",
        "name": "kvtier",
        "weight": weights.get("kvtier", 100),
        "kv_connector_extra_config": {"topology": str(testbed.topology)},
    }
    return {
        "kv_connector": "WeightedMultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [*others, kvtier]},
    }


def _handoff(shared: Path, engine: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "HandoffConnector",
        "kv_connector_module_path": "handoff_connector",
        "name": "pd",
        "required": True,
        "kv_connector_extra_config": {"directory": str(shared), "engine": engine, **extra},
    }


@pytest.fixture(scope="module")
def pair(model: Path, payload: Path, scratch: Path) -> Iterator[Pair]:
    shared = scratch / "handed-over"
    shared.mkdir()
    examples = scratch / "examples"
    examples.mkdir()
    offloading = {
        "kv_connector": "OffloadingConnector",
        "name": "offloading",
        "weight": 10,
        "kv_connector_extra_config": {
            "spec_name": "CopyingSpec",
            "spec_module_path": "offloading_on_cpu",
            "cpu_bytes_to_use": 8 << 20,
        },
    }
    example = {
        "kv_connector": "ExampleConnector",
        "name": "example",
        "weight": 1,
        "kv_connector_extra_config": {"shared_storage_path": str(examples)},
    }
    prefill = _Testbed(scratch / "prefill", model, payload)
    decode = _Testbed(scratch / "decode", model, payload)
    made = Pair(prefill, decode, shared)
    try:
        prefill.start(
            kv_transfer_config=_multi(
                prefill, _handoff(shared, "prefill"), offloading, example, kvtier=100
            )
        )
        decode.start(kv_transfer_config=_multi(decode, _handoff(shared, "decode", not_yet=2)))
        prefill.wait_attached()
        decode.wait_attached()
        yield made
    finally:
        prefill.close()
        decode.close()


class _Testbed(EngineTestbed):
    """Its engine can import the connectors of ``tests/support``."""

    def environment(self) -> dict[str, str]:
        found = super().environment()
        paths = [found["PYTHONPATH"], str(SUPPORT)]
        return {**found, "PYTHONPATH": os.pathsep.join(paths)}


def _counter(testbed: EngineTestbed, name: str, connector: str, **labels: str) -> float:
    wanted = {"connector": connector, **labels}
    return sum(
        value
        for key, value in parse_metrics(testbed.drive("metrics")).items()
        if key.startswith(f"vllm:{name}{{")
        and all(f'{label}="{text}"' in key for label, text in wanted.items())
    )


def _loaded(testbed: EngineTestbed, connector: str) -> float:
    testbed.drive("settle")
    return _counter(testbed, "kvtier_multi_loaded_tokens_total", connector)


def _chunks(count: int, seed: int) -> list[int]:
    return prompt(count * CHUNK_TOKENS + 9, seed)


def test_tokens_times_weight_decides_who_loads(pair: Pair, plain: ReferenceEngine) -> None:
    testbed = pair.prefill
    tokens = _chunks(4, 900)
    assert testbed.requests().run(tokens) == plain.tokens(tokens)
    testbed.settle_stores()
    testbed.empty_gpu_cache()
    before = {name: _loaded(testbed, name) for name in ("kvtier", "offloading", "example", "pd")}
    assert testbed.requests().run(tokens) == plain.tokens(tokens)
    gained = {name: _loaded(testbed, name) - count for name, count in before.items()}
    assert gained == {"kvtier": 4 * CHUNK_TOKENS, "offloading": 0, "example": 0, "pd": 0}
    assert _counter(testbed, "kvtier_multi_lookups_total", "offloading", outcome="fewer") >= 1
    assert _counter(testbed, "kvtier_multi_lookups_total", "example", outcome="fewer") >= 1


def test_another_connector_loads_where_kvtier_has_nothing(
    pair: Pair, plain: ReferenceEngine
) -> None:
    testbed = pair.prefill
    tokens = _chunks(3, 901)
    assert testbed.requests().run(tokens) == plain.tokens(tokens)
    testbed.settle_stores()
    testbed.empty_gpu_cache()
    testbed.kill_daemon()
    before = _loaded(testbed, "offloading")
    assert testbed.requests().run(tokens) == plain.tokens(tokens)
    assert _loaded(testbed, "offloading") - before >= 3 * CHUNK_TOKENS
    testbed.wait_attached()


def test_every_connector_has_its_own_metrics(pair: Pair) -> None:
    metrics = pair.prefill.drive("metrics")
    assert 'vllm:kvtier_stored_tokens_total{connector="kvtier"' in metrics
    assert _counter(pair.prefill, "kvtier_stored_tokens_total", "kvtier") > 0
    assert _counter(pair.prefill, "kv_offload_store_bytes_total", "offloading") > 0
    for name in ("kvtier", "offloading", "example", "pd"):
        assert f'vllm:kvtier_multi_loads_total{{connector="{name}"' in metrics


def test_the_decode_engine_receives_what_the_prefill_engine_computed_and_stores_it(
    pair: Pair, plain: ReferenceEngine
) -> None:
    tokens = _chunks(4, 902)
    transfer = pair.hand_over(tokens)
    before = _loaded(pair.decode, "pd")
    assert pair.decoded(tokens, transfer) == plain.tokens(tokens)
    received = _loaded(pair.decode, "pd") - before
    assert received == len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    # The prefill engine releases its blocks once they were read.
    assert pair.prefill.drive("settle")
    assert pair.prefill.drive("state")["requests"] == {}
    # Both have stored it: each reloads it from its own tiers.
    for testbed in (pair.prefill, pair.decode):
        testbed.settle_stores()
        testbed.empty_gpu_cache()
        before = _loaded(testbed, "kvtier")
        assert testbed.requests().run(tokens) == plain.tokens(tokens)
        assert _loaded(testbed, "kvtier") - before == 4 * CHUNK_TOKENS


def test_the_prefill_engine_loads_from_its_tiers_what_it_hands_over(
    pair: Pair, plain: ReferenceEngine
) -> None:
    first = _chunks(4, 903)
    assert pair.prefill.requests().run(first) == plain.tokens(first)
    pair.prefill.settle_stores()
    pair.prefill.empty_gpu_cache()
    longer = first[: 4 * CHUNK_TOKENS] + prompt(CHUNK_TOKENS + 9, 904)
    before = _loaded(pair.prefill, "kvtier")
    assert pair.decoded(longer, pair.hand_over(longer)) == plain.tokens(longer)
    assert _loaded(pair.prefill, "kvtier") - before == 4 * CHUNK_TOKENS


def test_a_decode_engine_that_has_the_kv_lets_the_prefill_engine_release_it(
    pair: Pair, plain: ReferenceEngine
) -> None:
    tokens = _chunks(3, 905)
    assert pair.decoded(tokens, pair.hand_over(tokens)) == plain.tokens(tokens)
    pair.decode.settle_stores()
    pair.decode.empty_gpu_cache()
    releases = pair.counts("decode").get("releases", 0)
    # The P/D connector answers "not yet" twice; the tiers have all chunks at once.
    before = _loaded(pair.decode, "kvtier")
    assert pair.decoded(tokens, pair.hand_over(tokens)) == plain.tokens(tokens)
    assert _loaded(pair.decode, "kvtier") - before == 3 * CHUNK_TOKENS
    assert pair.counts("decode")["releases"] == releases + 1
    assert pair.prefill.drive("settle")
    assert pair.prefill.drive("state")["requests"] == {}


def test_no_connector_has_raised_and_no_block_is_lost(pair: Pair) -> None:
    for testbed in (pair.prefill, pair.decode):
        testbed.empty_gpu_cache()
        assert testbed.drive("state")["free_blocks"] > 0
        errors = [
            key
            for key, value in parse_metrics(testbed.drive("metrics")).items()
            if key.startswith("vllm:kvtier_multi_errors_total") and value
        ]
        assert errors == []
