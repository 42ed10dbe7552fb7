"""A configuration of vLLM without a model: objects of vLLM's classes with default values.

Their constructors, which read a model and the machine, are not called.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm.config
from tests.unit.scheduler.scheduler_testbed import topology

from kvtier.engines.vllm import identity_fields
from kvtier.engines.vllm.identity import describe
from kvtier.engines.vllm.identity_fields import CONFIG_FIELDS, adapter_settings
from kvtier.namespace import canonical_json
from kvtier.planner import GroupKind, KVCacheGroup, Planner

SEED = "ab" * 32
PLANNER = Planner.build([KVCacheGroup(GroupKind.FULL, 32, "FullAttentionSpec")], 64, 32)


class HfConfig:
    """A HF configuration."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def instance(name: str, **values: Any) -> Any:
    """An object of a class of vLLM with default values, which its constructor has not seen."""
    made = object.__new__(getattr(vllm.config, name))
    for each in dataclasses.fields(made):
        made.__dict__[each.name] = identity_fields._default(each)
    made.__dict__.update(values)
    return made


@dataclass
class World:
    """A configuration of vLLM, and what it is part of."""

    directory: Path
    planner: Planner = PLANNER
    seed: str = SEED
    config: Any = None
    reasons: list[str] = field(default_factory=list)

    def part(self, name: str) -> Any:
        return identity_fields._follow(self.config, CONFIG_FIELDS[name].path)

    def set(self, name: str, field_name: str, value: Any) -> None:
        self.part(name).__dict__[field_name] = value

    def text(self) -> str:
        """Everything that decides which objects are shared: the identity, and an adapter's keys."""
        mapping, self.reasons = describe(
            self.config, self.planner, topology().structural, self.seed
        )
        return canonical_json(mapping) + adapter_settings(self.config).decode()


def make_world(directory: Path) -> World:
    """A multimodal model in ``directory`` with a draft model and adapters."""
    for name in ("model", "draft"):
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(f'{{"name": "{name}"}}')
    (directory / "scales.json").write_text("{}")

    def model(name: str, **values: Any) -> Any:
        hf = HfConfig(hidden_size=64, rope_parameters={"rope_type": "default"})
        return instance(
            "ModelConfig",
            model=str(directory / name),
            hf_config=hf,
            hf_text_config=hf,
            max_model_len=2048,
            dtype="float32",
            _architecture="LlamaForCausalLM",
            **values,
        )

    parts = {
        "model_config": model(
            "model",
            multimodal_config=instance("MultiModalConfig"),
            pooler_config=instance("PoolerConfig"),
        ),
        "speculative_config": instance(
            "SpeculativeConfig", method="eagle", draft_model_config=model("draft")
        ),
    }
    for name, fields in CONFIG_FIELDS.items():
        if len(fields.path) == 1 and fields.path[0] not in parts:
            parts[fields.path[0]] = instance(name)
    return World(directory, config=instance("VllmConfig", **parts))
