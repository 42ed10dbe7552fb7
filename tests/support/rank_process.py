"""KVTier's worker side of one rank: its transfer thread, its session with a real tierd, and KV that
is checked before a step reads it. No model runs.

``Rank`` is one in this process. ``RankProcess`` is one in a process of its own, which a test can
stop and kill (``python rank_process.py RUN_DIRECTORY NUMBER RANKS``).
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvtier.config.models import Daemon
from kvtier.engines.vllm import weights
from kvtier.engines.vllm.worker import KVTierConnectorWorker
from kvtier.harness.tierd_testbed import environment
from kvtier.planner import GroupKind, KVCacheGroup, Planner
from kvtier.tierd.wire import Heartbeat
from kvtier.transfer.codec import Codec
from kvtier.transfer.engine import CopyEngine
from kvtier.transfer.synthetic_layouts import CacheGeometry, make_every_cache

# As a program it is in no package.
held_copies = importlib.import_module(
    f"{__package__}.held_copies" if __package__ else "held_copies"
)
ENGINE = "engine"
BLOCK, CHUNK, BLOCKS = 32, 64, 40
ANSWER_SECONDS = 60.0
"""Only a rank that hangs takes as long."""
FINGERPRINT = weights.WeightsFingerprint("ab" * 16)


def make_planner(ranks: int) -> Planner:
    """One group with full attention."""
    return Planner.build([KVCacheGroup(GroupKind.FULL, BLOCK)], CHUNK, BLOCK, ranks)


class Rank:
    """The worker side of rank ``number`` of ``ranks``."""

    def __init__(self, run_directory: Path, number: int, ranks: int) -> None:
        weights.take = lambda config: FINGERPRINT
        weights.begin = lambda config: weights.PendingFingerprint(FINGERPRINT)
        self.number = number
        self.layout = make_every_cache(CacheGeometry(layers=2, blocks=BLOCKS, block=BLOCK))[0]
        self.worker = KVTierConnectorWorker(
            SimpleNamespace(  # type: ignore[arg-type]
                parallel_config=SimpleNamespace(rank=number),
                cache_config=SimpleNamespace(),
                compilation_config=SimpleNamespace(static_forward_context={}),
                kv_transfer_config=SimpleNamespace(engine_id=ENGINE),
            ),
            self.layout,  # type: ignore[arg-type]
            SimpleNamespace(  # type: ignore[arg-type]
                run_directory=str(run_directory), daemon=Daemon.SIDECAR
            ),
            make_planner(ranks),
            copy_engine=self._engine,
        )
        self.worker.register_kv_caches(self.layout.caches)
        if self.worker.off_reason:
            raise RuntimeError(self.worker.off_reason)
        self._stalled = threading.Event()

    def _engine(self, kv_caches: Any, codec: Codec) -> CopyEngine:
        # One object at a time, so that a load that is cut off lacks some.
        self.copies: Any = held_copies.HeldCopyEngine(kv_caches, codec, codec.shard_bytes[0])
        self.copies.batch_bytes = 1
        made: CopyEngine = self.copies
        return made

    def hold(self) -> None:
        """Copies run in ``move``."""
        self.copies.hold()

    def move(self) -> None:
        """Runs the copies that wait; later ones run at once."""
        self.copies.open = True
        self.copies.move()

    def held(self) -> int:
        """Copies that wait."""
        count: int = self.copies.held
        return count

    def stall(self) -> None:
        """The thread of the session hangs."""
        thread: Any = self.worker._thread
        self._stalled.clear()
        thread._client._make_heartbeat = self._heartbeat

    def _heartbeat(self) -> Heartbeat:
        self._stalled.wait()
        return Heartbeat()

    def resume(self) -> None:
        """It goes on."""
        self._stalled.set()

    def step(
        self, metadata: Any, reads: Sequence[tuple[int, int]], writes: Sequence[tuple[int, int]]
    ) -> Any:
        """One step: (block, value) that its kernels read and write, and KVTier's hooks. Returns
        the requests whose loads have ended, the blocks that they did not fill, and the report."""
        self.worker.begin_step(metadata)
        for block, value in reads:
            for name, tensor in self.layout.caches.items():
                found = _bytes(tensor, block)
                if not bool((found == self._value(value)).all()):
                    raise AssertionError(f"rank {self.number}, {name}: wrong KV in block {block}")
        for block, value in writes:
            for tensor in self.layout.caches.values():
                _bytes(tensor, block).fill_(self._value(value))
        self.worker.start_load_kv(metadata)
        self.worker.wait_for_save()
        _, recving = self.worker.get_finished(set())
        invalid = self.worker.get_block_ids_with_load_errors()
        return recving or set(), invalid, self.worker.build_connector_worker_meta()

    def _value(self, value: int) -> int:
        return (value * 2 + self.number) % 251

    def close(self) -> None:
        """Ends the session."""
        self.worker.shutdown()


def _bytes(tensor: Any, block: int) -> torch.Tensor:
    page: torch.Tensor = tensor[block].view(torch.uint8)
    return page


class RankProcess:
    """The same calls, in another process."""

    def __init__(self, run_directory: Path, number: int, ranks: int, log: Path) -> None:
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(run_directory), str(number), str(ranks)],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self.number = number

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def begin(self, name: str, *arguments: Any) -> None:
        """Sends a call."""
        assert self.process.stdin is not None
        pickle.dump((name, arguments), self.process.stdin)
        self.process.stdin.flush()

    def answers(self, seconds: float) -> bool:
        """Whether the answer is there within ``seconds``."""
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def end(self) -> Any:
        """The answer to the call. Raises what it raised."""
        assert self.process.stdout is not None
        if not self.answers(ANSWER_SECONDS):
            raise TimeoutError(f"rank {self.number} does not answer")
        answer = pickle.load(self.process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, name: str, *arguments: Any) -> Any:
        """A call and its answer."""
        self.begin(name, *arguments)
        return self.end()

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait(ANSWER_SECONDS)


def main() -> None:
    """The process: calls on standard input, answers on standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    rank = Rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = getattr(rank, name)(*arguments)
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
