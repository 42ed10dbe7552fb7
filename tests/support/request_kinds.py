"""Runs every kind of request on real engines, without and with KVTier, one engine after the other
in one process.

    python request_kinds.py DIRECTORY

Prints one line of JSON: by engine and by kind of request, what the engine answered (``tokens``, and
``numbers`` where log-probabilities or embeddings are asked for), how many tokens were loaded by
tier, how many chunks were stored, and the requests that took no part, by reason. Counts are those
of the engine's ``/metrics``.

One process, because most of the time that an engine takes to start is spent importing vLLM. The
engine with ngram drafts is the last one: vLLM cannot start another after it has imported numba.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from hybrid_run import SequentialEngine
from kind_models import (
    FIRST_TEXT_TOKEN,
    IMAGE_PIXELS,
    IMAGE_TOKEN,
    TEXT_TOKENS,
    write_eagle_head,
    write_image_model,
    write_text_model,
)

from kvtier.config.models import Topology
from kvtier.config.writer import write
from kvtier.engines.vllm.plugin import transfer_config
from kvtier.harness.engine_driver import Driver
from kvtier.harness.engine_process import json_answers, parse_metrics, prepare_cpu_engine
from kvtier.harness.engine_testbed import CHUNK_TOKENS, ENGINE_OPTIONS, EngineOptions
from kvtier.harness.tiny_model import CPU_LLAMA

NEW_TOKENS = 12
PROMPT_CHUNKS = 4
PROMPT_TOKENS = PROMPT_CHUNKS * CHUNK_TOKENS + 9
BEFORE_IMAGE = CHUNK_TOKENS + 6
Answer = dict[str, Any]
Kinds = dict[str, Callable[["KindsEngine"], Answer]]


def text(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """A prompt of ordinary tokens."""
    generator = np.random.default_rng(seed)
    return [int(each) for each in FIRST_TEXT_TOKEN + generator.integers(0, TEXT_TOKENS, tokens)]


class KindsDriver(Driver):
    """A driver whose engine may be one of embeddings, which does not generate."""

    def settle(self, seconds: float = 30) -> bool:
        """Steps until the scheduler has no requests, and lets the last statistics out."""
        deadline = time.monotonic() + seconds
        for round_number in range(2):
            while self.scheduler.has_requests():
                if time.monotonic() > deadline:
                    return False
                self.engine.step()
                time.sleep(0.002)
            if round_number == 0:
                tiny = [{"prompt_token_ids": [5, 6, 7]}]
                if self.engine.model_config.runner_type == "pooling":
                    self.llm.embed(tiny, use_tqdm=False)
                else:
                    self.llm.generate(tiny, greedy(2), use_tqdm=False)
        return True


class KindsEngine(SequentialEngine):
    """One engine, and the counters of its ``/metrics``."""

    def __init__(self, options: dict[str, Any], topology: Path | None = None) -> None:
        merged = {**ENGINE_OPTIONS, "skip_tokenizer_init": False, **options}
        if topology is not None:
            merged["kv_transfer_config"] = transfer_config(str(topology))
        self.driver = KindsDriver(merged)
        self.llm = self.driver.llm
        self.attached_to_tierd = topology is not None
        if self.attached_to_tierd:
            self.wait("not attached", self.attached)

    def counts(self) -> dict[str, float]:
        """The samples that tests look at, labels included."""
        return parse_metrics(self.driver.metrics("vllm:"))

    def empty_cache(self) -> None:
        """Waits until everything is stored, and empties the GPU cache."""
        if self.attached_to_tierd:
            self.wait("not stored", self.stored)
        if not self.driver.reset_prefix_cache():
            raise TimeoutError("the GPU cache could not be emptied")
        if self.attached_to_tierd:
            self.wait("not attached after a reset", self.attached)
            self.driver.settle()

    def run_kinds(self, kinds: Kinds) -> dict[str, Answer]:
        """Every kind, each with an empty GPU cache."""
        return {name: self._run_kind(kind) for name, kind in kinds.items()}

    def _run_kind(self, kind: Callable[[KindsEngine], Answer]) -> Answer:
        self.empty_cache()
        before = self.counts()
        answer = kind(self)
        self.driver.settle()
        if self.attached_to_tierd:
            self.wait("not stored", self.stored)
            # What was committed last is counted in a later step.
            self.driver.settle()
        after = self.counts()
        return {
            **answer,
            "loaded": _moved(before, after, "vllm:kvtier_loaded_tokens_total", "tier"),
            "failed": _moved(before, after, "vllm:kvtier_load_failures_total", "reason"),
            "skipped": _moved(before, after, "vllm:kvtier_skipped_requests_total", "reason"),
            "drafts": _total(before, after, "vllm:spec_decode_num_drafts_total"),
            "promotions": _moved(before, after, "vllm:kvtier_promotions_total", "outcome"),
            "stored": _total(before, after, "vllm:kvtier_stored_chunks_total"),
        }


def _moved(
    before: dict[str, float], after: dict[str, float], name: str, label: str
) -> dict[str, int]:
    """By how much each sample of a counter rose, by the value of ``label``."""
    found = {}
    for sample, value in after.items():
        rise = int(value - before.get(sample, 0))
        if sample.startswith(name + "{") and rise:
            found[sample.partition(f'{label}="')[2].partition('"')[0]] = rise
    return found


def _total(before: dict[str, float], after: dict[str, float], name: str) -> int:
    return sum(_moved(before, after, name, "model_name").values())


def greedy(tokens: int = NEW_TOKENS, **more: Any) -> Any:
    """Sampling parameters of a greedy request."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, **more)


def _generate(engine: KindsEngine, prompts: list[Any], parameters: Any) -> Answer:
    """Tokens of every completion, and the log-probabilities that were asked for."""
    found: list[list[int]] = []
    numbers: list[float] = []
    for output in engine.llm.generate(prompts, parameters, use_tqdm=False):
        numbers += _probabilities(output.prompt_logprobs or ())
        for completion in output.outputs:
            found.append(list(completion.token_ids))
            numbers += _probabilities(completion.logprobs or ())
    return {"tokens": found, "numbers": numbers}


def _probabilities(positions: Iterable[Any]) -> list[float]:
    return [each.logprob for position in positions for _, each in sorted((position or {}).items())]


# The kinds.


def _prompt(seed: int) -> dict[str, Any]:
    return {"prompt_token_ids": text(seed)}


def _log_probabilities(engine: KindsEngine) -> Answer:
    return _generate(engine, [_prompt(1)], greedy(logprobs=3))


def _prompt_log_probabilities(engine: KindsEngine) -> Answer:
    return _generate(engine, [_prompt(2)], greedy(prompt_logprobs=1))


def _after_prompt_log_probabilities(engine: KindsEngine) -> Answer:
    return _generate(engine, [_prompt(2)], greedy())


def _several_completions(engine: KindsEngine) -> Answer:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.8, seed=5, n=3, max_tokens=6, ignore_eos=True)
    return _generate(engine, [_prompt(3)], parameters)


def _beam_search(engine: KindsEngine) -> Answer:
    from vllm.sampling_params import BeamSearchParams

    parameters = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    (output,) = engine.llm.beam_search([_prompt(4)], parameters)
    return {
        "tokens": [list(each.tokens[PROMPT_TOKENS:]) for each in output.sequences],
        "numbers": [float(each.cum_logprob) for each in output.sequences],
    }


def _structured_output(engine: KindsEngine) -> Answer:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex="(ab|cd|ef){4}x")
    parameters = SamplingParams(temperature=0, max_tokens=20, structured_outputs=grammar)
    return _generate(engine, [_prompt(5)], parameters)


def _image(seed: int) -> Any:
    from PIL import Image

    shape = (IMAGE_PIXELS, IMAGE_PIXELS, 3)
    pixels = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)
    return Image.fromarray(pixels)


def _images(engine: KindsEngine) -> Answer:
    """The same text around two images, the second after the first is stored and the GPU cache is
    empty."""
    tokens = text(6)
    prompt = [*tokens[:BEFORE_IMAGE], IMAGE_TOKEN, *tokens[BEFORE_IMAGE:]]
    found: Answer = {"tokens": []}
    for seed in (1, 2):
        if seed != 1:
            engine.driver.settle()
            engine.empty_cache()
        content = {"prompt_token_ids": prompt, "multi_modal_data": {"image": _image(seed)}}
        found["tokens"] += _generate(engine, [content], greedy())["tokens"]
    return found


def _prompt_embeddings(engine: KindsEngine) -> Answer:
    import torch

    generator = torch.Generator().manual_seed(3)
    vectors = torch.randn(PROMPT_TOKENS, CPU_LLAMA.hidden, generator=generator) * 0.2
    return _generate(engine, [{"prompt_embeds": vectors}], greedy())


def _streaming_input(engine: KindsEngine) -> Answer:
    """One session whose prompt comes in two parts. The engine's front end does the same."""
    from vllm.sampling_params import RequestOutputKind

    core, name = engine.driver.engine, "session"
    parameters = greedy(output_kind=RequestOutputKind.DELTA)
    tasks = core.get_supported_tasks()

    def made(prompt: list[int], request_id: str, resumable: bool) -> Any:
        return core.input_processor.process_inputs(
            request_id=request_id,
            prompt={"prompt_token_ids": prompt},
            params=parameters,
            resumable=resumable,
            supported_tasks=tasks,
        )

    end = made([0], name, False)
    core.input_processor.assign_request_id(end)
    found: list[int] = []
    parts = [text(7), text(8, 70)]
    for number, part in enumerate([*parts, None], 1):
        request = end if part is None else made(part, end.request_id, True)
        request.external_req_id = name
        core.output_processor.add_request(_copy(request), None, None, 0)
        core.engine_core.add_request(request)
        deadline = time.monotonic() + 60
        while part is not None and len(found) < number * NEW_TOKENS:
            for output in core.step():
                found += output.outputs[0].token_ids
            if time.monotonic() > deadline:
                raise TimeoutError(f"the session returned {len(found)} tokens")
    return {"tokens": [found]}


def _copy(request: Any) -> Any:
    """A copy, as the front end has one where it is another process: both extend the prompt."""
    copied = copy.copy(request)
    copied.prompt_token_ids = list(request.prompt_token_ids)
    return copied


GENERATION: Kinds = {
    "log-probabilities": _log_probabilities,
    "prompt-log-probabilities": _prompt_log_probabilities,
    "after-prompt-log-probabilities": _after_prompt_log_probabilities,
    "several-completions": _several_completions,
    "beam-search": _beam_search,
    "structured-output": _structured_output,
    "images": _images,
    "prompt-embeddings": _prompt_embeddings,
    "streaming-input": _streaming_input,
}
SPECULATION: Kinds = {
    "speculative": lambda engine: _generate(engine, [_prompt(9), _prompt(10)], greedy(40)),
}
POOLING: Kinds = {
    "embedding": lambda engine: {
        "numbers": list(
            itertools.chain.from_iterable(
                each.outputs.embedding
                for each in engine.llm.embed([_prompt(11), _prompt(12)], use_tqdm=False)
            )
        )
    },
}


# The engines.


def run(directory: Path) -> dict[str, Any]:
    """Every engine, and the kinds that it can run."""
    topology = _topology(directory)
    images = {
        "model": str(write_image_model(directory / "images")),
        "enable_prompt_embeds": True,
        "mm_processor_cache_gb": 0,
    }
    words = str(write_text_model(directory / "words"))
    head = str(write_eagle_head(directory / "head"))
    result: dict[str, Any] = {}

    def served(name: str, options: dict[str, Any], kinds: Kinds) -> int:
        """Returns how many objects there are."""
        engine = KindsEngine(options, topology)
        result[f"{name}, first"] = engine.run_kinds(kinds)
        result[f"{name}, RAM"] = engine.run_kinds(kinds)
        objects = len(engine.scheduler.session.replica)
        engine.close()
        return objects

    def plain(name: str, options: dict[str, Any], kinds: Kinds) -> None:
        engine = KindsEngine(options)
        result[name] = engine.run_kinds(kinds)
        engine.close()

    plain("generation", images, GENERATION)
    objects = served("generation", images, GENERATION)
    engine = KindsEngine(images, topology)
    engine.wait("files not found", lambda: len(engine.scheduler.session.replica) >= objects)
    result["generation, restarted"] = engine.run_kinds(GENERATION)
    engine.close()
    plain("speculation", {"model": words}, SPECULATION)
    for method, settings in (
        ("draft_model", {"model": words, "num_speculative_tokens": 3}),
        ("eagle", {"model": head, "num_speculative_tokens": 2}),
    ):
        options = {"model": words, "speculative_config": {"method": method, **settings}}
        served(method, options, SPECULATION)
    pooling = {"model": words, "runner": "pooling", "convert": "embed"}
    plain("pooling", pooling, POOLING)
    served("pooling", pooling, POOLING)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    served("ngram", {"model": words, "speculative_config": ngram}, SPECULATION)
    return result


def _topology(directory: Path) -> Path:
    (directory / "files").mkdir(parents=True)
    tuning = EngineOptions(persistence="Process")
    run_directory = Path("/dev/shm") / f"kvtier-kinds-{os.getpid()}"
    structural = tuning.structural("kinds", run_directory, directory / "files")
    topology = directory / "topology"
    topology.mkdir()
    write(topology, Topology(structural=structural, live=tuning.live()))
    return topology


def main() -> None:
    """Command line: see the module's text."""
    answer = json_answers()
    prepare_cpu_engine()
    # Compiling takes a minute, and the kernels are used a few times.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["NUMBA_DISABLE_JIT"] = "1"
    answer(run(Path(sys.argv[1])))
    os._exit(0)


if __name__ == "__main__":
    main()
