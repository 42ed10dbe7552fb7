"""The identity of an ATOM engine: everything that shapes the bytes of its KV.

Kernels and quantization are chosen by ATOM from the model and the machine, so the versions of ATOM
and of its kernel library are part of it, and so are the variables of both that are set. What cannot
be determined keeps the objects in the memory tier for the lifetime of the engine.
"""

from __future__ import annotations

import logging
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvtier.config.models import Structural
from kvtier.engines.atom.identity_environment import initial_environment, shaping_variables
from kvtier.engines.atom.identity_settings import shaping_settings
from kvtier.engines.atom.token_keys import SEED
from kvtier.engines.common.model_identity import (
    EngineIdentity,
    model_source,
    plain,
    plain_configuration,
    rope_depends_on_length,
)
from kvtier.namespace import canonical_json
from kvtier.planner import Planner

logger = logging.getLogger(__name__)
PACKAGES = ("atom", "aiter", "amd-aiter", "amd-atom", "torch")
"""Packages whose versions decide how KV is computed, under the names that they have had."""


class AtomIdentityBuilder:
    """Computes the identity on the first call, and caches it.

    May read the model's configuration files.
    """

    def __init__(self, config: Any, planner: Planner, structural: Structural) -> None:
        self._config = config
        self._planner = planner
        self._structural = structural
        self._identity: EngineIdentity | None = None

    def __call__(self) -> EngineIdentity:
        if self._identity is None:
            try:
                mapping, reasons = describe(self._config, self._planner, self._structural)
                self._identity = EngineIdentity(canonical_json(mapping), "; ".join(reasons))
            except Exception as error:
                logger.exception("KVTier: cannot determine the identity")
                self._identity = EngineIdentity(
                    "{}", f"cannot determine the identity: {type(error).__name__}: {error}"
                )
            if self._identity.ephemeral_reason:
                logger.warning(
                    "KVTier: objects stay in the memory tier for the lifetime of this engine: %s",
                    self._identity.ephemeral_reason,
                )
        return self._identity


def describe(
    config: Any, planner: Planner, structural: Structural
) -> tuple[dict[str, object], list[str]]:
    """Returns the identity, and the reasons why it is valid for this engine only."""
    reasons: list[str] = []
    hf: Any = getattr(config, "hf_config", None)
    to_dict = getattr(hf, "to_dict", None)
    shape = to_dict() if callable(to_dict) else {}
    if not shape:
        reasons.append("the configuration of the model cannot be read")
    model = SimpleNamespace(
        model=config.model,
        hf_config=hf,
        trust_remote_code=getattr(config, "trust_remote_code", False),
    )
    revision = structural.isolation.model_revision
    if not revision:
        # ATOM shows its weights to no connector, and a path or a name does not identify them.
        reasons.append("the weights of ATOM are not fingerprinted; set isolation.modelRevision")
    versions = _versions()
    if not any(name.endswith("atom") for name in versions):
        reasons.append("the version of ATOM is unknown")
    text = hf.get_text_config() if hasattr(hf, "get_text_config") else hf
    identity: dict[str, object] = {
        "engine": {"name": "atom", "versions": versions},
        "model": {
            **model_source(model, revision, reasons),
            "name": Path(str(config.model)).name,
        },
        "configuration": plain_configuration(shape, "configuration", reasons),
        "max_model_len": config.max_model_len if rope_depends_on_length(text) else None,
        "dtype": str(getattr(config, "torch_dtype", "")),
        "kv_cache_dtype": str(config.kv_cache_dtype),
        "index_cache_dtype": str(getattr(config, "index_cache_dtype", None)),
        "quantization": plain(
            _plain_object(getattr(config, "quant_config", None)), "quantization", reasons
        ),
        "online_quantization": plain(
            getattr(config, "online_quant_config", None), "online_quantization", reasons
        ),
        "overrides": plain(getattr(config, "hf_overrides", None), "overrides", reasons),
        "groups": [str(group) for group in planner.groups],
        "effective_chunk_tokens": planner.chunk_tokens,
        "parallel": {
            "tensor": int(config.tensor_parallel_size),
            "expert": bool(getattr(config, "enable_expert_parallel", False)),
        },
        "settings": shaping_settings(config, reasons),
        "environment": shaping_variables(initial_environment()),
        "key_chain": {"algorithm": "blake3 over token ids", "seed": SEED.hex()},
        "salt": structural.isolation.salt,
    }
    speculative = getattr(config, "speculative_config", None)
    if speculative is not None:
        identity["draft"] = [
            str(getattr(speculative, "method", "")),
            Path(str(getattr(speculative, "model", "") or "")).name,
        ]
    return identity, reasons


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _plain_object(value: object) -> object:
    """A quantization is described by its values, in whichever class ATOM keeps them."""
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        return to_dict()
    return str(type(value).__name__) if hasattr(value, "__dict__") else value
