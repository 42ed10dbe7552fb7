"""A small P/D connector for tests, which obeys the contract of vLLM's NIXL connector, with files in
place of RDMA.

Prefill: a request with ``kv_transfer_params {"do_remote_decode": true}`` keeps its blocks after its
end, until the decode engine has read them; its answer has the parameters for the decode engine.
Decode: a request with ``{"do_remote_prefill": true, ...}`` asks for all missing tokens. If it is
told to load fewer, or nothing, because its KV is here already, it only lets the prefill engine
release the blocks.

Extra configuration: ``directory``, of both engines; ``not_yet``, how many lookups are answered with
"ask again".
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass
class HandoffMetadata(KVConnectorMetadata):
    """``send``: blocks by request. ``receive``: (remote request, blocks) by request; no blocks:
    let them be released only."""

    send: dict[str, list[int]] = field(default_factory=dict)
    receive: dict[str, tuple[str, list[int]]] = field(default_factory=dict)


class HandoffConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.directory = Path(extra["directory"])
        self.not_yet = int(extra.get("not_yet", 0))
        self.block = vllm_config.cache_config.block_size
        self.asked: dict[str, int] = {}
        self.step = HandoffMetadata()
        self.caches: dict[str, torch.Tensor] = {}
        self.kept: set[str] = set()
        self.counts_file = self.directory / f"{extra['engine']}.json"
        self.counts: dict[str, int] = {}

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        self.counts_file.with_name(f"{self.role.name}-{self.counts_file.name}").write_text(
            json.dumps(self.counts)
        )

    # Scheduler side.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        parameters = request.kv_transfer_params or {}
        if not parameters.get("do_remote_prefill"):
            return 0, False
        if self.asked.setdefault(request.request_id, 0) < self.not_yet:
            self.asked[request.request_id] += 1
            return None, False
        tokens = parameters["remote_blocks"] * self.block - num_computed_tokens
        return max(tokens, 0), tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        parameters = request.kv_transfer_params or {}
        if not parameters.get("do_remote_prefill"):
            return
        parameters["do_remote_prefill"] = False
        ids: list[int] = []
        if num_external_tokens:
            count = parameters["remote_blocks"]
            first = count - num_external_tokens // self.block
            ids = [-1] * first + list(blocks.get_block_ids()[0][first:count])
        self._count("loads" if ids else "releases")
        self.step.receive[request.request_id] = (parameters["remote_request"], ids)

    def build_connector_meta(self, scheduler_output: Any) -> HandoffMetadata:
        step, self.step = self.step, HandoffMetadata()
        return step

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.asked.pop(request.request_id, None)
        parameters = request.kv_transfer_params or {}
        if not parameters.get("do_remote_decode"):
            return False, None
        full = request.num_computed_tokens // self.block
        full = min(full, (request.num_prompt_tokens - 1) // self.block)
        if not full:
            return False, None
        self._count("keeps")
        self.step.send[request.request_id] = list(block_ids[0][:full])
        return True, {
            "do_remote_prefill": True,
            "remote_request": request.request_id,
            "remote_blocks": full,
        }

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, HandoffMetadata)
        for name, ids in metadata.send.items():
            content = {layer: cache[ids].clone() for layer, cache in self.caches.items()}
            partial = self.directory / f"{name}.partial"
            torch.save(content, partial)
            partial.rename(self.directory / f"{name}.kv")
            self.kept.add(name)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **k: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, HandoffMetadata)
        for name, (remote, ids) in metadata.receive.items():
            self._receive(remote, ids)
            if ids:
                results.finished_recving.add(name)
        for name in list(self.kept):
            if (self.directory / f"{name}.read").exists():
                self.kept.discard(name)
                results.finished_sending.add(name)
        return results

    def _receive(self, remote: str, ids: list[int]) -> None:
        if ids:
            content = torch.load(self.directory / f"{remote}.kv")
            own = [index for index, block in enumerate(ids) if block >= 0]
            for layer, cache in self.caches.items():
                cache[[ids[index] for index in own]] = content[layer][own]
        (self.directory / f"{remote}.read").touch()
