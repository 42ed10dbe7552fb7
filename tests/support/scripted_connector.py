"""A KV connector for tests that keeps KV in a dictionary and does what its script says: answers
"not yet", loads synchronously or over several steps, fails, raises, keeps the blocks of finished
requests, and reports what vLLM does not wait for.

Alone it obeys vLLM's contract, so what goes wrong is the fault of what stands between. It reads the
blocks that it keeps over several steps and checks them, so blocks that are freed early are noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass
class Script:
    """What the sides of one child share in a test. Probabilities are per call, or per step."""

    random: Random
    synchronous: bool = False
    not_yet: float = 0.0
    fails: float = 0.0
    fails_by_block: bool = False
    keeps: float = 0.0
    moves: float = 0.5
    stray: float = 0.0
    raises: dict[str, float] = field(default_factory=dict)
    late: bool = False
    """Whether a hook that raises has done its work before."""
    store: dict[tuple[int, bytes], list[int]] = field(default_factory=dict)
    """The values of a block by rank and hash."""
    wrong: list[str] = field(default_factory=list)
    """Blocks that changed while they were kept."""
    loaded: int = 0
    sent: int = 0
    raised: int = 0
    told: list[tuple[str, int]] = field(default_factory=list)
    """Requests and tokens of ``update_state_after_alloc``."""


class ScriptedError(RuntimeError):
    """What a script raises."""


SCRIPTS: dict[str, Script] = {}
"""By the name in the child's ``kv_connector_extra_config``."""
RANKS = 1


@dataclass
class Load:
    """A request's blocks and their hashes; ``done``: how many are written."""

    name: str
    blocks: list[tuple[int, bytes]]
    fails: bool
    done: int = 0


@dataclass
class Send:
    """Blocks that are kept for a request, with their hashes and what they must hold."""

    name: str
    blocks: list[tuple[int, bytes]]
    read: list[list[int]] = field(default_factory=list)


@dataclass
class ScriptedMetadata(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


class ScriptedConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.script = SCRIPTS[extra["script"]]
        self.block = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.rank = extra.get("rank", 0)
        self.new_loads: list[Load] = []
        self.new_sends: list[Send] = []
        self.loads: list[Load] = []
        self.sends: list[Send] = []
        self.cache: Any = None
        self.invalid: set[int] = set()
        self.others: list[str] = []
        self.asked: dict[str, int] = {}
        """Tokens of the local hit at the last lookup."""
        self.seen: list[str] = []
        """Requests that it was told not to load."""
        self._act("__init__")

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def _act(self, hook: str, *, late: bool = False) -> None:
        script = self.script
        if late == script.late and script.random.random() < script.raises.get(hook, 0.0):
            script.raised += 1
            raise ScriptedError(hook)

    # Scheduler side.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._act("get_num_new_matched_tokens")
        self.asked[request.request_id] = num_computed_tokens
        if self.script.random.random() < self.script.not_yet:
            return None, False
        tokens = len(list(self._stored(request, num_computed_tokens))) * self.block
        return tokens, bool(tokens) and not self.script.synchronous

    def _stored(self, request: Any, computed: int) -> Iterator[bytes]:
        last = (request.num_tokens - 1) // self.block
        for block_hash in request.block_hashes[computed // self.block : last]:
            if any((rank, block_hash) not in self.script.store for rank in range(RANKS)):
                return
            yield block_hash

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._act("update_state_after_alloc")
        self.script.told.append((request.request_id, num_external_tokens))
        if not num_external_tokens:
            self.others.append(request.request_id)
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            count = num_external_tokens // self.block
            begin = self.asked[request.request_id] // self.block
            pairs = list(zip(ids[begin:], request.block_hashes[begin:], strict=False))[:count]
            fails = self.script.random.random() < self.script.fails
            self.new_loads.append(Load(request.request_id, pairs, fails))
        self._act("update_state_after_alloc", late=True)

    def build_connector_meta(self, scheduler_output: Any) -> ScriptedMetadata:
        self._act("build_connector_meta")
        made = ScriptedMetadata(self.new_loads, self.new_sends, self.others)
        self.new_loads, self.new_sends, self.others = [], [], []
        self._act("build_connector_meta", late=True)
        return made

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._act("request_finished_all_groups")
        self.asked.pop(request.request_id, None)
        count = min(request.num_computed_tokens // self.block, len(request.block_hashes))
        if request.status.name == "FINISHED_ABORTED":
            count = 0
        if self.script.random.random() >= self.script.keeps:
            return False, None
        pairs = list(zip(block_ids[0], request.block_hashes, strict=False))[:count]
        self.new_sends.append(Send(request.request_id, pairs))
        return True, {f"kept_by_{id(self.script)}": len(pairs)}

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._act("register_kv_caches")
        self.cache = kv_caches["layer"]

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert isinstance(kv_connector_metadata, ScriptedMetadata)
        self._act("handle_preemptions")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ScriptedMetadata)
        self._act("start_load_kv")
        # Each rank writes on its own.
        self.loads += [Load(each.name, each.blocks, each.fails) for each in metadata.loads]
        self.seen += metadata.others
        self.sends += [Send(each.name, each.blocks) for each in metadata.sends]
        if self.script.synchronous:
            for load in self.loads:
                self._write(load, len(load.blocks))
                if load.fails:
                    self._spoil(load)
        self._act("start_load_kv", late=True)

    def _write(self, load: Load, count: int) -> None:
        for block, block_hash in load.blocks[load.done : load.done + count]:
            self.cache[block, :] = self._tensor(self.script.store[(self.rank, block_hash)])
        load.done += count

    def _spoil(self, load: Load) -> None:
        for block, _ in load.blocks:
            self.cache[block, :] = -7

    def _tensor(self, values: list[int]) -> Any:
        return self.cache.new_tensor(values)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._act("wait_for_layer_load")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **k: Any) -> None:
        self._act("save_kv_layer")

    def wait_for_save(self) -> None:
        self._act("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._act("get_transfer_results")
        results = KVConnectorTransferResults()
        random = self.script.random
        for load in list(self.loads):
            if not self.script.synchronous:
                if random.random() >= self.script.moves:
                    continue
                self._write(load, 2)
                if load.done < len(load.blocks):
                    continue
            self.loads.remove(load)
            self.script.loaded += not load.fails
            if load.fails:
                self._spoil(load)
            if self.script.synchronous or (load.fails and self.script.fails_by_block):
                self.invalid |= {block for block, _ in load.blocks} if load.fails else set()
            elif load.fails:
                results.failed_recving.add(load.name)
            if not self.script.synchronous:
                results.finished_recving.add(load.name)
        for send in list(self.sends):
            if random.random() >= self.script.moves:
                continue
            if len(send.read) < len(send.blocks):
                send.read.append(self.cache[send.blocks[len(send.read)][0]].tolist())
                continue
            self._sent(send)
            results.finished_sending.add(send.name)
        if random.random() < self.script.stray:
            # As a P/D connector does that only releases blocks elsewhere.
            busy = {load.name for load in self.loads}
            results.finished_recving |= {random.choice(["unknown", *self.seen[-3:]])} - busy
        return results

    def _sent(self, send: Send) -> None:
        self.sends.remove(send)
        self.script.sent += 1
        for (block, block_hash), values in zip(send.blocks, send.read, strict=True):
            if self.cache[block].tolist() != values:
                self.script.wrong.append(f"{send.name}: block {block} changed while it was kept")
            self.script.store[(self.rank, block_hash)] = values

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._act("get_block_ids_with_load_errors")
        invalid, self.invalid = self.invalid, set()
        return invalid
