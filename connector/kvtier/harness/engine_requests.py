"""Requests on an engine under test: by name, and on an engine without KVTier for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.harness.engine_process import (
    DrivenEngine,
)

NEW_TOKENS = 12


class Requests:
    """Runs requests on one engine under unique names."""

    def __init__(self, engine: DrivenEngine) -> None:
        self.engine = engine
        self._count = 0

    def add(self, prompt: list[int], max_tokens: int = NEW_TOKENS, **extra: Any) -> str:
        """Queues one request; returns its name."""
        self._count += 1
        name = f"r{self._count}"
        self.engine.call("add", name=name, prompt=prompt, max_tokens=max_tokens, **extra)
        return name

    def abort(self, name: str) -> None:
        """Aborts one request."""
        self.engine.call("abort", ids=[name])

    def finish(self, names: list[str], seconds: float = 90) -> Mapping[str, Any]:
        """Steps until these requests have finished."""
        answer: Mapping[str, Any] = self.engine.call(
            "finish", ids=names, seconds=seconds, timeout_seconds=seconds + 30
        )
        return answer

    def run(self, prompt: list[int], max_tokens: int = NEW_TOKENS, **extra: Any) -> list[int]:
        """One request from beginning to end; its tokens."""
        name = self.add(prompt, max_tokens, **extra)
        tokens: list[int] = self.finish([name])[name]["tokens"]
        return tokens

    def run_together(
        self, prompts: list[list[int]], max_tokens: int = NEW_TOKENS
    ) -> list[list[int]]:
        """All prompts at once; their tokens, in order."""
        names = [self.add(prompt, max_tokens) for prompt in prompts]
        answers = self.finish(names)
        return [answers[name]["tokens"] for name in names]


class ReferenceEngine:
    """An engine without KVTier, and the tokens it returned."""

    def __init__(self, engine: DrivenEngine) -> None:
        self._engine = engine
        self._requests = Requests(engine)
        self._known: dict[str, list[int]] = {}

    def tokens(self, prompt: list[int], max_tokens: int = NEW_TOKENS, **extra: Any) -> list[int]:
        """Greedy tokens for ``prompt``, computed from its first token on."""
        key = repr((prompt, max_tokens, extra))
        if key not in self._known:
            self._engine.call("reset_prefix_cache")
            self._known[key] = self._requests.run(prompt, max_tokens, **extra)
        return self._known[key]

    def together(self, prompts: list[list[int]], max_tokens: int = NEW_TOKENS) -> list[list[int]]:
        """As ``tokens``, for several prompts, each computed by itself."""
        return [self.tokens(prompt, max_tokens) for prompt in prompts]
