"""KVTier beside vLLM's NIXL connector, as prefill and as decode engine: KV goes from one CPU engine
to the other through UCX. Runs where the package ``nixl`` is installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.harness.engine_process import free_port, parse_metrics
from kvtier.harness.engine_requests import NEW_TOKENS, ReferenceEngine
from kvtier.harness.engine_testbed import BLOCK_TOKENS, CHUNK_TOKENS, EngineTestbed
from kvtier.harness.tiny_model import prompt

NIXL = importlib.util.find_spec("nixl")
pytestmark = pytest.mark.skipif(NIXL is None, reason="the package nixl is not installed")
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
CHUNKS = 4


class _Testbed(EngineTestbed):
    """Its engine has a port of its own for handshakes."""

    def environment(self) -> dict[str, str]:
        found = super().environment()
        origin = NIXL.origin if NIXL is not None else None
        paths = [found["PYTHONPATH"], str(Path(origin or "").parents[1])]
        return {
            **found,
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }

    def serve(self) -> None:
        """Starts an engine with both connectors."""
        kvtier = {
            "kv_connector": "KVTierConnector",
            "name": "kvtier",
            "kv_connector_extra_config": {"topology": str(self.topology)},
        }
        nixl = {
            "kv_connector": "NixlConnector",
            "name": "pd",
            "required": True,
            "kv_buffer_device": "cpu",
        }
        self.start(
            kv_transfer_config={
                "kv_connector": "WeightedMultiConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [nixl, kvtier]},
            }
        )

    def loaded(self, tier: str = "") -> int:
        """Tokens that the connector of this name has loaded."""
        self.drive("settle")
        name = f'vllm:kvtier_multi_loaded_tokens_total{{connector="{tier}"'
        found = parse_metrics(self.drive("metrics"))
        return int(sum(value for key, value in found.items() if key.startswith(name)))


@pytest.fixture(scope="module")
def pair(model: Path, payload: Path, scratch: Path) -> Iterator[tuple[_Testbed, _Testbed]]:
    prefill = _Testbed(scratch / "nixl-prefill", model, payload)
    decode = _Testbed(scratch / "nixl-decode", model, payload)
    try:
        prefill.serve()
        decode.serve()
        prefill.wait_attached()
        decode.wait_attached()
        yield prefill, decode
    finally:
        prefill.close()
        decode.close()


def _prefilled(testbed: _Testbed, tokens: list[int]) -> dict[str, Any]:
    requests = testbed.requests()
    name = requests.add(tokens, 1, transfer=PREFILL)
    found: dict[str, Any] = requests.finish([name])[name]["transfer"]
    return found


def test_kv_goes_through_nixl_and_into_the_tiers_of_both_engines(
    pair: tuple[_Testbed, _Testbed], plain: ReferenceEngine
) -> None:
    prefill, decode = pair
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 9, 950)
    transfer = _prefilled(prefill, tokens)
    assert transfer["do_remote_prefill"] is True
    before = decode.loaded("pd")
    name = decode.requests().add(tokens, NEW_TOKENS, transfer=transfer)
    assert decode.requests().finish([name])[name]["tokens"] == plain.tokens(tokens)
    assert decode.loaded("pd") - before >= len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    # The prefill engine learns that its blocks were read, and releases them.
    prefill.wait_for(
        lambda: prefill.drive("settle") and not prefill.drive("state")["requests"],
        "the blocks are not released",
    )
    for testbed in pair:
        testbed.settle_stores()
        testbed.empty_gpu_cache()
        testbed.wait_attached()
        before = testbed.loaded("kvtier")
        assert testbed.requests().run(tokens) == plain.tokens(tokens)
        assert testbed.loaded("kvtier") - before == CHUNKS * CHUNK_TOKENS


def test_a_decode_engine_that_has_the_kv_in_its_tiers_needs_no_transfer(
    pair: tuple[_Testbed, _Testbed], plain: ReferenceEngine
) -> None:
    prefill, decode = pair
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 9, 951)
    assert decode.requests().run(tokens) == plain.tokens(tokens)
    decode.settle_stores()
    decode.empty_gpu_cache()
    decode.wait_attached()
    assert decode.requests().run(tokens, transfer=_prefilled(prefill, tokens)) == plain.tokens(
        tokens
    )
    prefill.wait_for(
        lambda: prefill.drive("settle") and not prefill.drive("state")["requests"],
        "the blocks are not released",
    )
    for testbed in pair:
        errors = [
            key
            for key, value in parse_metrics(testbed.drive("metrics")).items()
            if key.startswith("vllm:kvtier_multi_errors_total") and value
        ]
        assert errors == []
