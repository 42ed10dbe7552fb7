"""`kvtier explain-plan`: which part of a prompt would be loaded, from numbers instead of from a running engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from kvtier.cli.console import console
from kvtier.cli.render import chosen_policy
from kvtier.config import loader
from kvtier.config.models import (
    FileSystemTierDocument,
    LiveTier,
    MemoryTierDocument,
    Selection,
    Topology,
)
from kvtier.errors import ConfigurationError
from kvtier.store.cost_model import IMMEDIATE, Prefill, TierEstimate
from kvtier.store.selection import (
    Candidate,
    CostQuery,
    Decision,
    KeySource,
    LoadDeadline,
    TierLoad,
    choose_by_cost,
    choose_prefix,
    prefix_candidates,
)
from kvtier_operator.render.documents import pod_placement, structural

OTHER_THREADS = 8


@dataclass(frozen=True, slots=True)
class Numbers:
    """The options of the command, as given. ``held``: NAME=TOKENS in prefix order; ``speeds``: NAME=MILLISECONDS,GB/S."""

    prompt_tokens: int
    held: tuple[str, ...]
    speeds: tuple[str, ...] = ()
    queued: tuple[str, ...] = ()
    in_gpu_tokens: int = 0
    bytes_per_token: int = 131_072
    tokens_per_second: float | None = None
    alpha: float | None = None
    beta: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanExplained:
    """A decision with all that led to it. ``clock``: None where nothing is waited for."""

    decision: Decision
    rated: tuple[Candidate, ...]
    names: tuple[str, ...]
    outlooks: tuple[TierLoad, ...]
    selection: Selection
    clock: LoadDeadline | None
    prefill: Prefill | None
    prompt_tokens: int
    start_tokens: int


def topology_of(file: str | None, policy: str | None, directory: Path | None) -> Topology:
    """The topology of a policy file or directory. Raises ``ConfigurationError`` and ``OSError``."""
    if directory is not None:
        if file is not None:
            raise ConfigurationError(
                "--topology",
                str(directory),
                "a policy or a topology directory says what the tiers are",
            )
        return loader.load(directory)
    if file is None:
        raise ConfigurationError(
            "--file", "nothing", "a policy (--file) or a topology directory (--topology) is needed"
        )
    chosen = chosen_policy(file, policy)
    document = structural(chosen, pod_placement(chosen))
    return Topology(structural=document, live=document.live)


def explain(
    topology: Topology, numbers: Numbers, selection: Selection | None = None
) -> PlanExplained:
    """Decides. Raises ``ConfigurationError`` for numbers that cannot be."""
    live, names = topology.live, tuple(tier.name for tier in topology.structural.tiers)
    selection = selection or live.selection
    chunk = topology.structural.chunk_tokens
    prefill = _prefill(numbers)
    start, sources = _sources(numbers, names, chunk)
    outlooks = tuple(_outlooks(topology, numbers, names, chunk * numbers.bytes_per_token))
    used = {source.tier for source in sources if source.tier}
    limit = float(
        max((_live(topology, names[tier]).load_timeout_seconds for tier in used), default=0)
    )
    question = CostQuery(
        sources,
        outlooks,
        start,
        numbers.prompt_tokens,
        prefill,
        limit,
        min_tokens=max(1, live.min_load_tokens),
    )
    if selection is Selection.COST:
        decision = choose_by_cost(question)
        clock = question.deadline(decision.chosen.keys) if decision.chosen is not None else None
    else:
        ends = [start, *(source.end_tokens for source in sources)]
        tokens = [end - begin for begin, end in pairwise(ends)]
        tiers = [source.tier for source in sources]
        decision = choose_prefix(selection, tiers, [outlook.weight for outlook in outlooks], tokens)
        clock = LoadDeadline(limit)
        if decision.chosen is not None and decision.chosen.tokens < question.min_tokens:
            decision = Decision(
                None,
                tuple(prefix_candidates(tiers, [o.weight for o in outlooks], tokens)),
                "below_min_load_tokens",
            )
    if decision.chosen is None or decision.chosen.tiers == (0,):
        clock = None
    every = [*decision.runners_up, *([decision.chosen] if decision.chosen is not None else [])]
    rated = tuple(sorted(every, key=lambda candidate: candidate.keys))
    return PlanExplained(
        decision, rated, names, outlooks, selection, clock, prefill, numbers.prompt_tokens, start
    )


def _prefill(numbers: Numbers) -> Prefill | None:
    if numbers.alpha is None and numbers.tokens_per_second is None:
        return None
    if numbers.tokens_per_second is not None:
        if numbers.alpha is not None:
            raise ConfigurationError(
                "--alpha", numbers.alpha, "it says the same as --tokens-per-second; one of the two"
            )
        _positive("--tokens-per-second", numbers.tokens_per_second)
        return Prefill(1 / numbers.tokens_per_second, 0.0)
    prefill = Prefill(numbers.alpha or 0.0, numbers.beta)
    if not prefill.usable:
        raise ConfigurationError(
            "--alpha", f"{prefill.alpha}, beta {prefill.beta}", "seconds, not negative, not both 0"
        )
    return prefill


def _positive(option: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ConfigurationError(option, value, "a positive number is")
    return value


def _sources(numbers: Numbers, names: Sequence[str], chunk: int) -> tuple[int, list[KeySource]]:
    """The chunks of the prompt in prefix order, beginning where the GPU's own cache ends."""
    tiers: list[int] = []
    size = chunk * numbers.bytes_per_token
    for name, value in (_pair("--held", given, "NAME=TOKENS") for given in numbers.held):
        tokens = _number("--held", value, "NAME=TOKENS")
        if not tokens.is_integer() or tokens < 0 or tokens % chunk:
            raise ConfigurationError(
                "--held", f"{name}={value}", f"a multiple of the chunk ({chunk} tokens) is"
            )
        chunks = int(tokens // chunk)
        if (len(tiers) + chunks) * chunk > numbers.prompt_tokens:
            raise ConfigurationError(
                "--held",
                f"{(len(tiers) + chunks) * chunk} tokens in all",
                "at most the prompt is held",
            )
        tiers += [_index("--held", name, names)] * chunks
    start = numbers.in_gpu_tokens
    if not 0 <= start <= numbers.prompt_tokens:
        raise ConfigurationError("--in-gpu", start, "a part of the prompt is")
    sources = [
        KeySource(tier, size if tier else 0, (i + 1) * chunk) for i, tier in enumerate(tiers)
    ]
    return start, [source for source in sources if source.end_tokens > start]


def _outlooks(
    topology: Topology, numbers: Numbers, names: Sequence[str], size: int
) -> list[TierLoad]:
    speeds: dict[int, TierEstimate] = {}
    for name, value in (
        _pair("--speed", given, "NAME=MILLISECONDS,GB/S") for given in numbers.speeds
    ):
        latency, _, rate = value.partition(",")
        milliseconds = _number("--speed", latency, "NAME=MILLISECONDS,GB/S")
        if milliseconds < 0:
            raise ConfigurationError("--speed", f"{name}={value}", "a latency of 0 or more is")
        gigabytes = _positive("--speed", _number("--speed", rate, "NAME=MILLISECONDS,GB/S"))
        speeds[_index("--speed", name, names)] = TierEstimate(milliseconds / 1e3, gigabytes * 1e9)
    queued: dict[int, int] = {}
    for name, value in (_pair("--queued", given, "NAME=CHUNKS") for given in numbers.queued):
        chunks = _number("--queued", value, "NAME=CHUNKS")
        if not chunks.is_integer() or chunks < 0:
            raise ConfigurationError("--queued", f"{name}={value}", "a number of chunks is")
        queued[_index("--queued", name, names)] = int(chunks)
    outlooks = []
    for index, tier in enumerate(topology.structural.tiers):
        threads = tier.read_threads if isinstance(tier, FileSystemTierDocument) else OTHER_THREADS
        estimate = IMMEDIATE if isinstance(tier, MemoryTierDocument) else speeds.get(index)
        reads = queued.get(index, 0)
        outlooks.append(
            TierLoad(_live(topology, tier.name).load_weight, estimate, threads, reads, reads * size)
        )
    return outlooks


def _live(topology: Topology, name: str) -> LiveTier:
    return topology.live.tiers.get(name) or LiveTier()


def _pair(option: str, given: str, form: str) -> tuple[str, str]:
    name, separator, value = given.partition("=")
    if not separator or not name:
        raise ConfigurationError(option, given, f"{form} is the form")
    return name, value


def _number(option: str, value: str, form: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ConfigurationError(option, value, f"a number is; {form} is the form") from None
    if not math.isfinite(number):
        raise ConfigurationError(option, value, f"a finite number is; {form} is the form")
    return number


def _index(option: str, name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise ConfigurationError(option, name, "the tiers are " + ", ".join(names))
    return names.index(name)


# Showing it.


def as_json(explained: PlanExplained) -> dict[str, Any]:
    """For programs. Times in seconds, None where there is no estimate."""
    decision, clock = explained.decision, explained.clock
    return {
        "selection": explained.selection.value,
        "promptTokens": explained.prompt_tokens,
        "inGpuTokens": explained.start_tokens,
        "prefill": None
        if explained.prefill is None
        else {"alpha": explained.prefill.alpha, "beta": explained.prefill.beta},
        "recomputeSeconds": decision.recompute_seconds,
        "tiers": [
            _tier_json(name, outlook)
            for name, outlook in zip(explained.names, explained.outlooks, strict=True)
        ],
        "candidates": [_candidate_json(explained, candidate) for candidate in explained.rated],
        "chosen": None if decision.chosen is None else _candidate_json(explained, decision.chosen),
        "reason": decision.reason,
        "tooSlow": [explained.names[tier] for tier in decision.too_slow],
        "clock": None
        if clock is None
        else {
            "seconds": clock.seconds(explained.start_tokens),
            "limitSeconds": clock.limit_seconds,
        },
    }


def _tier_json(name: str, outlook: TierLoad) -> dict[str, Any]:
    estimate = outlook.estimate
    known = estimate is not None and math.isfinite(estimate.bytes_per_second)
    return {
        "name": name,
        "loadWeight": outlook.weight,
        "latencySeconds": estimate.latency_seconds if estimate is not None else None,
        "bytesPerSecond": estimate.bytes_per_second if estimate is not None and known else None,
        "readThreads": outlook.threads,
        "queuedReads": outlook.queued_reads,
    }


def _candidate_json(explained: PlanExplained, candidate: Candidate) -> dict[str, Any]:
    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "tokens": candidate.tokens,
        "tiers": [explained.names[tier] for tier in candidate.tiers],
        "readySeconds": finite(candidate.ready_seconds),
        "judgedSeconds": finite(candidate.weighted_seconds),
        "score": candidate.score if explained.selection is Selection.WEIGHTED else None,
        "readsAtATime": candidate.parallel or None,
        "cutByTheClock": candidate.cut,
    }


def show(explained: PlanExplained) -> None:
    """For people."""
    out = console()
    decision = explained.decision
    out.print(
        Text(
            f"{explained.prompt_tokens} tokens, selection {explained.selection.value}", style="bold"
        )
    )
    _show_tiers(explained)
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    cost = explained.selection is Selection.COST
    columns = ("load", "from", "ready", "judged", "") if cost else ("load", "from", "score", "")
    for column in columns:
        table.add_column(column, justify="left" if column in ("from", "") else "right")
    nothing = (
        (_time(decision.recompute_seconds), _time(decision.recompute_seconds)) if cost else ("0",)
    )
    table.add_row("nothing", "", *nothing, "<- chosen" if decision.chosen is None else "")
    for candidate in explained.rated:
        values = (
            (_time(candidate.ready_seconds), _time(candidate.weighted_seconds))
            if cost
            else (str(candidate.score),)
        )
        names = " + ".join(explained.names[tier] for tier in candidate.tiers)
        table.add_row(
            f"{candidate.tokens}",
            names,
            *values,
            _remark(candidate, candidate is decision.chosen),
            style=None,
        )
    out.print(table)
    out.print(Text(f"because: {decision.reason}"))
    if decision.too_slow:
        names = ", ".join(explained.names[tier] for tier in decision.too_slow)
        out.print(Text(f"judged too slow for this prompt: {names}; measured again every 30 s"))
    if explained.clock is not None:
        _show_clock(explained, explained.clock)


def _show_tiers(explained: PlanExplained) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for column in ("tier", "weight", "latency", "bandwidth", "queued"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for name, outlook in zip(explained.names, explained.outlooks, strict=True):
        estimate = outlook.estimate
        if estimate is None:
            speed = ("not measured", "")
        elif math.isinf(estimate.bytes_per_second):
            speed = ("RAM", "")
        else:
            speed = (
                f"{estimate.latency_seconds * 1e3:g} ms",
                f"{estimate.bytes_per_second / 1e9:g} GB/s",
            )
        table.add_row(
            name,
            str(outlook.weight),
            *speed,
            str(outlook.queued_reads) if outlook.queued_reads else "",
        )
    console().print(table)


def _remark(candidate: Candidate, chosen: bool) -> str:
    remarks = []
    if chosen:
        remarks.append("<- chosen")
    if candidate.parallel:
        remarks.append(f"{candidate.parallel} reads at a time")
    if candidate.cut:
        remarks.append("cut by the deadline")
    return ", ".join(remarks)


def _show_clock(explained: PlanExplained, clock: LoadDeadline) -> None:
    wait = clock.seconds(explained.start_tokens)
    text = f"clock: {_time(wait)}"
    if clock.prefill is not None:
        text += f", extended by what arrives in order, {_time(clock.limit_seconds)} in any case"
    console().print(Text(text))


def _time(seconds: float | None) -> str:
    if seconds is None or math.isinf(seconds):
        return "unknown"
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"
