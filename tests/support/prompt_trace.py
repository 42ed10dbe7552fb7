"""A small trace of prompts, made from a seed: conversations over shared system prompts.

Each request is a list of chunks in prefix order; equal numbers mean equal content and equal prefix.
Most requests continue a conversation that was used recently, some an old one, some begin another,
and some are documents that are used once.
"""

from __future__ import annotations

import random
from itertools import count


def prompt_trace(requests: int, seed: int = 1) -> list[list[int]]:
    """``requests`` prompts of 2 to about 40 chunks."""
    draw = random.Random(seed)
    fresh = count()
    systems = [[next(fresh) for _ in range(draw.randint(1, 8))] for _ in range(6)]
    conversations: list[list[int]] = []
    trace = []
    for _ in range(requests):
        what = draw.random()
        if what < 0.15:
            trace.append([next(fresh) for _ in range(draw.randint(8, 30))])
            continue
        if what < 0.4 or not conversations:
            prompt = list(draw.choice(systems))
        else:
            recency = min(int(draw.expovariate(0.15)), len(conversations) - 1)
            prompt = conversations.pop(len(conversations) - 1 - recency)
        if len(prompt) < 40:
            prompt = prompt + [next(fresh) for _ in range(draw.randint(1, 5))]
        conversations.append(prompt)
        trace.append(prompt)
    return trace
