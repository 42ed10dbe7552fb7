"""The demo: a real vLLM reuses what it computed, even after it was killed.

    python -m kvtier.cli.demo

The prompts A, B and C share a long prefix; W, for warming up, shares nothing. All have the same
length: whole chunks and a rest shorter than a block. A GPU prefix hit and a reload then cover the
same tokens, so that the reference, an engine without KVTier that gets the same requests in the same
order, does the same arithmetic even in bfloat16.

1. The engine computes all four prompts, answers A from its GPU cache and, after that cache was
   reset, A and B from RAM.
2. Once all chunks are in the file tier, the files that only C has are replaced by valid files with
   other KV.
3. Engine and tierd are killed and started again, with nothing left in RAM. W, A and B are loaded
   from files. C, the control, must give a wrong answer, or the comparison would prove nothing.

Environment: ``KVTIER_VLLM`` is an interpreter with vLLM (default: this one). ``KVTIER_DEMO_DIR`` is
a directory for policy, topology, tier and logs that is not removed.
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

from kvtier.cli.demo_display import Display
from kvtier.cli.demo_engine import DemoEnvironment, DemoError, policy_file, probe, swap_kv
from kvtier.errors import KVTierError
from kvtier.harness.engine_process import (
    START_SECONDS,
    DrivenEngine,
    EngineProcessError,
    EngineServer,
)
from kvtier.harness.tiny_model import prompt

REST_TOKENS = 17
"""Shorter than a block. Together with the generated tokens it does not complete a chunk."""
NEW_TOKENS = 16
STORE_SECONDS = 60.0
ATTACH_SECONDS = 60.0
COMPUTED, FROM_RAM, AFTER_KILL, CONTROL = (
    "first time",
    "GPU cache reset",
    "after the kill",
    "control: wrong KV",
)
LOADED = "vllm:kvtier_loaded_tokens_total"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token IDs by name. Each prompt has ``chunks`` whole chunks; A, B and C share the first."""

    tokens: Mapping[str, list[int]]
    chunk_tokens: int
    chunks: int
    shared_chunks: int

    @property
    def own_chunks(self) -> int:
        """Whole chunks of A, B or C after the shared prefix."""
        return self.chunks - self.shared_chunks

    @property
    def distinct_chunks(self) -> int:
        """Whole chunks in the tiers once all prompts are stored."""
        return self.chunks + self.shared_chunks + 3 * self.own_chunks


@dataclass(frozen=True, slots=True)
class Row:
    """One request: where its prompt came from, and whether the answer equals the reference."""

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
    """Answers of an engine without KVTier: computed, and with a GPU prefix hit."""

    computed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    hit: dict[str, tuple[int, ...]] = field(default_factory=dict)


def make_prompts(chunk_tokens: int, vocabulary: int) -> Prompts:
    """Prompts of 1,536 tokens in whole chunks, 1,024 of them shared."""
    chunks, shared = 1536 // chunk_tokens, 1024 // chunk_tokens
    length = chunks * chunk_tokens + REST_TOKENS
    prefix = prompt(shared * chunk_tokens, 1, vocabulary)
    tokens = {"W": prompt(length, 2, vocabulary)}
    for seed, name in enumerate("ABC", start=3):
        tokens[name] = prefix + prompt(length - len(prefix), seed, vocabulary)
    return Prompts(tokens, chunk_tokens, chunks, shared)


def run_reference(engine: DrivenEngine, prompts: Prompts) -> Reference:
    """Runs the same requests without KVTier: each computed, then each with a GPU prefix hit."""
    engine.wait_ready(START_SECONDS)
    reference = Reference()
    for kind, answers in (("computed", reference.computed), ("hit", reference.hit)):
        for name, tokens in prompts.tokens.items():
            request = f"{kind}-{name}"
            engine.call("add", name=request, prompt=tokens, max_tokens=NEW_TOKENS)
            answers[name] = tuple(engine.call("finish", ids=[request])[request]["tokens"])
    return reference


class RequestRunner:
    """Runs one request at a time on a server and measures where its prompt came from."""

    def __init__(self, server: EngineServer, prompts: Prompts, tier_names: tuple[str, str]) -> None:
        self._server = server
        self._prompts = prompts
        self._tier_names = tier_names

    def run(self, stage: str, name: str, expected: tuple[int, ...]) -> Row:
        """Runs one prompt. Loaded tokens are those that the engine counted, not matched tokens."""
        tokens = self._prompts.tokens[name]
        before = self._server.metrics()
        answer = self._server.complete(tokens, NEW_TOKENS)
        after = self._metrics_after(before, len(tokens))
        ram, file = (
            loaded_tokens(after, tier) - loaded_tokens(before, tier) for tier in self._tier_names
        )
        gpu = max(0, answer.cached_tokens - ram - file)
        equal = answer.tokens == expected
        return Row(stage, name, len(tokens), gpu, ram, file, answer.first_token_seconds, equal)

    def _metrics_after(self, before: Mapping[str, float], tokens: int) -> dict[str, float]:
        """The counters once they include the request. They are published after the answer."""
        deadline = time.monotonic() + 10
        while True:
            after = self._server.metrics()
            seen = after.get("vllm:request_success_total", 0) - before.get(
                "vllm:request_success_total", 0
            )
            if seen >= 1 or time.monotonic() > deadline:
                return after
            time.sleep(0.02)


def loaded_tokens(metrics: Mapping[str, float], tier: str) -> int:
    """The engine's counter of tokens loaded from ``tier``."""
    pattern = re.compile(rf'{LOADED}\{{.*tier="{re.escape(tier)}".*\}}')
    return int(sum(value for name, value in metrics.items() if pattern.fullmatch(name)))


class Demo:
    """Runs the demo in an environment."""

    def __init__(self, environment: DemoEnvironment, display: Display) -> None:
        self.environment = environment
        self.display = display
        self.rows: list[Row] = []

    def run(self, policy: Path) -> dict[str, object]:
        """Runs all steps. Raises ``DemoError`` and ``EngineProcessError``."""
        structural = self.environment.prepare(policy).structural
        tiers = (structural.tiers[0].name, structural.tiers[1].name)
        prompts = make_prompts(
            structural.chunk_tokens, self.environment.installation.model.vocabulary
        )
        server, reference = self._start_both(prompts)
        version = str(json.loads(server.request("GET", "/version")[1])["version"])
        others, own = self._run_before_kill(
            server, RequestRunner(server, prompts, tiers), reference, prompts
        )
        with self.display.step("Killing engine and tierd (SIGKILL); RAM is empty afterwards"):
            self.environment.kill_everything()
        with self.display.step(
            "Control: replacing the files of C by valid files with the KV of other prompts"
        ):
            swap_kv(own, others)
        with self.display.step("Restarting the engine"):
            server = self.environment.start_server()
            server.wait_ready()
            self._wait_attached()
        self._run_after_restart(RequestRunner(server, prompts, tiers), reference)
        return self._result(prompts, len(others) + len(own), version)

    def _start_both(self, prompts: Prompts) -> tuple[EngineServer, Reference]:
        """Starts server and reference at once. The reference stops before times are measured."""
        with self.display.step("Starting vLLM, and an engine without KVTier as the reference"):
            engine = self.environment.start_reference()
            server = self.environment.start_server()
            reference = run_reference(engine, prompts)
            engine.stop()
            server.wait_ready()
            self._wait_attached()
        return server, reference

    def _wait_attached(self) -> None:
        """Waits for the tiers. The engine serves without them, but must store the first prompt."""
        deadline = time.monotonic() + ATTACH_SECONDS
        while not self.environment.attached():
            if time.monotonic() > deadline:
                raise DemoError(f"the engine did not attach to tierd within {ATTACH_SECONDS:.0f} s")
            time.sleep(0.05)

    def _run_before_kill(
        self, server: EngineServer, runner: RequestRunner, reference: Reference, prompts: Prompts
    ) -> tuple[list[Path], list[Path]]:
        """Runs the requests before the kill. Returns the stored files: those of C alone come
        second.
        """
        for name in "WAB":
            self._add(runner.run(COMPUTED, name, reference.computed[name]))
        others = self._wait_stored(server, prompts.distinct_chunks - prompts.own_chunks)
        self._add(runner.run(COMPUTED, "C", reference.computed["C"]))
        self._add(runner.run("again, from the GPU", "A", reference.hit["A"]))
        for name in "AB":
            server.reset_prefix_cache()
            self._add(runner.run(FROM_RAM, name, reference.hit[name]))
        everything = self._wait_stored(server, prompts.distinct_chunks)
        return others, sorted(set(everything) - set(others))

    def _run_after_restart(self, runner: RequestRunner, reference: Reference) -> None:
        for name in "WAB":
            self._add(runner.run(AFTER_KILL, name, reference.hit[name]))
        self._add(runner.run(CONTROL, "C", reference.hit["C"]))

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
            f"{row.stage}: {row.prompt}: first token after "
            f"{row.first_token_seconds * 1000:.0f} ms ({text})"
        )

    def _wait_stored(self, server: EngineServer, objects: int) -> list[Path]:
        """Waits until the file tier holds that many objects and no write is pending."""
        with self.display.step(f"Waiting until {objects} chunks are in the file tier"):
            deadline = time.monotonic() + STORE_SECONDS
            while True:
                state, files = self.environment.file_tier(), self.environment.files()
                if len(files) >= objects and state is not None and state.pending_bytes == 0:
                    return files
                if time.monotonic() > deadline:
                    raise DemoError(
                        f"only {len(files)} of {objects} chunks were stored within "
                        f"{STORE_SECONDS:.0f} s: {state}"
                    )
                # An engine makes steps only with requests. This one is too short to be stored.
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
            "device": self.environment.installation.device,
        }

    def show(self) -> None:
        """Prints the table of all requests."""
        headings = (
            "stage",
            "prompt",
            "tokens",
            "GPU",
            "RAM",
            "file",
            "recomputed",
            "first token",
            "answer",
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
                + (", as expected" if row.stage == CONTROL and not row.equal else ""),
            )
            for row in self.rows
        ]
        self.display.table(
            "Where the tokens of each prompt came from (answers compared with vLLM without KVTier)",
            headings,
            rows,
        )


class _Stopped(BaseException):
    """A signal ends the demo. Not an ``Exception``, so that no handler treats it as a failure."""

    def __init__(self, number: int) -> None:
        self.number = number


def _stop(number: int, _frame: FrameType | None) -> None:
    raise _Stopped(number)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Runs the demo. Exit status: 0 success, 1 failure, 128 + n if signal n ended it."""
    for number in SIGNALS:
        signal.signal(number, _stop)
    display = Display()
    keep = os.environ.get("KVTIER_DEMO_DIR")
    environment: DemoEnvironment | None = None
    try:
        policy = policy_file()
        installation = probe(os.environ.get("KVTIER_VLLM") or sys.executable)
        display.note(f"vLLM of {installation.python}, device: {installation.device}")
        environment = DemoEnvironment(installation, Path(keep) if keep else None)
        demo = Demo(environment, display)
        result = demo.run(policy)
        demo.show()
        if keep:
            display.note(f"policy, topology, environment, tier and logs are in {environment.root}")
    except (DemoError, EngineProcessError, KVTierError, OSError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    except _Stopped as stopped:
        return 128 + stopped.number
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if environment is not None:
            environment.close()
    print("RESULT " + json.dumps(result), flush=True)
    success = (
        result["identical_tokens"]
        and result["control_tokens_differ"]
        and float(str(result["reused_after_restart_ratio"])) >= 0.95
    )
    return 0 if success else 1


if __name__ == "__main__":
    sys.exit(main())
