"""What the GPU benchmarks are judged by: one line for each target, measured or not.

A target compares a value of one part of the suite with a limit, or the value by the smallest of
others. Names of values are those of ``measured`` in the benchmarks' JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LENGTHS = (4096, 16_384, 32_768, 65_536)
BUSY_LENGTHS = LENGTHS[:3]
Values = Mapping[str, Mapping[str, float]]
"""By part, by name."""


@dataclass(frozen=True, slots=True)
class Target:
    """``name`` of ``part`` is at most ``limit``, or at least. ``beside``: (part, name) of others;
    the value is divided by the smallest of those that were measured."""

    what: str
    part: str
    name: str
    limit: float
    at_most: bool = True
    beside: tuple[tuple[str, str], ...] = ()

    def value(self, values: Values) -> float | None:
        """None if it was not measured."""
        found = values.get(self.part, {}).get(self.name)
        if found is None or not self.beside:
            return found
        others = [values.get(part, {}).get(name) for part, name in self.beside]
        known = [each for each in others if each]
        return found / min(known) if known else None

    def met(self, value: float) -> bool:
        """Whether the value reaches the target."""
        return value <= self.limit if self.at_most else value >= self.limit


def _reloads() -> list[Target]:
    found = []
    rows = [
        ("reload-v2", "V2"),
        ("reload-v1", "V1"),
        ("reload-v2-in-process", "V2, in process"),
        ("reload-v1-in-process", "V1, in process"),
    ]
    for part, runner in rows:
        for length in LENGTHS:
            what = f"reload of {length} tokens, {runner}"
            found.append(
                Target(f"{what}, by link and hit", part, f"kvtier.{length}.by_floor", 1.05)
            )
            best = tuple((other, f"peer.{length}.ms") for other in ("reload-v2", "reload-v1"))
            mine = f"kvtier.{length}.ms"
            found.append(Target(f"{what}, by vLLM's best", part, mine, 1.0, beside=best))
    for length in LENGTHS:
        what = f"whole chunks reused after one cold pass, {length} tokens"
        found.append(Target(what, "reload-v2", f"kvtier.{length}.reused", 1.0, at_most=False))
    for part, gpus in (("reload-v2", "one GPU"), ("reload-two", "two GPUs")):
        what = f"texts after a reload are those after a hit, {gpus}"
        found.append(Target(what, part, "kvtier.equal", 1.0, at_most=False))
    for length in LENGTHS:
        what = f"reload of {length} tokens, two GPUs, by link and hit"
        found.append(Target(what, "reload-two", f"kvtier.{length}.by_floor", 1.05))
        what = f"whole chunks reused after one cold pass, {length} tokens, two GPUs"
        found.append(Target(what, "reload-two", f"kvtier.{length}.reused", 1.0, at_most=False))
    return found


def _rounds() -> list[Target]:
    found = []
    rows = [
        ("rounds-32", "32 conversations, 4,096 blocks"),
        ("rounds-48", "48 conversations, 2,048 blocks"),
        ("rounds-two", "32 conversations, two GPUs"),
    ]
    for part, what in rows:
        found.append(Target(f"{what}, time by vLLM's connector", part, "ratio", 0.95))
        found.append(Target(f"{what}, reused", part, "kvtier.reused", 0.90, at_most=False))
    what = "32 conversations, chunks of 256 tokens, reused, by what such chunks allow"
    beside = (("rounds-256", "attainable"),)
    found.append(Target(what, "rounds-256", "kvtier.reused", 0.99, False, beside))
    return found


def _busy() -> list[Target]:
    found = []
    for length in BUSY_LENGTHS:
        mine, peer = f"kvtier.{length}.ms", (("busy", f"peer.{length}.ms"),)
        what = f"reload of {length} tokens beside 32 streams"
        found.append(Target(f"{what}, by vLLM's connector", "busy", mine, 1.0, beside=peer))
        p99 = f"kvtier.{length}.p99_by_quiet"
        found.append(Target(f"{what}, the streams' p99 by quiet", "busy", p99, 1.5))
    return found


def _stores() -> list[Target]:
    cold = [
        Target(
            f"new prompt of {length} tokens, RAM, by none", "stores", f"kvtier.{length}.cold", 1.01
        )
        for length in (4096, 16_384, 65_536)
    ] + [
        Target(
            f"new prompt of {length} tokens, files, by none", "stores", f"files.{length}.cold", 1.02
        )
        for length in (4096, 16_384, 65_536)
    ]
    return [
        *cold,
        Target("throughput with RAM, by none", "stores", "kvtier.throughput", 0.995, False),
        Target("throughput with files, by none", "stores", "files.throughput", 0.99, False),
        Target("stored of 65,536 tokens, RAM", "stores", "kvtier.stored.ram", 1.0, False),
        Target("stored of 65,536 tokens, files", "stores", "files.stored.files", 0.95, False),
        Target("dropped stores, RAM", "stores", "kvtier.dropped", 0),
        Target("seconds of writing after a batch, files on tmpfs", "stores", "files.drain", 1.0),
    ]


def _files() -> list[Target]:
    found = []
    for part, medium in (("files-tmpfs", "tmpfs"), ("files-disk", "disk")):
        for length in BUSY_LENGTHS:
            what = f"reload of {length} tokens from files on {medium}"
            by_read = f"{length}.by_read"
            found.append(Target(f"{what}, by reading them", part, by_read, 1.15))
            found.append(Target(f"{what}, by recomputing", part, f"{length}.by_computed", 1.05))
    return found


TARGETS: Sequence[Target] = (
    *_reloads(),
    *_rounds(),
    *_busy(),
    *_stores(),
    *_files(),
    Target("seconds until a pool of 36 GiB is usable", "reload-v2", "kvtier.attach", 4.0),
    Target(
        "seconds until a pool of 64 GiB is usable, two GPUs", "reload-two", "kvtier.attach", 4.0
    ),
    Target("errors that compute-sanitizer finds in the self-test", "sanitizer", "errors", 0),
    Target("two engines, one tierd, reused over all rounds", "two-engines", "reused", 0.90, False),
    Target("reused by the engine that survives", "two-engines", "survivor", 0.90, False),
)


def judged(values: Values) -> list[list[str]]:
    """A row for each target: what, measured, target, met."""
    rows = []
    for target in TARGETS:
        value = target.value(values)
        limit = f"{'<=' if target.at_most else '>='} {target.limit:g}"
        if value is None:
            rows.append([target.what, "-", limit, "not measured"])
        else:
            met = "met" if target.met(value) else "NOT MET"
            rows.append([target.what, f"{value:.3f}", limit, met])
    return rows
