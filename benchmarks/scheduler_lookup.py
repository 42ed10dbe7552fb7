"""Cost of a lookup on the scheduler's thread: a long prompt, a replica with many keys.

The whole hook is timed, ``get_num_new_matched_tokens`` behind the connector's guard: computing
the keys, looking them up and deciding, without any other process. Each request is asked about
once, and then again, as vLLM does in every step in which it cannot admit the request. The ratio
is the worst median of a first lookup divided by the target. Times are of the thread's CPU, which
other processes do not change; the wall time is beside them.

With ``--groups 3`` the model has a group of full attention, a sliding window and a linear state,
and a prefix is usable if every group has what it needs. Of the other keys in the replica
``--in-ram`` are in RAM and the rest in a file tier.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "connector"))

from common import options, progress, report
from kvtier.config.models import (
    FileSystemTierDocument,
    Live,
    LiveTier,
    MemoryTierDocument,
    PolicyIdentity,
    Selection,
    Structural,
    Topology,
)
from kvtier.engines.common.model_identity import EngineIdentity
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.vllm.scheduler import KVTierConnectorScheduler
from kvtier.planner import GroupKind, KVCacheGroup, Planner
from kvtier.store.generations import pack_location
from kvtier.tierd.wire import (
    PROTOCOL,
    Delta,
    Message,
    Promote,
    Promoted,
    Ready,
    Usable,
    Welcome,
)

TARGET_SECONDS = {1: 1e-3, 3: 2e-3}
"""By number of groups."""
WINDOW_TOKENS = 4096
LOCATION = pack_location(0, 2)
"""Nothing is loaded, so one slot does for all."""
RAM, DISK = 1, 2
DELTA_KEYS = 4096


Elapsed = tuple[float, float]
"""CPU seconds of the thread, and seconds."""


class _Timer:
    """Times one question."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def elapsed(self) -> Elapsed:
        """Since the timer was made."""
        return time.thread_time() - self._cpu, time.perf_counter() - self._wall


class _Client:
    """An attached client whose messages go nowhere."""

    epoch = 1

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def start(self) -> None:
        """Attached from the beginning."""

    def send(self, message: Message) -> bool:
        self.sent.append(message)
        return True

    def close(self, timeout_seconds: float) -> None:
        """Nothing to close."""


class _Request:
    """vLLM's Request as far as a lookup goes. Hashes are random: their cost is vLLM's."""

    lora_request = prompt_embeds = None
    skip_reading_prefix_cache = resumable = False

    def __init__(self, name: str, tokens: int, block: int) -> None:
        self.request_id = name
        self.num_tokens = self.num_prompt_tokens = tokens
        self.num_computed_tokens = 0
        self.block_hashes = [
            hashlib.sha256(f"{name}/{number}".encode()).digest()
            for number in range(tokens // block)
        ]


def topology() -> Topology:
    """RAM and one file tier."""
    live = Live(
        selection=Selection.WEIGHTED,
        min_load_tokens=512,
        tiers={"ram": LiveTier(), "disk": LiveTier(capacity_bytes=1 << 40)},
    )
    structural = Structural(
        policy=PolicyIdentity(namespace="bench", name="bench"),
        content_hash="bench",
        run_directory="/dev/shm/kvtier-bench",
        tiers=[
            MemoryTierDocument(name="ram", capacity_bytes=1 << 40),
            FileSystemTierDocument(name="disk", path="/var/kv", sharing="Node"),
        ],
        live=live,
    )
    return Topology(structural=structural, live=live)


class Bench:
    """A scheduler side for prompts of ``tokens`` tokens, with a replica of ``keys`` keys.

    Of these ``in_ram`` are in RAM, and the others in a file tier.
    """

    def __init__(
        self, tokens: int, chunk: int, block: int, keys: int, groups: int = 1, in_ram: int = 30_000
    ) -> None:
        self.tokens, self.block = tokens, block
        kinds = [
            KVCacheGroup(GroupKind.FULL, block),
            KVCacheGroup(GroupKind.SLIDING, block, "window", WINDOW_TOKENS),
            KVCacheGroup(GroupKind.STATE, chunk, "state"),
        ]
        self.planner = Planner.build(kinds[:groups], chunk, block)
        self.client = _Client()
        self.scheduler = KVTierConnectorScheduler(
            TierdSession(
                topology(),
                self.planner,
                "bench/dp0",
                lambda: EngineIdentity("{}"),
                lambda *_: self.client,
            ),
            self.planner,
        )
        self.scheduler.start()
        session = self.scheduler.session
        session.receive(
            Welcome(
                protocol=PROTOCOL,
                epoch=1,
                session=1,
                pool_path="",
                pool_bytes=1,
                tiers=("ram", "disk"),
                settings="",
            )
        )
        session.receive(Ready(namespace="0" * 32, slot_bytes=(1 << 20,) * groups, persistent=True))
        session.receive(Usable(bits=RAM | DISK))
        self._sequence = 0
        self._add([], snapshot=True)
        others = (b"\0" + hashlib.sha256(str(number).encode()).digest() for number in range(keys))
        self.hold(islice(others, in_ram), RAM)
        self.hold(others, DISK)
        self._numbers = iter(range(1, 1 << 30))

    def _add(self, added: list[tuple[bytes, int]], snapshot: bool = False) -> None:
        self._sequence += 1
        located = tuple((key, bits, LOCATION if bits & RAM else 0) for key, bits in added)
        self.scheduler.session.receive(
            Delta(sequence=self._sequence, added=located, snapshot=snapshot)
        )

    def hold(self, keys: Iterable[bytes], bits: int) -> None:
        """Puts keys into the replica."""
        piece: list[tuple[bytes, int]] = []
        for key in keys:
            piece.append((key, bits))
            if len(piece) == DELTA_KEYS:
                self._add(piece)
                piece = []
        self._add(piece)

    def request(self, present: float, bits: int = RAM, holes: dict[int, int] | None = None) -> Any:
        """A new request of which this share of chunks is present, from the first on.

        ``holes``: of this group only every n-th chunk is present; 0: none is.
        """
        request = _Request(f"r{next(self._numbers)}", self.tokens, self.block)
        stride = self.planner.hashes_per_chunk
        hashes = request.block_hashes[stride - 1 :: stride]
        held = hashes[: int(len(hashes) * present)]
        for group in range(len(self.planner.groups)):
            nth = (holes or {}).get(group, 1)
            self.hold((bytes([group]) + each for each in (held[::nth] if nth else ())), bits)
        return request

    def ask(self, request: Any, computed: int = 0) -> int | None:
        """The hook."""
        return self.scheduler.get_num_new_matched_tokens(request, computed)[0]

    def forget(self, request: Any) -> None:
        """Ends a request, with whatever it waits for."""
        request.status = SimpleNamespace(name="FINISHED_ABORTED")
        self.scheduler.request_finished(request, [[] for _ in self.planner.groups])

    def first(self, present: float, bits: int, rounds: int, expected: int | None) -> list[Elapsed]:
        """Seconds of first questions."""
        took = []
        for _ in range(rounds):
            request = self.request(present, bits)
            started = _Timer()
            answer = self.ask(request)
            took.append(started.elapsed())
            if answer != expected:
                raise SystemExit(f"answered {answer} instead of {expected}")
            self.forget(request)
        return took

    def unusable(self, rounds: int, bits: int, holes: dict[int, int]) -> list[Elapsed]:
        """Seconds of first questions where a group lacks so much that no prefix is usable."""
        took = []
        for _ in range(rounds):
            request = self.request(1.0, bits, holes)
            started = _Timer()
            answer = self.ask(request)
            took.append(started.elapsed())
            if answer != 0:
                raise SystemExit(f"answered {answer} instead of 0")
            self.forget(request)
        return took

    def again(self, present: float, bits: int, rounds: int) -> list[Elapsed]:
        """Seconds of further questions of one request."""
        request = self.request(present, bits)
        self.ask(request)
        took = []
        for _ in range(rounds * 10):
            started = _Timer()
            self.ask(request)
            took.append(started.elapsed())
        self.forget(request)
        return took

    def promoted(self, rounds: int) -> list[Elapsed]:
        """Seconds of the question after a promotion has ended."""
        took = []
        for _ in range(rounds):
            request = self.request(1.0, DISK)
            self.ask(request)
            promote = [message for message in self.client.sent if isinstance(message, Promote)][-1]
            self.scheduler.session.receive(
                Promoted(promotion=promote.promotion, usable=len(promote.keys), outcome="whole")
            )
            started = _Timer()
            self.ask(request)
            took.append(started.elapsed())
            self.forget(request)
            self.client.sent.clear()
        return took


def main() -> None:
    """Runs the benchmark."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tokens", type=int, default=131_072, help="length of the prompts")
        parser.add_argument("--chunk", type=int, default=256, help="tokens of a chunk")
        parser.add_argument("--block", type=int, default=16, help="tokens of an engine's block")
        parser.add_argument("--keys", type=int, default=750_000, help="keys in the replica")
        parser.add_argument("--in-ram", type=int, default=30_000, help="of them in RAM")
        parser.add_argument(
            "--groups", type=int, choices=sorted(TARGET_SECONDS), default=1, help="KV cache groups"
        )
        parser.add_argument("--rounds", type=int, default=100, help="questions of each kind")

    given = options(__doc__.splitlines()[0], more)
    progress(f"filling a replica with {given.keys} keys")
    bench = Bench(given.tokens, given.chunk, given.block, given.keys, given.groups, given.in_ram)
    whole = bench.planner.tokens(bench.planner.max_hit_chunks(given.tokens))
    half = int(given.tokens // given.chunk * 0.5) * given.chunk
    cases: list[tuple[str, bool, Callable[[], list[Elapsed]]]] = [
        ("all in RAM", True, lambda: bench.first(1.0, RAM, given.rounds, whole)),
        ("half in RAM", True, lambda: bench.first(0.5, RAM, given.rounds, half)),
        ("half in a file tier", True, lambda: bench.first(0.5, DISK, given.rounds, None)),
        ("none", True, lambda: bench.first(0.0, RAM, given.rounds, 0)),
        (
            "all in a file tier (asks for promotion)",
            True,
            lambda: bench.first(1.0, DISK, given.rounds, None),
        ),
        ("again, all in RAM", False, lambda: bench.again(1.0, RAM, given.rounds)),
        ("again, none", False, lambda: bench.again(0.0, RAM, given.rounds)),
        ("again, while it waits", False, lambda: bench.again(1.0, DISK, given.rounds)),
        ("after a promotion", False, lambda: bench.promoted(given.rounds)),
    ]
    if given.groups > 1:
        cases += [
            ("no state, rest in RAM", True, lambda: bench.unusable(given.rounds, RAM, {2: 0})),
            ("no state, rest in files", True, lambda: bench.unusable(given.rounds, DISK, {2: 0})),
            (
                "half of each window in files",
                True,
                lambda: bench.unusable(given.rounds, DISK, {1: 2}),
            ),
        ]
    target = TARGET_SECONDS[given.groups]
    rows, worst = [], 0.0
    for name, judged, measure in cases:
        progress(name)
        measured = measure()
        took = sorted(cpu for cpu, _ in measured)
        median, wall = statistics.median(took), statistics.median(wall for _, wall in measured)
        if judged:
            worst = max(worst, median)
        rows.append(
            (
                name,
                f"{median * 1e6:.1f}",
                f"{took[int(len(took) * 0.99)] * 1e6:.1f}",
                f"{took[-1] * 1e6:.1f}",
                f"{wall * 1e6:.1f}",
            )
        )
    progress("")
    report(
        given.json,
        f"One lookup: {given.tokens} tokens, chunks of {given.chunk}, {given.groups} groups, "
        f"replica of {given.keys} keys, {given.in_ram} of them in RAM",
        ("case", "median CPU us", "99 % CPU us", "worst CPU us", "median wall us"),
        rows,
        worst / target,
        f"worst median of a first lookup / {target * 1e3:g} ms; the target is 1 or less",
    )


if __name__ == "__main__":
    main()
