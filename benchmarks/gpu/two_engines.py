"""Two engines on two GPUs of one host share one tierd: conversations move from one to the other.

Engine A computes every conversation, engine B continues it, and so on in turn. Then A is killed
with SIGKILL, and B continues everything. The ratio is the share of prompt tokens that an engine
reused of what it did not compute itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.common import options, progress, report
from benchmarks.gpu import engines

from kvtier.config.models import Daemon
from kvtier.harness.engine_process import json_answers

ANSWER_SECONDS = 240.0
START, ADDED, ANSWER = 4096, 512, 32


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much there is to hold."""
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--gpu-blocks", type=int, default=4096, help="blocks of 16 tokens")


def serve(chosen: argparse.Namespace) -> None:
    """One engine that answers lines of JSON on its standard input."""
    answer = json_answers()
    from vllm import SamplingParams

    llm, run_directory = engines.make_engine(
        "kvtier",
        chosen,
        Path(chosen.scratch),
        **engines.cache_arguments(chosen, 32_768),
    )
    tokens = engines.scaled(chosen, ANSWER)
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)

    def ask(prompts: list[list[int]]) -> list[Any]:
        requests = [{"prompt_token_ids": each} for each in prompts]
        return list(llm.generate(requests, sampling, use_tqdm=False))

    ask([list(range(1000, 1033))])
    for line in sys.stdin:
        prompts = json.loads(line)
        begin = time.perf_counter()
        outputs = ask(prompts) if prompts else []
        seconds = time.perf_counter() - begin
        if prompts:
            engines.settle(run_directory, lambda: ask([list(range(1000, 1033))]), 20)
        answer(
            {
                "seconds": seconds,
                "cached": [int(each.num_cached_tokens or 0) for each in outputs],
                "tokens": [list(each.outputs[0].token_ids) for each in outputs],
                "sessions": engines.status(run_directory).get("sessions", [])
                if run_directory
                else [],
            }
        )
    os._exit(0)


class Engine:
    """A child process with an engine on one GPU."""

    def __init__(self, name: str, gpu: int, scratch: Path, chosen: argparse.Namespace) -> None:
        self.name = name
        command = [sys.executable, __file__, "--child", name, "--scratch", str(scratch)]
        command += ["--runner", chosen.runner, "--ram-gib", str(chosen.ram_gib)]
        command += ["--layers", str(chosen.layers), "--chunk-tokens", str(chosen.chunk_tokens)]
        command += ["--gpu-blocks", str(chosen.gpu_blocks), *(["--cpu"] if chosen.cpu else [])]
        environment = {**os.environ, **engines.environment(scratch)}
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        self._log = (scratch / f"{name}.log").open("wb")
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            text=True,
        )

    def ask(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Answers all prompts; waits until what was computed is stored."""
        sink: IO[str] | None = self._process.stdin
        source = self._process.stdout
        if sink is None or source is None:
            raise SystemExit("the engine has no pipes")
        sink.write(json.dumps(prompts) + "\n")
        sink.flush()
        timer = time.monotonic() + ANSWER_SECONDS
        line = source.readline()
        if not line or time.monotonic() > timer:
            raise SystemExit(f"engine {self.name} does not answer")
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        """Ends the engine's processes without a word."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)


def start_tierd(topology: Path, scratch: Path) -> subprocess.Popen[bytes]:
    """Starts the tierd that both engines use, as the sidecar of a pod is."""
    engines.run_directory_of(topology).mkdir(mode=0o700, exist_ok=True)
    with (scratch / "tierd.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "kvtier.tierd", "--topology", str(topology)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def main() -> None:
    """Moves conversations between two engines."""
    chosen = options(__doc__ or "", engines.add_options, add_options)
    if chosen.child:
        serve(chosen)
        return
    import numpy as np

    generator = np.random.default_rng(1)

    def new(count: int) -> list[int]:
        return [int(each) for each in generator.integers(1000, 127_000, size=count)]

    start, added = engines.scaled(chosen, START), engines.scaled(chosen, ADDED)
    talks = [new(start) for _ in range(chosen.conversations)]
    table: list[list[object]] = []
    survivor = 0.0
    reused, offered, attainable = 0, 0, 0
    whole: list[int] = []
    with engines.scratch_directory(chosen) as scratch:
        topology = engines.make_topology(scratch / "topology", chosen, Daemon.SIDECAR)
        tierd = start_tierd(topology, scratch)
        pair = [Engine(name, gpu, scratch, chosen) for gpu, name in enumerate("ab")]
        try:
            for engine in pair:
                progress(f"starting {engine.name}")
                while sum(e["ready"] for e in engine.ask([])["sessions"]) < 4:
                    time.sleep(0.5)
            for number in range(chosen.rounds + 1):
                engine = pair[number % 2] if number < chosen.rounds else pair[1]
                if number == chosen.rounds:
                    pair[0].kill()
                    time.sleep(2)
                answer = engine.ask(talks)
                cached, total = sum(answer["cached"]), sum(map(len, talks))
                note = "a is dead" if number == chosen.rounds else ""
                table.append(
                    [number, engine.name, f"{answer['seconds']:.2f}", f"{cached / total:.3f}", note]
                )
                if number == chosen.rounds:
                    survivor = cached / total
                if number:
                    attainable += sum(whole)
                    reused, offered = reused + cached, offered + total
                # The last token of an answer was never computed.
                size = chosen.chunk_tokens
                whole = [
                    (len(talk) + len(tokens) - 1) // size * size
                    for talk, tokens in zip(talks, answer["tokens"], strict=True)
                ]
                talks = [
                    talk + tokens + new(added)
                    for talk, tokens in zip(talks, answer["tokens"], strict=True)
                ]
        finally:
            for engine in pair:
                engine.kill()
            tierd.terminate()
            tierd.wait(30)
    report(
        chosen.json,
        "two engines, one tierd",
        ["round", "engine", "seconds", "reused", ""],
        table,
        reused / max(1, offered),
        "prompt tokens that were not computed again; at least 0.90",
        {
            "reused": reused / max(1, offered),
            "attainable": attainable / max(1, offered),
            "survivor": survivor,
        },
    )


if __name__ == "__main__":
    main()
