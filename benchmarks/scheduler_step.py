"""Cost of a decode step on the scheduler's thread: many running requests, each with one new token.

All hooks of one step are timed, ``build_connector_meta``, ``update_connector_output``,
``has_pending_push_work`` and the collection of statistics, on the scheduler side and without any
other process. Where chunks are stored, tierd grants slots at once and the workers report the copies
with the next step; where no slot is free, every request has chunks that wait for one. With
``--groups 3`` there are a window and a linear state as well, and the engine offers the state of
each chunk that a step completes. The ratio is the worst median divided by the target, and the case
is named. Times are of the thread's CPU, which other processes do not change; the wall time is
beside them.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "connector"))

from common import options, progress, report
from kvtier.engines.vllm.metadata import StepMetadata, WorkerReport
from kvtier.engines.vllm.metrics import KVTierStats
from kvtier.tierd.wire import Credits
from scheduler_lookup import RAM, Bench

TARGET_SECONDS = 0.3e-3
WARM_STEPS = 8


class _Pool:
    """vLLM's block pool as far as stores reference blocks."""

    def __init__(self, blocks: int) -> None:
        self.blocks = list(range(blocks))

    def touch(self, blocks: Any) -> None:
        """References blocks."""

    def free_blocks(self, ordered_blocks: Any) -> None:
        """Releases blocks."""
        for _ in ordered_blocks:
            pass


class _Request:
    """vLLM's Request as far as a step goes. Hashes are random: their cost is vLLM's."""

    lora_request = prompt_embeds = None
    skip_reading_prefix_cache = resumable = False

    def __init__(self, name: str, tokens: int, block: int, steps: int) -> None:
        self.request_id = name
        self.num_tokens = self.num_prompt_tokens = tokens
        self.num_computed_tokens = 0
        self._block = block
        self._all = [
            hashlib.sha256(f"{name}/{number}".encode()).digest()
            for number in range((tokens + steps) // block + 1)
        ]
        self.block_hashes = self._all[: tokens // block]

    def sample(self) -> None:
        """One more token."""
        self.num_tokens += 1
        if self.num_tokens % self._block == 0:
            self.block_hashes.append(self._all[len(self.block_hashes)])


@dataclass(frozen=True, slots=True)
class _Case:
    """``present``: the prompts are in RAM. ``slots``: how many tierd grants before each step.
    ``copying``: no copy ends, so that as many blocks are referenced as may be. ``short``: the
    prompts are too short to be stored."""

    name: str
    present: bool = False
    slots: int = 0
    copying: bool = False
    short: bool = False


class _Steps:
    """Running requests of one scheduler side."""

    def __init__(self, given: argparse.Namespace, case: _Case) -> None:
        self.case, self.chunk = case, given.chunk
        bench = Bench(given.tokens, given.chunk, given.block, given.keys, given.groups)
        self.scheduler, self.session = bench.scheduler, bench.scheduler.session
        self.groups = len(bench.planner.groups)
        if case.short:
            self.session.live = self.session.live.model_copy(
                update={"min_store_tokens": 2 * given.tokens}
            )
        steps = given.steps + WARM_STEPS + 2
        # Staggered, as requests of a server are: one of them completes a chunk in most steps.
        self.requests = [
            _Request(f"r{number}", given.tokens + number, given.block, steps)
            for number in range(given.requests)
        ]
        blocks = (given.tokens + given.requests + steps) // given.block + 1
        self.scheduler.bind_gpu_block_pool(_Pool((64 if case.copying else 1_024) * blocks))
        table = list(range(1, blocks + 1))
        self.tables = {
            each.request_id: tuple(table for _ in range(self.groups)) for each in self.requests
        }
        self.stats = KVTierStats()
        self.done: dict[int, int] = {}
        self.number = self.slot = 0
        stride = bench.planner.hashes_per_chunk
        for request in self.requests:
            if case.present:
                for group in range(self.groups):
                    hashes = request.block_hashes[stride - 1 :: stride]
                    bench.hold((bytes([group]) + each for each in hashes), RAM)
            self.scheduler.get_num_new_matched_tokens(request, 0)  # type: ignore[arg-type]
        self._step({each.request_id: each.num_prompt_tokens for each in self.requests})

    def _grant(self) -> None:
        """tierd grants as many slots as a step may need."""
        for group in range(self.groups):
            missing = self.case.slots - len(self.session.credits[group])
            if missing > 0:
                slots = tuple(range(self.slot, self.slot + missing))
                self.slot += missing
                self.session.receive(Credits(group=group, slots=slots))

    def _offers(self, scheduled: dict[str, int]) -> dict[str, list[tuple[int, int, int]]]:
        """vLLM offers the state at the end of each chunk that the step completes."""
        offers: dict[str, list[tuple[int, int, int]]] = {}
        for request in self.requests if self.groups > 1 else ():
            computed = request.num_computed_tokens
            end = (computed + scheduled[request.request_id]) // self.chunk * self.chunk
            if end > computed:
                offers[request.request_id] = [(2, end // self.chunk, end)]
        return offers

    def _output(self, scheduled: dict[str, int]) -> Any:
        return SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(scheduled), new_block_ids=[], resumed_req_ids=set()
            ),
            num_scheduled_tokens=scheduled,
            preempted_req_ids=set(),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=self.tables.get, boundary_state_offloads=self._offers(scheduled)
            ),
        )

    def _step(self, scheduled: dict[str, int]) -> tuple[float, float]:
        """One step; returns its CPU seconds and its wall seconds."""
        self._grant()
        output = self._output(scheduled)
        scheduler = self.scheduler
        wall, cpu = time.perf_counter(), time.thread_time()
        metadata: StepMetadata = scheduler.build_connector_meta(output)
        cpu_spent, wall_spent = time.thread_time() - cpu, time.perf_counter() - wall
        self.number = metadata.step
        for request in self.requests:
            request.num_computed_tokens += scheduled[request.request_id]
            request.sample()
        ranks = (0, "w", "")
        result = WorkerReport(
            step=self.number,
            loads=[],
            stores_done=self.done,
            attached_epoch=1,
            identity=metadata.identity,
            weights=(ranks,) if metadata.report_weights else (),
        )
        self.done = {job.reservation: 1 for job in metadata.stores if not self.case.copying}
        wall, cpu = time.perf_counter(), time.thread_time()
        scheduler.update_connector_output(result)
        scheduler.has_pending_work()
        scheduler.collect_stats(self.stats)
        return cpu_spent + time.thread_time() - cpu, wall_spent + time.perf_counter() - wall

    def run(self, steps: int) -> list[tuple[float, float]]:
        """Decode steps."""
        scheduled = dict.fromkeys((each.request_id for each in self.requests), 1)
        for _ in range(WARM_STEPS):
            self._step(scheduled)
        return [self._step(scheduled) for _ in range(steps)]

    def check(self) -> None:
        """That the case is what its name says."""
        waiting = sum(
            each.frontier.next_chunk < (each.request.num_tokens - 1) // self.chunk
            for each in self.scheduler._states.values()
        )
        if self.case.present and self.case.slots:
            expected = waiting < len(self.requests) // 2
        else:
            expected = waiting > len(self.requests) // 2
        if not expected:
            raise SystemExit(f"{self.case.name}: {waiting} requests have chunks that wait")


CASES = (
    _Case("prompts in RAM, slots free", present=True, slots=64),
    _Case("no slot free, one chunk of each request waits", present=True),
    _Case("no slot free, whole prompts wait"),
    _Case("one slot a step, whole prompts wait", slots=1),
    _Case("slots free, no copy ends", slots=64, copying=True),
    _Case("prompts too short to be stored", slots=64, short=True),
)


def main() -> None:
    """Runs the benchmark."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--requests", type=int, default=256, help="running requests")
        parser.add_argument("--tokens", type=int, default=8_192, help="length of the prompts")
        parser.add_argument("--chunk", type=int, default=256, help="tokens of a chunk")
        parser.add_argument("--block", type=int, default=16, help="tokens of an engine's block")
        parser.add_argument("--keys", type=int, default=100_000, help="other keys in the replica")
        parser.add_argument("--groups", type=int, choices=(1, 3), default=1, help="KV cache groups")
        parser.add_argument("--steps", type=int, default=600, help="steps of each case")

    given = options(__doc__.splitlines()[0], more)
    rows, worst, slowest = [], 0.0, ""
    for case in CASES:
        progress(case.name)
        steps = _Steps(given, case)
        measured = steps.run(given.steps)
        steps.check()
        cpu = sorted(each for each, _ in measured)
        wall = statistics.median(each for _, each in measured)
        median = statistics.median(cpu)
        if median > worst:
            worst, slowest = median, case.name
        high = cpu[int(len(cpu) * 0.99)]
        rows.append((case.name, f"{median * 1e6:.0f}", f"{high * 1e6:.0f}", f"{wall * 1e6:.0f}"))
    progress("")
    report(
        given.json,
        f"One decode step: {given.requests} requests, prompts of {given.tokens} tokens, chunks of "
        f"{given.chunk}, {given.groups} groups",
        ("case", "median CPU us", "99 % CPU us", "median wall us"),
        rows,
        worst / TARGET_SECONDS,
        f"worst median, {slowest!r}, / {TARGET_SECONDS * 1e3:g} ms; the target is 1 or less",
    )


if __name__ == "__main__":
    main()
