"""Every field of vLLM's configuration is part of the identity, or does not shape KV.

The fields of all supported releases are in ``tools/vllm_contract.json``, and those of the vLLM that
is installed are read from its classes.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.config
from tests.support.vllm_settings import PLANNER, SEED, HfConfig, World, instance, make_world
from tests.unit.scheduler.scheduler_testbed import topology
from tools.vllm_contract import CONFIGS, at, config_fields, load

from kvtier.engines.vllm import identity_fields, weights
from kvtier.engines.vllm.config import check_one_node, check_prefix_caching, planner_for
from kvtier.engines.vllm.identity import describe
from kvtier.engines.vllm.identity_fields import CONFIG_FIELDS, ConfigFields, adapter_settings
from kvtier.namespace import canonical_json
from kvtier.planner import GroupKind, KVCacheGroup, Planner, UnsupportedGeometryError

TABLE = load()
PROVEN_BY_OTHERS = {
    identity_fields._WEIGHTS: "tests/unit/worker/test_weights.py",
    identity_fields._LAYOUT: "tests/unit/transfer",
    identity_fields._GROUPS: "test_groups_and_ranks_are_part_of_the_identity",
    "its own table": "this file",
    "its own table; the settings are part of the keys of adapters": "this file",
    "those of the engine": "this file",
    "parallel; each rank has its layout and fingerprint": "tests/unit/keys",
    "KVTier is off where vLLM disables prefix caching": "tests/unit/scheduler/test_groups.py",
}
"""Fields that the scheduler's part of the identity cannot show, by their text."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    return make_world(tmp_path)


def _other(value: Any) -> Any:
    """Another value than this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 3
    if isinstance(value, dict):
        return {**value, "changed": 1}
    if isinstance(value, list | tuple | set):
        return [*value, "changed"]
    return "changed"


def _names(texts: Any) -> list[str]:
    return [name for names in texts for name in names.split()]


def _cases(kind: Callable[[ConfigFields], Any]) -> list[tuple[str, str]]:
    return [(name, each) for name, fields in CONFIG_FIELDS.items() for each in kind(fields)]


def test_every_field_of_the_installed_vllm_is_listed() -> None:
    assert _unlisted_fields({name: getattr(vllm.config, name) for name in CONFIG_FIELDS}) == []


def _unlisted_fields(classes: dict[str, type]) -> list[str]:
    return [
        f"{name}.{each.name}"
        for name, kind in classes.items()
        for each in dataclasses.fields(kind)  # type: ignore[arg-type]
        if not each.name.startswith("_") and each.name not in CONFIG_FIELDS[name].listed()
    ]


def test_a_planted_field_is_found() -> None:
    more = dataclasses.make_dataclass(
        "More", [("rotate_keys", bool, False)], bases=(vllm.config.CacheConfig,)
    )
    assert _unlisted_fields({"CacheConfig": more}) == ["CacheConfig.rotate_keys"]


@pytest.mark.parametrize("release", TABLE["releases"])
def test_every_field_of_each_release_is_listed(release: str) -> None:
    fields = config_fields(at(TABLE, release))
    assert sum(map(len, fields.values())) > 250
    unlisted = [
        f"{name}.{each}"
        for name, found in fields.items()
        for each in sorted(found)
        if not each.startswith("_") and each not in CONFIG_FIELDS[name].listed()
    ]
    assert unlisted == []


def test_every_listed_field_exists_in_some_release() -> None:
    existing: dict[str, set[str]] = {name: set() for name in CONFIGS}
    for release in TABLE["releases"]:
        for name, found in config_fields(at(TABLE, release)).items():
            existing[name] |= found
    assert set(CONFIG_FIELDS) == set(CONFIGS)
    for name, fields in CONFIG_FIELDS.items():
        assert fields.listed() - existing[name] == set(), name


def test_no_field_is_listed_twice() -> None:
    for name, fields in CONFIG_FIELDS.items():
        counts = Counter(fields.values.split())
        for texts in (fields.elsewhere, fields.refused, fields.unused):
            counts.update(_names(texts))
        assert [each for each, count in counts.items() if count > 1] == [], name


def test_every_class_of_vllms_configuration_is_walked_or_left_out_for_a_reason() -> None:
    """A part that a release adds is a field of ``VllmConfig``, which is walked."""
    walked = {fields.path[0] for fields in CONFIG_FIELDS.values() if fields.path}
    own = {
        name
        for names, text in CONFIG_FIELDS["VllmConfig"].elsewhere.items()
        for name in names.split()
        if text.startswith("its own table")
    }
    assert walked == own


@pytest.mark.parametrize(("name", "each"), _cases(lambda fields: fields.values.split()))
def test_a_value_that_shapes_kv_changes_the_namespace(world: World, name: str, each: str) -> None:
    before = world.text()
    world.set(name, each, _other(getattr(world.part(name), each, None)))
    assert world.text() != before
    assert world.reasons == []


@pytest.mark.parametrize(("name", "each"), _cases(lambda fields: _names(fields.unused)))
def test_a_value_that_does_not_shape_kv_does_not_change_the_namespace(
    world: World, name: str, each: str
) -> None:
    before = world.text()
    world.set(name, each, _other(getattr(world.part(name), each, None)))
    assert world.text() == before
    assert world.reasons == []


def _file(path: str) -> Callable[[World], None]:
    def change(world: World) -> None:
        (world.directory / path).write_text('{"changed": 1}')

    return change


def _value(name: str, each: str, value: Any = "changed") -> Callable[[World], None]:
    return lambda world: world.set(name, each, value)


def _hf(part: str = "hf_config") -> Callable[[World], None]:
    return lambda world: world.set("ModelConfig", part, HfConfig(hidden_size=128))


def _hub(world: World, commit: str, **values: Any) -> None:
    """A model of the hub, whose code and preprocessor have a commit."""
    hf = HfConfig(hidden_size=64, _commit_hash=commit)
    world.config.model_config.__dict__.update(
        {"model": "org/name", "hf_config": hf, "hf_text_config": hf, **values}
    )


def _draft(**values: Any) -> Callable[[World], None]:
    return lambda world: world.config.speculative_config.draft_model_config.__dict__.update(values)


def _long_draft(length: int) -> Callable[[World], None]:
    hf = HfConfig(rope_parameters={"rope_type": "longrope"})
    return _draft(hf_config=hf, hf_text_config=hf, max_model_len=length)


def _scales(world: World) -> None:
    world.set("MultiModalConfig", "mm_encoder_attn_dtype", "fp8")
    world.set("MultiModalConfig", "mm_encoder_fp8_scale_path", str(world.directory / "scales.json"))


def _other_scales(world: World) -> None:
    _scales(world)
    _file("scales.json")(world)


def _planner(block: int, hash_tokens: int) -> Callable[[World], None]:
    group = KVCacheGroup(GroupKind.FULL, block, "FullAttentionSpec")

    def change(world: World) -> None:
        world.planner = Planner.build([group], 64, hash_tokens)

    return change


def _longrope(length: int) -> Callable[[World], None]:
    hf = HfConfig(rope_parameters={"rope_type": "longrope"})

    def change(world: World) -> None:
        world.config.model_config.__dict__.update(
            hf_config=hf, hf_text_config=hf, max_model_len=length
        )

    return change


def _nothing(_: World) -> None:
    return


def _code(world: World) -> None:
    (world.directory / "model" / "modeling_own.py").write_text("pass")


ELSEWHERE: dict[str, tuple[Callable[[World], None], Callable[[World], None]]] = {
    "ModelConfig.model": (_nothing, _file("model/config.json")),
    "ModelConfig.revision": (lambda world: _hub(world, "a"), lambda world: _hub(world, "b")),
    "ModelConfig.hf_config_path": (_nothing, _hf()),
    "ModelConfig.config_format": (_nothing, _hf()),
    "ModelConfig.trust_remote_code": (_nothing, _code),
    "ModelConfig.hf_config": (_nothing, _hf()),
    "ModelConfig.hf_text_config": (_nothing, _hf("hf_text_config")),
    "ModelConfig.hf_overrides": (_nothing, _hf()),
    "ModelConfig.model_impl": (
        _nothing,
        _value("ModelConfig", "_architecture", "TransformersForCausalLM"),
    ),
    "ModelConfig.dtype": (_nothing, _value("ModelConfig", "dtype")),
    "ModelConfig.quantization": (_nothing, _value("ModelConfig", "quantization")),
    "ModelConfig.disable_sliding_window": (
        _nothing,
        _value("ModelConfig", "disable_sliding_window", True),
    ),
    "ModelConfig.max_model_len": (_longrope(2048), _longrope(4096)),
    "CacheConfig.prefix_match_unit": (_planner(64, 64), _planner(64, 32)),
    "CacheConfig.hash_block_size": (_planner(64, 64), _planner(64, 32)),
    "CacheConfig.prefix_caching_hash_algo": (
        _nothing,
        _value("CacheConfig", "prefix_caching_hash_algo"),
    ),
    "CacheConfig.cache_dtype": (_nothing, _value("CacheConfig", "cache_dtype", "fp8")),
    "CacheConfig.kv_cache_dtype_skip_layers": (
        _nothing,
        _value("CacheConfig", "kv_cache_dtype_skip_layers", ["sliding_window"]),
    ),
    "ParallelConfig.tensor_parallel_size": (
        _nothing,
        _value("ParallelConfig", "tensor_parallel_size", 2),
    ),
    "ParallelConfig.pipeline_parallel_size": (
        _nothing,
        _value("ParallelConfig", "pipeline_parallel_size", 2),
    ),
    "SpeculativeConfig.model": (_nothing, _file("draft/config.json")),
    "SpeculativeConfig.revision": (_nothing, _file("draft/config.json")),
    "SpeculativeConfig.draft_model_config": (_nothing, _draft(dtype="bfloat16")),
    "SpeculativeConfig.quantization": (_nothing, _draft(quantization="fp8")),
    "SpeculativeConfig.max_model_len": (
        _long_draft(256),
        _long_draft(512),
    ),
    "MultiModalConfig.mm_processor_kwargs": (
        _nothing,
        _value("MultiModalConfig", "mm_processor_kwargs", {"min_pixels": 784}),
    ),
    "MultiModalConfig.video_pruning_rate": (
        _nothing,
        _value("MultiModalConfig", "video_pruning_rate", 0.5),
    ),
    "MultiModalConfig.mm_encoder_attn_dtype": (_nothing, _scales),
    "MultiModalConfig.mm_encoder_fp8_scale_path": (_scales, _other_scales),
    "VllmConfig.quant_config": (_nothing, _value("ModelConfig", "quantization_config")),
}
"""For each field of ``elsewhere``: two worlds that differ in what the field decides."""


def test_each_field_in_another_form_is_proven_here_or_elsewhere() -> None:
    expected = {
        f"{name}.{each}"
        for name, fields in CONFIG_FIELDS.items()
        for names, text in fields.elsewhere.items()
        if text not in PROVEN_BY_OTHERS
        for each in names.split()
    }
    assert expected == set(ELSEWHERE)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_a_field_decides_changes_the_namespace(world: World, name: str) -> None:
    one, other = copy.deepcopy(world), world
    for each, change in zip((one, other), ELSEWHERE[name], strict=True):
        change(each)
        # The directory is one for both, so the first text is taken before the second change.
        if each is one:
            text = one.text()
    assert other.text() != text
    assert one.reasons == other.reasons == []


def test_groups_and_ranks_are_part_of_the_identity(world: World) -> None:
    texts = {world.text()}
    for kind, block, window in (
        (GroupKind.FULL, 64, 0),
        (GroupKind.SLIDING, 32, 64),
        (GroupKind.SLIDING, 32, 128),
        (GroupKind.STATE, 64, 0),
    ):
        world.planner = Planner.build([KVCacheGroup(kind, block, "Spec", window)], 64, block)
        texts.add(world.text())
    assert len(texts) == 5


def _parallel(**values: Any) -> Any:
    return instance("ParallelConfig", **{"world_size": 2, **values})


def _refused(world: World, **values: Any) -> None:
    world.config.__dict__["parallel_config"] = _parallel(**values)
    planner_for(world.config, SimpleNamespace(kv_cache_groups=[]), 64)


REFUSED: dict[str, Callable[[World], Any]] = {
    "CacheConfig.enable_prefix_caching": lambda world: check_prefix_caching(
        instance("CacheConfig", enable_prefix_caching=False)
    ),
    "ParallelConfig.nnodes": lambda world: check_one_node(_parallel(nnodes=2)),
    "ParallelConfig.prefill_context_parallel_size": lambda world: _refused(
        world, prefill_context_parallel_size=2
    ),
    "ParallelConfig.decode_context_parallel_size": lambda world: _refused(
        world, decode_context_parallel_size=2
    ),
}
IN_RAM: dict[str, Any] = {
    "CacheConfig.calculate_kv_scales": True,
    "ParallelConfig.enable_eplb": True,
    "OffloadConfig.prefetch": SimpleNamespace(offload_group_size=8),
}


def test_every_refused_field_is_tested() -> None:
    names = {f"{name}.{each}" for name, each in _cases(lambda fields: _names(fields.refused))}
    assert names == {*REFUSED, *IN_RAM}


@pytest.mark.parametrize("name", REFUSED)
def test_kvtier_is_off_with_a_value_that_is_refused(world: World, name: str) -> None:
    with pytest.raises(UnsupportedGeometryError, match=name.partition(".")[2]):
        REFUSED[name](world)


@pytest.mark.parametrize("name", IN_RAM)
def test_objects_stay_in_ram_with_a_value_that_lets_weights_move(world: World, name: str) -> None:
    assert weights._moving_weights(world.config) == ""
    world.set(*name.split("."), IN_RAM[name])
    assert weights._moving_weights(world.config) != ""


def test_a_setting_of_a_newer_vllm_is_part_of_the_identity_once_it_is_used(
    world: World,
) -> None:
    more = dataclasses.make_dataclass(
        "More",
        [("rotate_keys", bool, False), ("shifts", list, dataclasses.field(default_factory=list))],
        bases=(vllm.config.CacheConfig,),
    )
    before = world.text()
    cache = object.__new__(more)
    cache.__dict__.update(world.config.cache_config.__dict__, rotate_keys=False, shifts=[])
    world.config.__dict__["cache_config"] = cache
    assert world.text() == before
    cache.__dict__["rotate_keys"] = True
    rotated = world.text()
    cache.__dict__.update(rotate_keys=False, shifts=[1])
    assert len({before, rotated, world.text()}) == 3
    assert world.reasons == []


def test_a_new_part_of_the_configuration_is_part_of_the_identity_once_it_is_used(
    world: World,
) -> None:
    more = dataclasses.make_dataclass(
        "More", [("twist_config", Any, None)], bases=(vllm.config.VllmConfig,)
    )
    config = object.__new__(more)
    config.__dict__.update(world.config.__dict__, twist_config=None)
    before = world.text()
    world.config = config
    assert world.text() == before
    twist = dataclasses.make_dataclass("Twist", [("angle", int, 1)])
    texts = {before}
    for angle in (1, 2):
        config.__dict__["twist_config"] = twist(angle)
        texts.add(world.text())
    assert len(texts) == 3


@pytest.mark.parametrize("method", sorted(identity_fields.METHODS_WITHOUT_KV))
def test_drafts_from_tokens_share_with_engines_without_drafts(world: World, method: str) -> None:
    world.set("SpeculativeConfig", "method", method)
    text = world.text()
    world.config.__dict__["speculative_config"] = None
    assert world.text() == text


def test_adapters_do_not_change_the_identity_of_requests_without_one(world: World) -> None:
    mapping, _ = describe(world.config, PLANNER, topology().structural, SEED)
    assert adapter_settings(world.config) != b""
    world.config.__dict__["lora_config"] = None
    assert describe(world.config, PLANNER, topology().structural, SEED)[0] == mapping
    assert adapter_settings(world.config) == b""


def test_scales_that_follow_the_inputs_keep_objects_in_ram(world: World) -> None:
    world.set("MultiModalConfig", "mm_encoder_attn_dtype", "fp8")
    world.text()
    assert "mm_encoder_fp8_scale_path" in world.reasons[0]
    world.set("MultiModalConfig", "mm_encoder_fp8_scale_path", "/missing/scales.json")
    world.text()
    assert "cannot be read" in world.reasons[0]


@pytest.mark.parametrize(
    ("values", "reasons"),
    [
        ({"auto_map": {"AutoModel": "other/code--modeling.Own"}}, 1),
        ({"auto_map": {"AutoModel": "org/name--modeling.Own"}}, 0),
        ({"auto_map": {"AutoModel": "modeling.Own"}}, 0),
        ({}, 0),
    ],
)
def test_code_of_another_repository_needs_a_revision(
    world: World, values: dict[str, Any], reasons: int
) -> None:
    world.config.speculative_config = None
    _hub(world, "a", trust_remote_code=True)
    world.config.model_config.hf_config.__dict__.update(values)
    world.text()
    assert len(world.reasons) == reasons
    assert all("other/code" in each for each in world.reasons)
    world.set("ModelConfig", "code_revision", "v1")
    world.text()
    assert world.reasons == []


def test_the_identity_is_readable(world: World) -> None:
    """People compare two of them to see why engines do not share."""
    mapping, _ = describe(world.config, PLANNER, topology().structural, SEED)
    settings = json.loads(canonical_json(mapping))["settings"]
    assert settings["AttentionConfig"]["indexer_kv_dtype"] == "auto"
    assert "LoRAConfig" not in settings
