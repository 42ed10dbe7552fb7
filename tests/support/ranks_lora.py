"""Requests with and without LoRA adapters on an engine with several ranks: a stage of
``ranks_run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OPTIONS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
NEW_TOKENS = 12


def run(engine: Any, tokens: list[int], adapters: list[Path]) -> list[dict[str, Any]]:
    """Runs a prompt with the base model and with each adapter, and all of them once more: with
    KVTier from a tier.

    One request at a time: the CPU engine itself mixes up adapters within one batch.
    """
    kinds: list[dict[str, Any] | None] = [None]
    kinds += [
        {"name": path.name, "number": number, "path": str(path)}
        for number, path in enumerate(adapters, 1)
    ]
    answers: list[dict[str, Any]] = [{} for _ in kinds]
    for turn in ("tokens", "again"):
        for kind, answer in zip(kinds, answers, strict=True):
            before = _loaded(engine)
            answer[turn] = _run(engine, f"{turn}-{kind and kind['number']}", tokens, kind)
            answer[f"{turn}_loaded"] = _loaded(engine) - before
    return answers


def _run(engine: Any, name: str, tokens: list[int], adapter: dict[str, Any] | None) -> list[int]:
    driver = engine.driver
    if not driver.reset_prefix_cache():
        raise TimeoutError("the GPU cache could not be emptied")
    kvtier = driver.scheduler.connector is not None
    if kvtier:
        engine.wait("not attached after a reset", engine.attached)
    driver.add(name, tokens, NEW_TOKENS, lora=adapter)
    found: list[int] = driver.finish([name])[name]["tokens"]
    if kvtier:
        engine.wait("not stored", engine.stored)
    return found


def _loaded(engine: Any) -> int:
    if engine.driver.scheduler.connector is None:
        return 0
    return sum(engine.scheduler.loads.in_flight.loaded_tokens.values())
