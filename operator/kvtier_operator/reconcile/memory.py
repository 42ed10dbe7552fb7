"""What is remembered of a policy between reconciles. A restart loses it, and nothing but a repeated look comes of that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PolicyMemory:
    """``written_at``: when the status last changed (seconds since 1970; None: not known). ``generation`` and
    ``changed_at``: the newest generation of the policy that was seen, and since when; 0 for one that was in force before this
    process. ``pod_states``: the state of each pod by uid at the last look, for Events; None before the first.
    """

    written_at: float | None = None
    generation: int | None = None
    changed_at: float = 0.0
    pod_states: dict[str, str] | None = None

    def see(self, generation: int, reported: int | None, now: float) -> None:
        """Takes note of a generation. ``reported``: the one that the status in force is about."""
        if self.generation is None:
            self.changed_at = 0.0 if reported in (None, generation) else now
        elif self.generation != generation:
            self.changed_at = now
        self.generation = generation
