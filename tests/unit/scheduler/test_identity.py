"""What makes two engines share, and what keeps them apart."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.scheduler.scheduler_testbed import topology
from vllm.platforms import current_platform

from kvtier.engines.common.model_identity import (
    model_digest,
    model_source,
    plain,
    rope_depends_on_length,
)
from kvtier.engines.vllm.identity import IdentityBuilder, describe, unstable_seed
from kvtier.namespace import canonical_json
from kvtier.planner import GroupKind, KVCacheGroup, Planner

SEED = "ab" * 32


class _Hf:
    """A HF configuration."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def _model(directory: Path, weights: bytes = b"w" * 5000) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"hidden_size": 64}')
    (directory / "tokenizer.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    return directory


def _config(directory: Path | str, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "hf": _Hf(hidden_size=64, rope_parameters={"rope_type": "default"}),
        "max_model_len": 2048,
        "dtype": "torch.float32",
        "cache_dtype": "auto",
        "quantization": None,
        "tensor": 1,
        "algorithm": "sha256",
        "model": str(directory),
        "load_format": "auto",
        "data_parallel_rank": 0,
        **changes,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=values["model"],
            hf_config=values["hf"],
            hf_text_config=values["hf"],
            max_model_len=values["max_model_len"],
            dtype=values["dtype"],
            quantization=values["quantization"],
            seed=0,
        ),
        load_config=SimpleNamespace(load_format=values["load_format"]),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=values["algorithm"], cache_dtype=values["cache_dtype"]
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=values["tensor"],
            pipeline_parallel_size=1,
            data_parallel_rank=values["data_parallel_rank"],
        ),
        speculative_config=None,
    )


def _planner(chunk: int = 64, block: int = 32) -> Planner:
    return Planner.build([KVCacheGroup(GroupKind.FULL, block, "FullAttentionSpec")], chunk, block)


@pytest.fixture(autouse=True)
def hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def _text(
    config: Any, planner: Planner | None = None, seed: str | None = SEED, structural: Any = None
) -> str:
    identity, reasons = describe(
        config, planner or _planner(), structural or topology().structural, seed
    )
    assert reasons == []
    return canonical_json(identity)


def test_the_identity_does_not_depend_on_the_model_directory(tmp_path: Path) -> None:
    assert _text(_config(_model(tmp_path / "a"))) == _text(_config(_model(tmp_path / "b")))


@pytest.mark.parametrize(
    "changes",
    [
        {"hf": _Hf(hidden_size=128, rope_parameters={"rope_type": "default"})},
        {"dtype": "torch.bfloat16"},
        {"cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"tensor": 2},
        {"algorithm": "sha256_cbor"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_everything_that_shapes_the_kv_changes_the_identity(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = _model(tmp_path / "m")
    assert _text(_config(model, **changes)) != _text(_config(model))


def test_chunk_block_seed_and_salt_change_the_identity(tmp_path: Path) -> None:
    config = _config(_model(tmp_path / "m"))
    structural = topology().structural
    salted = structural.model_copy(
        update={"isolation": structural.isolation.model_copy(update={"salt": "s"})}
    )
    texts = {
        _text(config),
        _text(config, _planner(128)),
        _text(config, _planner(64, 64)),
        _text(config, seed="cd" * 32),
        _text(config, structural=salted),
    }
    assert len(texts) == 5


def test_data_parallel_ranks_share(tmp_path: Path) -> None:
    model = _model(tmp_path / "m")
    assert _text(_config(model, data_parallel_rank=3)) == _text(_config(model))


def test_max_model_len_matters_only_where_rope_depends_on_it(tmp_path: Path) -> None:
    model = _model(tmp_path / "m")
    assert _text(_config(model, max_model_len=4096)) == _text(_config(model))
    hf = _Hf(hidden_size=64, rope_parameters={"rope_type": "longrope"})
    assert _text(_config(model, hf=hf, max_model_len=4096)) != _text(_config(model, hf=hf))


@pytest.mark.parametrize(
    ("config", "depends"),
    [
        (_Hf(), False),
        (_Hf(rope_scaling=None), False),
        (_Hf(rope_scaling={"type": "linear", "factor": 2}), False),
        (_Hf(rope_scaling={"rope_type": "dynamic"}), True),
        (
            _Hf(
                rope_parameters={
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {"rope_type": "unheard"},
                }
            ),
            True,
        ),
    ],
)
def test_unknown_rope_types_count_as_depending_on_length(config: _Hf, depends: bool) -> None:
    assert rope_depends_on_length(config) is depends


def _preprocessed(directory: Path, image_mean: float) -> Path:
    model = _model(directory)
    (model / "preprocessor_config.json").write_text(json.dumps({"image_mean": [image_mean]}))
    return model


def _multimodal(directory: Path, **settings: Any) -> Any:
    config = _config(directory)
    config.model_config.multimodal_config = SimpleNamespace(
        **{"mm_processor_kwargs": None, "video_pruning_rate": None, **settings}
    )
    return config


def test_the_preprocessor_is_part_of_a_multimodal_identity(tmp_path: Path) -> None:
    directory = _preprocessed(tmp_path / "a", 0.5)
    texts = {
        _text(_multimodal(directory)),
        _text(_multimodal(_preprocessed(tmp_path / "b", 0.25))),
        _text(_multimodal(directory, mm_processor_kwargs={"min_pixels": 784})),
        _text(_multimodal(directory, video_pruning_rate=0.5)),
    }
    assert len(texts) == 4
    same = _preprocessed(tmp_path / "c", 0.5)
    assert _text(_multimodal(same)) == _text(_multimodal(directory))


def test_what_does_not_shape_the_kv_does_not_change_the_identity(tmp_path: Path) -> None:
    """Weights have a fingerprint of their own, which the workers add."""
    config = _config(_model(tmp_path / "m"))
    before = _text(config)
    (tmp_path / "m" / "tokenizer.json").write_text('{"other": 1}')
    (tmp_path / "m" / "generation_config.json").write_text("{}")
    (tmp_path / "m" / "preprocessor_config.json").write_text('{"image_mean": [1]}')
    (tmp_path / "m" / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "model-00001.safetensors")
    assert _text(config) == before
    assert _text(_config(tmp_path / "m", load_format="dummy")) == before
    assert _text(_config(tmp_path / "m", data_parallel_rank=1)) == before


def test_configuration_and_code_are_part_of_the_digest(tmp_path: Path) -> None:
    digests = {model_digest(_model(tmp_path / "m"), multimodal=False)}
    (tmp_path / "m" / "modeling_x.py").write_text("pass")
    digests.add(model_digest(tmp_path / "m", multimodal=False))
    (tmp_path / "m" / "config.json").write_text("{}")
    digests.add(model_digest(tmp_path / "m", multimodal=False))
    assert len(digests) == 3


def test_a_text_model_of_the_hub_needs_no_revision() -> None:
    reasons: list[str] = []
    model = SimpleNamespace(model="org/name", hf_config=_Hf())
    assert model_source(model, "", reasons) == {}
    assert model_source(model, "v3", reasons) == {"revision": "v3"}
    assert reasons == []


@pytest.mark.parametrize(
    "kind", [{"trust_remote_code": True}, {"is_multimodal_model": True}], ids=str
)
def test_code_and_preprocessors_of_unknown_revision_make_the_identity_ephemeral(
    kind: dict[str, Any],
) -> None:
    reasons: list[str] = []
    model = SimpleNamespace(model="org/name", hf_config=_Hf(), **kind)
    model_source(model, "", reasons)
    assert "set isolation.modelRevision" in reasons.pop()
    assert model_source(model, "v3", reasons)["revision"] == "v3"
    model.hf_config._commit_hash = "abc"
    assert model_source(model, "", reasons)["commit"] == "abc"
    assert reasons == []


def test_a_draft_model_is_part_of_the_identity(tmp_path: Path) -> None:
    texts = set()
    for method, layers in (("eagle", 1), ("eagle", 2), ("draft_model", 1)):
        config = _config(_model(tmp_path / "m"))
        config.speculative_config = SimpleNamespace(
            method=method,
            draft_model_config=SimpleNamespace(model="org/draft", hf_config=_Hf(layers=layers)),
        )
        texts.add(_text(config))
    assert len({_text(_config(tmp_path / "m")), *texts}) == 4


def test_block_hashes_with_a_random_seed_make_the_identity_ephemeral(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert unstable_seed("xxhash", SEED) == ""
    assert unstable_seed("sha256", None)
    monkeypatch.delenv("PYTHONHASHSEED")
    assert "PYTHONHASHSEED" in unstable_seed("xxhash_cbor", SEED)
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(
        kv_cache_utils, "DEFAULT_NONE_HASH_SEED", "fixed", raising=False
    )  # as 0.32 has it
    assert unstable_seed("sha256", SEED) == ""
    monkeypatch.delattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")  # as 0.24
    assert "PYTHONHASHSEED" in unstable_seed("sha256", SEED)


def test_values_without_a_stable_representation_are_reported() -> None:
    reasons: list[str] = []
    assert plain({"a": (1, 2.5, None, {"x"}), "f": float("inf")}, "c", reasons) == {
        "a": [1, 2.5, None, ["x"]],
        "f": "inf",
    }
    assert reasons == []
    assert plain({"dtype": "int8"}, "c", reasons) == {"dtype": "int8"}
    assert plain(object(), "c.y", reasons) == "object"
    assert "c.y" in reasons[0]


@pytest.mark.parametrize("part", ["quantization_config", "compression_config"])
def test_the_type_of_quantized_activations_is_part_of_the_identity(part: str) -> None:
    """Quark describes it under a name that a configuration also has for the type of its file."""
    texts = {
        _text(
            _config(
                "org/name",
                hf=_Hf(
                    dtype=written,
                    text_config={"dtype": written, "hidden_size": 64},
                    **{part: {"global_quant_config": {"input_tensors": {"dtype": activations}}}},
                ),
            )
        )
        for written in ("float32", "bfloat16")
        for activations in ("fp8_e4m3", "int8")
    }
    assert len(texts) == 2


def test_the_format_of_8_bits_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's MI300 reads a KV cache of type fp8 as another format than later devices."""
    texts = {_text(_config("org/name", cache_dtype="fp8")), _text(_config("org/name"))}
    monkeypatch.setattr(current_platform, "fp8_dtype", lambda: "torch.float8_e4m3fnuz")
    texts |= {_text(_config("org/name", cache_dtype="fp8")), _text(_config("org/name"))}
    assert len(texts) == 3


def test_the_identity_is_computed_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def seed() -> str:
        calls.append(1)
        return SEED

    builder = IdentityBuilder(
        _config(_model(tmp_path / "m")), _planner(), topology().structural, seed
    )
    assert builder() is builder()
    assert calls == [1]
    assert builder().ephemeral_reason == ""
    assert json.loads(builder().text)["effective_chunk_tokens"] == 64


def test_an_identity_that_cannot_be_determined_is_ephemeral(
    tmp_path: Path,
) -> None:
    config = _config(_model(tmp_path / "m"))
    config.cache_config = None
    identity = IdentityBuilder(config, _planner(), topology().structural, lambda: SEED)()
    assert "cannot determine the identity" in identity.ephemeral_reason
