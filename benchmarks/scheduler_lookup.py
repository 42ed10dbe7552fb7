"""Cost of a lookup on the scheduler's thread: a long prompt, a replica with many keys.

The whole hook is timed, ``get_num_new_matched_tokens`` behind the connector's guard: computing
the keys, looking them up and deciding, without any other process. Each request is asked about
once, and then again, as vLLM does in every step in which it cannot admit the request. The ratio
is the worst median of a first lookup divided by the target, and the case is named. Times are of
the thread's CPU, which other processes do not change; the wall time is beside them.

With ``--groups 3`` the model has a group of full attention, a sliding window and a linear state,
and a prefix is usable if every group has what it needs. Further cases lack objects so that many are
looked up before that is known, or none is usable. Of the other keys in the replica ``--in-ram`` are
in RAM and the rest in a file tier.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
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


Objects = Callable[[int, int], int]
"""The presence bits of an object, by group and chunk."""
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

    def request(self, present: float, bits: int = RAM, objects: Objects | None = None) -> Any:
        """A new request of which this share of chunks is present, from the first on.

        ``objects``: the bits of each object; None: all have ``bits``.
        """
        request = _Request(f"r{next(self._numbers)}", self.tokens, self.block)
        stride = self.planner.hashes_per_chunk
        hashes = request.block_hashes[stride - 1 :: stride]
        held = hashes[: int(len(hashes) * present)]
        by_bits: dict[int, list[bytes]] = {}
        for group in range(len(self.planner.groups)):
            for chunk, each in enumerate(held):
                of_object = bits if objects is None else objects(group, chunk)
                by_bits.setdefault(of_object, []).append(bytes([group]) + each)
        by_bits.pop(0, None)
        for of_object, keys in by_bits.items():
            self.hold(keys, of_object)
        return request

    def ask(self, request: Any, computed: int = 0) -> int | None:
        """The hook."""
        return self.scheduler.get_num_new_matched_tokens(request, computed)[0]

    def forget(self, request: Any) -> None:
        """Ends a request, with whatever it waits for."""
        request.status = SimpleNamespace(name="FINISHED_ABORTED")
        self.scheduler.request_finished(request, [[] for _ in self.planner.groups])

    def first(
        self,
        rounds: int,
        expected: int | None,
        present: float = 1.0,
        bits: int = RAM,
        objects: Objects | None = None,
    ) -> list[Elapsed]:
        """Seconds of first questions."""
        took = []
        for _ in range(rounds):
            request = self.request(present, bits, objects)
            started = _Timer()
            answer = self.ask(request)
            took.append(started.elapsed())
            if answer != expected:
                raise SystemExit(f"answered {answer} instead of {expected}")
            self.forget(request)
            self.client.sent.clear()
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


def partial_prompts(planner: Planner, chunks: int) -> list[tuple[str, Objects, int | None]]:
    """Prompts of three groups of which objects are missing: name, the bits of each object by group
    and chunk, and the answer."""
    third, last = chunks // 3, chunks - 2
    # The last chunk of a prompt is always computed, so the one before is the last that counts.
    whole, all_but_last = planner.tokens(chunks - 1), planner.tokens(chunks - 2)

    def without(group: int, missing: Callable[[int], bool], bits: int = RAM) -> Objects:
        return lambda of, chunk: 0 if of == group and missing(chunk) else bits

    def each(_chunk: int) -> bool:
        return True

    def odd(chunk: int) -> bool:
        return chunk % 2 == 1

    def middle(chunk: int) -> bool:
        return third <= chunk < 2 * third

    def alternating(group: int, chunk: int) -> int:
        return RAM if group == 0 or (group == 1) != odd(chunk) else 0

    def apart(group: int, chunk: int) -> int:
        return RAM if group == 0 or (group == 2) == middle(chunk) else 0

    return [
        ("no full attention, rest in RAM", without(0, each), 0),
        ("no window, rest in RAM", without(1, each), 0),
        ("no window, rest in files", without(1, each, DISK), 0),
        ("no state, rest in RAM", without(2, each), 0),
        ("no state, rest in files", without(2, each, DISK), 0),
        ("last full attention missing", without(0, last.__eq__), all_but_last),
        ("last window missing", without(1, last.__eq__), all_but_last),
        ("last state missing", without(2, last.__eq__), all_but_last),
        ("windows of the middle missing", without(1, middle), whole),
        ("every second window missing, rest in RAM", without(1, odd), 0),
        ("every second window missing, rest in files", without(1, odd, DISK), 0),
        ("every second window, and every other state", alternating, 0),
        ("states of the middle, and windows of the rest", apart, 0),
        ("states in files, rest in RAM", lambda group, _: DISK if group == 2 else RAM, None),
    ]


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
    chunks = bench.planner.chunks(given.tokens)
    half, rounds = bench.planner.tokens(chunks // 2), given.rounds
    cases: list[tuple[str, bool, Callable[[], list[Elapsed]]]] = [
        ("all in RAM", True, lambda: bench.first(rounds, whole)),
        ("half in RAM", True, lambda: bench.first(rounds, half, 0.5)),
        ("half in a file tier", True, lambda: bench.first(rounds, None, 0.5, DISK)),
        ("none", True, lambda: bench.first(rounds, 0, 0.0)),
        (
            "all in a file tier (asks for promotion)",
            True,
            lambda: bench.first(rounds, None, 1, DISK),
        ),
        ("again, all in RAM", False, lambda: bench.again(1.0, RAM, rounds)),
        ("again, none", False, lambda: bench.again(0.0, RAM, rounds)),
        ("again, while it waits", False, lambda: bench.again(1.0, DISK, rounds)),
        ("after a promotion", False, lambda: bench.promoted(rounds)),
    ]
    if given.groups > 1:
        cases += [
            (name, True, partial(bench.first, rounds, answer, objects=objects))
            for name, objects, answer in partial_prompts(bench.planner, chunks)
        ]
    target = TARGET_SECONDS[given.groups]
    rows, worst, slowest = [], 0.0, ""
    for name, judged, measure in cases:
        progress(name)
        measured = measure()
        took = sorted(cpu for cpu, _ in measured)
        median, wall = statistics.median(took), statistics.median(wall for _, wall in measured)
        if judged and median > worst:
            worst, slowest = median, name
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
        f"worst median of a first lookup, {slowest!r}, / {target * 1e3:g} ms; "
        "the target is 1 or less",
    )


if __name__ == "__main__":
    main()
