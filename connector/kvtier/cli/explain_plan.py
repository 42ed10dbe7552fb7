"""``kvtier explain-plan``: which prefix an engine would load, computed from given measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from kvtier.cli.console import console, print_table
from kvtier.cli.inputs import OptionError, load_policy, parse_assignment, parse_number
from kvtier.config import loader
from kvtier.config.models import (
    FileSystemTierDocument,
    LiveTier,
    MemoryTierDocument,
    Selection,
    Topology,
)
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
class PlanInput:
    """The options of the command, unparsed.

    ``held``: NAME=TOKENS in prefix order. ``speeds``: NAME=MS,GB/S. ``queued``: NAME=CHUNKS.
    """

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
class PlanExplanation:
    """A decision and its inputs. ``deadline`` is None if the request does not wait for a tier."""

    decision: Decision
    candidates: tuple[Candidate, ...]
    names: tuple[str, ...]
    loads: tuple[TierLoad, ...]
    selection: Selection
    deadline: LoadDeadline | None
    prefill: Prefill | None
    prompt_tokens: int
    start_tokens: int


def load_topology(file: str | None, policy: str | None, directory: Path | None) -> Topology:
    """The topology of a policy file or directory. Raises ``ConfigurationError`` and ``OSError``."""
    if directory is not None:
        if file is not None:
            raise OptionError("--topology", directory, "must not be combined with --file")
        return loader.load(directory)
    if file is None:
        raise OptionError("--file", "", "either --file or --topology is required")
    selected = load_policy(file, policy)
    document = structural(selected, pod_placement(selected))
    return Topology(structural=document, live=document.live)


def explain(
    topology: Topology, given: PlanInput, selection: Selection | None = None
) -> PlanExplanation:
    """Makes the decision. Raises ``OptionError`` for an invalid option."""
    live, names = topology.live, tuple(tier.name for tier in topology.structural.tiers)
    selection = selection or live.selection
    chunk_tokens = topology.structural.chunk_tokens
    prefill = _prefill(given)
    start, sources = _sources(given, names, chunk_tokens)
    loads = tuple(_tier_loads(topology, given, names, chunk_tokens * given.bytes_per_token))
    used = {source.tier for source in sources if source.tier}
    timeouts = (_live_tier(topology, names[tier]).load_timeout_seconds for tier in used)
    limit = float(max(timeouts, default=0))
    query = CostQuery(
        sources,
        loads,
        start,
        given.prompt_tokens,
        prefill,
        limit,
        min_tokens=max(1, live.min_load_tokens),
    )
    if selection is Selection.COST:
        decision = choose_by_cost(query)
        deadline = query.deadline(decision.chosen.keys) if decision.chosen is not None else None
    else:
        decision = _choose_by_rule(query, selection)
        deadline = LoadDeadline(limit)
    if decision.chosen is None or decision.chosen.tiers == (0,):
        deadline = None
    every = [*decision.runners_up, *([decision.chosen] if decision.chosen is not None else [])]
    return PlanExplanation(
        decision=decision,
        candidates=tuple(sorted(every, key=lambda candidate: candidate.keys)),
        names=names,
        loads=loads,
        selection=selection,
        deadline=deadline,
        prefill=prefill,
        prompt_tokens=given.prompt_tokens,
        start_tokens=start,
    )


def _choose_by_rule(query: CostQuery, selection: Selection) -> Decision:
    ends = [query.start_tokens, *(source.end_tokens for source in query.sources)]
    tokens = [end - begin for begin, end in pairwise(ends)]
    tiers = [source.tier for source in query.sources]
    weights = [load.weight for load in query.tiers]
    decision = choose_prefix(selection, tiers, weights, tokens)
    if decision.chosen is None or decision.chosen.tokens >= query.min_tokens:
        return decision
    candidates = tuple(prefix_candidates(tiers, weights, tokens))
    return Decision(None, candidates, "below_min_load_tokens")


def _prefill(given: PlanInput) -> Prefill | None:
    if given.tokens_per_second is not None:
        if given.alpha is not None:
            requirement = "must not be combined with --tokens-per-second"
            raise OptionError("--alpha", given.alpha, requirement)
        _require_positive("--tokens-per-second", given.tokens_per_second)
        return Prefill(1 / given.tokens_per_second, 0.0)
    if given.alpha is None:
        return None
    prefill = Prefill(given.alpha, given.beta)
    if not prefill.usable:
        values = f"{prefill.alpha}, --beta {prefill.beta}"
        raise OptionError("--alpha", values, "must not be negative or both 0")
    return prefill


def _sources(
    given: PlanInput, names: Sequence[str], chunk_tokens: int
) -> tuple[int, list[KeySource]]:
    """The chunks of the prompt in prefix order, starting where the GPU's own cache ends."""
    tiers: list[int] = []
    size = chunk_tokens * given.bytes_per_token
    form = "NAME=TOKENS"
    for text in given.held:
        name, value = parse_assignment("--held", text, form)
        tokens = parse_number("--held", value, form)
        if not tokens.is_integer() or tokens < 0 or tokens % chunk_tokens:
            requirement = f"must be a multiple of the chunk size ({chunk_tokens} tokens)"
            raise OptionError("--held", text, requirement)
        chunks = int(tokens // chunk_tokens)
        total = (len(tiers) + chunks) * chunk_tokens
        if total > given.prompt_tokens:
            requirement = f"must be at most the prompt ({given.prompt_tokens} tokens) in total"
            raise OptionError("--held", text, requirement)
        tiers += [_tier_index("--held", name, names)] * chunks
    start = given.in_gpu_tokens
    if not 0 <= start <= given.prompt_tokens:
        requirement = f"must be between 0 and the prompt ({given.prompt_tokens} tokens)"
        raise OptionError("--in-gpu", start, requirement)
    sources = [
        KeySource(tier, size if tier else 0, (index + 1) * chunk_tokens)
        for index, tier in enumerate(tiers)
    ]
    return start, [source for source in sources if source.end_tokens > start]


def _tier_loads(
    topology: Topology, given: PlanInput, names: Sequence[str], chunk_bytes: int
) -> list[TierLoad]:
    speeds = dict(_speed(text, names) for text in given.speeds)
    queued = dict(_queued_chunks(text, names) for text in given.queued)
    loads = []
    for index, tier in enumerate(topology.structural.tiers):
        threads = OTHER_THREADS
        if isinstance(tier, FileSystemTierDocument):
            threads = tier.read_threads * len(tier.directories)
        estimate = IMMEDIATE if isinstance(tier, MemoryTierDocument) else speeds.get(index)
        reads = queued.get(index, 0)
        weight = _live_tier(topology, tier.name).load_weight
        loads.append(TierLoad(weight, estimate, threads, reads, reads * chunk_bytes))
    return loads


def _speed(text: str, names: Sequence[str]) -> tuple[int, TierEstimate]:
    form = "NAME=MS,GB/S"
    name, value = parse_assignment("--speed", text, form)
    latency, _, rate = value.partition(",")
    milliseconds = parse_number("--speed", latency, form)
    if milliseconds < 0:
        raise OptionError("--speed", text, "must have a latency of 0 or more")
    gigabytes = _require_positive("--speed", parse_number("--speed", rate, form))
    return _tier_index("--speed", name, names), TierEstimate(milliseconds / 1e3, gigabytes * 1e9)


def _queued_chunks(text: str, names: Sequence[str]) -> tuple[int, int]:
    form = "NAME=CHUNKS"
    name, value = parse_assignment("--queued", text, form)
    chunks = parse_number("--queued", value, form)
    if not chunks.is_integer() or chunks < 0:
        raise OptionError("--queued", text, "must be a number of chunks that is not negative")
    return _tier_index("--queued", name, names), int(chunks)


def _live_tier(topology: Topology, name: str) -> LiveTier:
    return topology.live.tiers.get(name) or LiveTier()


def _require_positive(option: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise OptionError(option, value, "must be positive")
    return value


def _tier_index(option: str, name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise OptionError(option, name, f"must be one of the tiers: {', '.join(names)}")
    return names.index(name)


# Output.


def to_json(explained: PlanExplanation) -> dict[str, Any]:
    """The output of ``--json``. Times are in seconds, None without an estimate."""
    decision, deadline = explained.decision, explained.deadline
    return {
        "selection": explained.selection.value,
        "promptTokens": explained.prompt_tokens,
        "inGpuTokens": explained.start_tokens,
        "prefill": None
        if explained.prefill is None
        else {"alpha": explained.prefill.alpha, "beta": explained.prefill.beta},
        "recomputeSeconds": decision.recompute_seconds,
        "tiers": [
            _tier_json(name, load)
            for name, load in zip(explained.names, explained.loads, strict=True)
        ],
        "candidates": [_candidate_json(explained, candidate) for candidate in explained.candidates],
        "chosen": None if decision.chosen is None else _candidate_json(explained, decision.chosen),
        "reason": decision.reason,
        "tooSlow": [explained.names[tier] for tier in decision.too_slow],
        "deadline": None
        if deadline is None
        else {
            "seconds": deadline.seconds(explained.start_tokens),
            "limitSeconds": deadline.limit_seconds,
        },
    }


def _tier_json(name: str, load: TierLoad) -> dict[str, Any]:
    estimate = load.estimate
    known = estimate is not None and math.isfinite(estimate.bytes_per_second)
    return {
        "name": name,
        "loadWeight": load.weight,
        "latencySeconds": estimate.latency_seconds if estimate is not None else None,
        "bytesPerSecond": estimate.bytes_per_second if estimate is not None and known else None,
        "readThreads": load.threads,
        "queuedReads": load.queued_reads,
    }


def _candidate_json(explained: PlanExplanation, candidate: Candidate) -> dict[str, Any]:
    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "tokens": candidate.tokens,
        "tiers": [explained.names[tier] for tier in candidate.tiers],
        "readySeconds": finite(candidate.ready_seconds),
        "weightedSeconds": finite(candidate.weighted_seconds),
        "score": candidate.score if explained.selection is Selection.WEIGHTED else None,
        "parallelReads": candidate.parallel or None,
        "limitedByDeadline": candidate.cut,
    }


def show(explained: PlanExplanation) -> None:
    """Prints the tiers, the candidates and the decision."""
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
    columns = ("load", "from", "ready", "weighted", "") if cost else ("load", "from", "score", "")
    for column in columns:
        table.add_column(column, justify="left" if column in ("from", "") else "right")
    nothing = (
        (_time(decision.recompute_seconds), _time(decision.recompute_seconds)) if cost else ("0",)
    )
    table.add_row("nothing", "", *nothing, "<- chosen" if decision.chosen is None else "")
    for candidate in explained.candidates:
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
    print_table(table)
    out.print(Text(f"reason: {decision.reason}"))
    if decision.too_slow:
        names = ", ".join(explained.names[tier] for tier in decision.too_slow)
        out.print(Text(f"too slow for this prompt: {names}; measured again every 30 s"))
    if explained.deadline is not None:
        _show_deadline(explained, explained.deadline)


def _show_tiers(explained: PlanExplanation) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for column in ("tier", "weight", "latency", "bandwidth", "queued"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for name, load in zip(explained.names, explained.loads, strict=True):
        estimate = load.estimate
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
            str(load.weight),
            *speed,
            str(load.queued_reads) if load.queued_reads else "",
        )
    print_table(table)


def _remark(candidate: Candidate, chosen: bool) -> str:
    remarks = []
    if chosen:
        remarks.append("<- chosen")
    if candidate.parallel:
        remarks.append(f"{candidate.parallel} parallel reads")
    if candidate.cut:
        remarks.append("limited by the deadline")
    return ", ".join(remarks)


def _show_deadline(explained: PlanExplanation, deadline: LoadDeadline) -> None:
    wait = deadline.seconds(explained.start_tokens)
    text = f"deadline: {_time(wait)}"
    if deadline.prefill is not None:
        limit = _time(deadline.limit_seconds)
        text += f", extended as chunks arrive in order, at most {limit}"
    console().print(Text(text))


def _time(seconds: float | None) -> str:
    if seconds is None or math.isinf(seconds):
        return "unknown"
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"
