"""The demo: a policy file makes a real vLLM reload what it already computed, also after it was killed.

    python -m kvtier.cli.demo

Prompts W, A, B and C: A, B and C share a long prefix, W (for warming up) shares nothing. All have the same length, a whole
number of chunks and a rest shorter than a block, so that a GPU prefix hit and a reload cover the same tokens, and the reference (the
same requests in the same order on an engine without KVTier) does the same arithmetic also in bfloat16.

1. The engine computes all four, answers A from its GPU cache, and after emptying that, A and B from RAM.
2. When all chunks have reached the file tier, C's own files are replaced by files that are valid and wrong.
3. Engine and tier daemon are killed and started again, with nothing left in RAM: W, A and B come from files, and C, as a
   control, comes out wrong (or the comparison would prove nothing).

Environment: KVTIER_VLLM names an interpreter with vLLM (default: this one), KVTIER_DEMO_DIR a directory to keep.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from kvtier.cli.demo_display import Display, replace_by_foreign_bytes
from kvtier.cli.demo_engine import DemoError, Workplace, look, policy_file
from kvtier.errors import KVTierError
from kvtier.harness.engine_process import (
    START_SECONDS,
    DrivenEngine,
    EngineProcessError,
    EngineServer,
)
from kvtier.harness.tiny_model import prompt

REST_TOKENS = 17
"""Shorter than a block, and no chunk is completed by it and the generated tokens."""
NEW_TOKENS = 16
STORE_SECONDS = 60.0
ATTACH_SECONDS = 60.0
COMPUTED, FROM_RAM, AFTER_KILL, CONTROL = (
    "first time",
    "GPU cache emptied",
    "after the kill",
    "wrong KV on purpose",
)
LOADED = "vllm:kvtier_loaded_tokens_total"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids by name, and how many whole chunks each has; ``shared_chunks`` of A, B and C are the same."""

    tokens: Mapping[str, list[int]]
    chunk_tokens: int
    chunks: int
    shared_chunks: int

    @property
    def own_chunks(self) -> int:
        """Whole chunks of A, B or C that no other prompt has (A's prefix excepted)."""
        return self.chunks - self.shared_chunks

    @property
    def distinct_chunks(self) -> int:
        """Whole chunks that the tiers hold once every prompt was stored: W, the shared prefix, and what A, B and C have alone."""
        return self.chunks + self.shared_chunks + 3 * self.own_chunks


@dataclass(frozen=True, slots=True)
class Row:
    """One answered prompt: where its tokens came from, and whether the answer is that of the engine without KVTier."""

    stage: str
    prompt: str
    prompt_tokens: int
    gpu: int
    ram: int
    file: int
    first_token_seconds: float
    equal: bool

    @property
    def recomputed(self) -> int:
        """Prompt tokens that the engine computed."""
        return self.prompt_tokens - self.gpu - self.ram - self.file


@dataclass(slots=True)
class Reference:
    """Answers of an engine without KVTier: computed, and from a GPU prefix hit."""

    computed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    hit: dict[str, tuple[int, ...]] = field(default_factory=dict)


def make_prompts(chunk_tokens: int, vocabulary: int) -> Prompts:
    """The demo's prompts: 1,536 tokens in whole chunks, 1,024 of them shared."""
    chunks, shared = 1536 // chunk_tokens, 1024 // chunk_tokens
    length = chunks * chunk_tokens + REST_TOKENS
    prefix = prompt(shared * chunk_tokens, 1, vocabulary)
    tokens = {"W": prompt(length, 2, vocabulary)}
    for seed, name in enumerate("ABC", start=3):
        tokens[name] = prefix + prompt(length - len(prefix), seed, vocabulary)
    return Prompts(tokens, chunk_tokens, chunks, shared)


def ask_reference(engine: DrivenEngine, prompts: Prompts) -> Reference:
    """The same requests, one at a time, without KVTier: each computed, then each again from the GPU cache."""
    engine.wait_ready(START_SECONDS)
    reference = Reference()
    for kind, answers in (("computed", reference.computed), ("hit", reference.hit)):
        for name, tokens in prompts.tokens.items():
            request = f"{kind}-{name}"
            engine.call("add", name=request, prompt=tokens, max_tokens=NEW_TOKENS)
            answers[name] = tuple(engine.call("finish", ids=[request])[request]["tokens"])
    return reference


class Asker:
    """Asks one server for one prompt at a time and finds out where the tokens came from."""

    def __init__(self, server: EngineServer, prompts: Prompts, tier_names: tuple[str, str]) -> None:
        self._server = server
        self._prompts = prompts
        self._tier_names = tier_names

    def ask(self, stage: str, name: str, expected: tuple[int, ...]) -> Row:
        """One prompt; what was loaded is what the engine's own counters say was loaded, not what was matched."""
        tokens = self._prompts.tokens[name]
        before = self._server.metrics()
        answer = self._server.complete(tokens, NEW_TOKENS)
        after = self._settled(before, len(tokens))
        ram, file = (loaded(after, tier) - loaded(before, tier) for tier in self._tier_names)
        gpu = max(0, answer.cached_tokens - ram - file)
        equal = answer.tokens == expected
        return Row(stage, name, len(tokens), gpu, ram, file, answer.first_token_seconds, equal)

    def _settled(self, before: Mapping[str, float], tokens: int) -> dict[str, float]:
        """The counters once they include the request: they travel from the engine's process after the answer."""
        deadline = time.monotonic() + 10
        while True:
            after = self._server.metrics()
            seen = after.get("vllm:request_success_total", 0) - before.get(
                "vllm:request_success_total", 0
            )
            if seen >= 1 or time.monotonic() > deadline:
                return after
            time.sleep(0.02)


def loaded(metrics: Mapping[str, float], tier: str) -> int:
    """Tokens whose load from ``tier`` has completed, by the engine's counter."""
    pattern = re.compile(rf'{LOADED}\{{.*tier="{re.escape(tier)}".*\}}')
    return int(sum(value for name, value in metrics.items() if pattern.fullmatch(name)))


class Demo:
    """The whole demo in one workplace."""

    def __init__(self, place: Workplace, display: Display) -> None:
        self.place = place
        self.display = display
        self.rows: list[Row] = []

    def run(self, policy: Path) -> dict[str, object]:
        """Does everything and returns the result. Raises ``DemoError`` and ``EngineProcessError``."""
        structural = self.place.prepare(policy).structural
        tiers = (structural.tiers[0].name, structural.tiers[1].name)
        prompts = make_prompts(structural.chunk_tokens, self.place.installation.model.vocabulary)
        server, reference = self._start_both(prompts)
        version = str(json.loads(server.request("GET", "/version")[1])["version"])
        others, own = self._first_life(server, Asker(server, prompts, tiers), reference, prompts)
        with self.display.step("Killing engine and tier daemon (SIGKILL); nothing is left in RAM"):
            self.place.kill_everything()
        with self.display.step(
            "For the control: C's own files replaced by valid files with another prompt's KV"
        ):
            replace_by_foreign_bytes(own, others)
        with self.display.step("Starting the engine again"):
            server = self.place.start_server()
            server.wait_ready()
            self._wait_attached()
        self._second_life(Asker(server, prompts, tiers), reference)
        return self._result(prompts, len(others) + len(own), version)

    def _start_both(self, prompts: Prompts) -> tuple[EngineServer, Reference]:
        """Starts server and reference at once, since most of a start is waiting. The reference is gone before times are taken."""
        with self.display.step(
            "Starting vLLM, and beside it an engine without KVTier for reference"
        ):
            engine = self.place.start_reference()
            server = self.place.start_server()
            reference = ask_reference(engine, prompts)
            engine.stop()
            server.wait_ready()
            self._wait_attached()
        return server, reference

    def _wait_attached(self) -> None:
        """An engine serves before its tiers are there; the demo wants to show the tiers from the first prompt on."""
        deadline = time.monotonic() + ATTACH_SECONDS
        while not self.place.attached():
            if time.monotonic() > deadline:
                raise DemoError(
                    f"engine and tier daemon did not come together in {ATTACH_SECONDS:.0f} s"
                )
            time.sleep(0.05)

    def _first_life(
        self, server: EngineServer, asker: Asker, reference: Reference, prompts: Prompts
    ) -> tuple[list[Path], list[Path]]:
        """Computes, hits the GPU cache, reloads from RAM; returns the stored files, C's own ones apart."""
        for name in "WAB":
            self._add(asker.ask(COMPUTED, name, reference.computed[name]))
        others = self._wait_stored(server, prompts.distinct_chunks - prompts.own_chunks)
        self._add(asker.ask(COMPUTED, "C", reference.computed["C"]))
        self._add(asker.ask("again, from GPU", "A", reference.hit["A"]))
        for name in "AB":
            server.reset_prefix_cache()
            self._add(asker.ask(FROM_RAM, name, reference.hit[name]))
        everything = self._wait_stored(server, prompts.distinct_chunks)
        return others, sorted(set(everything) - set(others))

    def _second_life(self, asker: Asker, reference: Reference) -> None:
        for name in "WAB":
            self._add(asker.ask(AFTER_KILL, name, reference.hit[name]))
        self._add(asker.ask(CONTROL, "C", reference.hit["C"]))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        sources = {
            "from GPU": row.gpu,
            "from RAM": row.ram,
            "from file": row.file,
            "recomputed": row.recomputed,
        }
        text = ", ".join(f"{tokens} {source}" for source, tokens in sources.items() if tokens)
        self.display.note(
            f"{row.stage}: {row.prompt}: first token after {row.first_token_seconds * 1000:.0f} ms ({text})"
        )

    def _wait_stored(self, server: EngineServer, objects: int) -> list[Path]:
        """Waits until the file tier holds so many objects and nothing is on its way there."""
        with self.display.step(f"Waiting until {objects} chunks have reached the file tier"):
            deadline = time.monotonic() + STORE_SECONDS
            while True:
                state, files = self.place.file_tier(), self.place.files()
                if len(files) >= objects and state is not None and state.pending_bytes == 0:
                    return files
                if time.monotonic() > deadline:
                    raise DemoError(
                        f"{len(files)} of {objects} chunks reached the file tier in {STORE_SECONDS:.0f} s: {state}"
                    )
                # An engine makes no step without a request; this one is too short to be stored.
                server.complete([5, 6, 7], 2)
                time.sleep(0.05)

    def _result(self, prompts: Prompts, stored_objects: int, version: str) -> dict[str, object]:
        real = [row for row in self.rows if row.stage != CONTROL]
        restarted = [row for row in self.rows if row.stage in (AFTER_KILL, CONTROL)]
        storable = prompts.distinct_chunks * prompts.chunk_tokens
        reloaded = sum(row.file for row in restarted)

        def first_token(stage: str) -> float:
            return next(
                round(row.first_token_seconds, 4)
                for row in self.rows
                if (row.stage, row.prompt) == (stage, "A")
            )

        return {
            "identical_tokens": all(row.equal for row in real),
            "control_tokens_differ": not any(
                row.equal for row in self.rows if row.stage == CONTROL
            ),
            "prompt_tokens": sum(len(tokens) for tokens in prompts.tokens.values()),
            "storable_tokens": storable,
            "stored_tokens": stored_objects * prompts.chunk_tokens,
            "loaded_tokens_ram": sum(row.ram for row in real),
            "loaded_tokens_after_restart": reloaded,
            "reused_after_restart_ratio": round(reloaded / storable, 4),
            "ttft_cold_seconds": first_token(COMPUTED),
            "ttft_ram_seconds": first_token(FROM_RAM),
            "ttft_after_restart_seconds": first_token(AFTER_KILL),
            "vllm_version": version,
            "device": self.place.installation.device,
        }

    def show(self) -> None:
        """The table of everything that was asked."""
        headings = (
            "stage",
            "prompt",
            "tokens",
            "GPU",
            "RAM",
            "file",
            "recomputed",
            "first token",
            "as without KVTier",
        )
        rows = [
            (
                row.stage,
                row.prompt,
                *(
                    str(count)
                    for count in (row.prompt_tokens, row.gpu, row.ram, row.file, row.recomputed)
                ),
                f"{row.first_token_seconds * 1000:.0f} ms",
                ("equal" if row.equal else "different")
                + (", as it must" if row.stage == CONTROL and not row.equal else ""),
            )
            for row in self.rows
        ]
        self.display.table("Where the prompt's tokens came from", headings, rows)


class _Stopped(BaseException):
    """A signal asked the demo to end. No ``Exception``: nothing on the way may take it for a failure to handle."""

    def __init__(self, number: int) -> None:
        self.number = number


def _stop(number: int, _frame: FrameType | None) -> None:
    raise _Stopped(number)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Runs the demo; returns the exit status: 0 if all is as promised, 1 if not, 128 + n if signal n ended it."""
    for number in SIGNALS:
        signal.signal(number, _stop)
    display = Display()
    kept = os.environ.get("KVTIER_DEMO_DIR")
    place: Workplace | None = None
    try:
        policy = policy_file()
        installation = look(os.environ.get("KVTIER_VLLM") or sys.executable)
        display.note(f"vLLM of {installation.python}, device: {installation.device}")
        place = Workplace(installation, Path(kept) if kept else None)
        demo = Demo(place, display)
        result = demo.run(policy)
        demo.show()
        if kept:
            display.note(
                f"kept in {place.root}: policy, topology, environment, tier directory, logs"
            )
    except (DemoError, EngineProcessError, KVTierError, OSError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    except _Stopped as stopped:
        return 128 + stopped.number
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if place is not None:
            place.close()
    print("RESULT " + json.dumps(result), flush=True)
    promised = (
        result["identical_tokens"]
        and result["control_tokens_differ"]
        and float(str(result["reused_after_restart_ratio"])) >= 0.95
    )
    return 0 if promised else 1


if __name__ == "__main__":
    sys.exit(main())
