"""Which bytes make up a block, for every layout that engines use and for odd ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.transfer import cpu
from kvtier.transfer.codec import CodecError, Registered, build_codec, layer_layout, natural_key
from kvtier.transfer.engine import Copy, Direction
from kvtier.transfer.factory import make_engine
from kvtier.transfer.startup_check import pageable_scratch, verify_round_trip
from kvtier.transfer.synthetic_layouts import (
    CacheGeometry,
    SyntheticCache,
    SyntheticGroup,
    SyntheticSpec,
    make_every_cache,
)

LAYOUTS = {layout.name: layout for layout in make_every_cache()}


def _one_layer(
    tensor: torch.Tensor, num_blocks: int, page_bytes: int, block: int = 16
) -> SyntheticCache:
    return SyntheticCache(
        "test",
        {"layer.0": tensor},
        num_blocks,
        (SyntheticGroup(("layer.0",), SyntheticSpec(block, page_bytes)),),
    )


@pytest.mark.parametrize("slices", [cpu.SLICE_BYTES, 0], ids=["few bytes", "many bytes"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_known_layout_round_trips(
    name: str, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "SLICE_BYTES", slices)
    layout = LAYOUTS[name]
    codec = build_codec(layout.caches, layout, 64)
    assert codec.groups[0].blocks_per_chunk == 4
    assert codec.shard_bytes == (4 * 3 * CacheGeometry().page_bytes,)
    before = {key: tensor.clone() for key, tensor in layout.caches.items()}
    verify_round_trip(layout.caches, codec, make_engine(layout.caches, codec))
    for key, tensor in layout.caches.items():
        assert torch.equal(before[key].view(torch.int16), tensor.view(torch.int16)), (
            "the proof must restore what it used"
        )


def test_layers_at_equal_distances_in_one_storage_are_one_segment() -> None:
    segments = {
        name: len(build_codec(x.caches, x, 64).groups[0].segments) for name, x in LAYOUTS.items()
    }
    assert segments["cpu: blocks, heads, tokens, keys and values; one storage"] == 1
    assert segments["layers interleaved inside each block"] == 1
    assert segments["blocks first, tokens before heads"] == 3


def test_a_contiguous_page_is_one_run_and_keys_and_values_apart_are_two() -> None:
    first = layer_layout(Registered("a", torch.zeros(10, 2, 16, 2, 8)), 10, 2 * 16 * 2 * 8 * 4)
    apart = layer_layout(Registered("a", torch.zeros(2, 10, 16, 2, 8)), 10, 2 * 16 * 2 * 8 * 4)
    assert (first.outer, first.run_bytes, first.block_stride) == ((), 2048, 2048)
    assert (apart.outer, apart.run_bytes, apart.block_stride) == (((2, 10 * 1024),), 1024, 1024)


def test_objects_are_block_major_with_layers_in_natural_order() -> None:
    caches = {f"layers.{i}": torch.full((8, 4), i, dtype=torch.uint8) for i in (10, 2, 1)}
    for tensor in caches.values():
        tensor += torch.arange(8, dtype=torch.uint8)[:, None] * 16
    layout = SyntheticCache(
        "test", caches, 8, (SyntheticGroup(tuple(caches), SyntheticSpec(1, 4)),)
    )
    codec = build_codec(caches, layout, 2)
    assert [layer.name for layer in codec.groups[0].layers] == ["layers.1", "layers.2", "layers.10"]
    from kvtier.transfer.engine import Copy, Direction
    from kvtier.transfer.startup_check import pageable_scratch

    engine = make_engine(caches, codec)
    pool = pageable_scratch(codec.shard_bytes[0])
    engine.attach(pool)
    engine.submit([Copy(0, 0, 0, (5, 3))], Direction.TO_HOST)
    expected = [b * 16 + layer for b in (5, 3) for layer in (1, 2, 10) for _ in range(4)]
    assert pool.memory.tolist() == expected


def test_names_sort_by_their_numbers() -> None:
    assert sorted(["layers.10.a", "layers.9.a", "embed"], key=natural_key) == [
        "embed",
        "layers.9.a",
        "layers.10.a",
    ]


def test_a_different_order_of_bytes_in_a_page_gives_a_different_text() -> None:
    texts = {name: build_codec(layout.caches, layout, 64).text for name, layout in LAYOUTS.items()}
    tokens_first = texts["blocks first, tokens before heads"]
    assert tokens_first != texts["blocks first, heads before tokens by strides"]
    assert tokens_first != texts["two kernel blocks a block"]


def test_the_addresses_of_pages_do_not_change_the_text() -> None:
    texts = {name: build_codec(layout.caches, layout, 64).text for name, layout in LAYOUTS.items()}
    together = texts["cpu: blocks, heads, tokens, keys and values; one storage"]
    assert together == texts["layers interleaved inside each block"]
    more = next(iter(make_every_cache(CacheGeometry(blocks=20))))
    assert build_codec(more.caches, more, 64).text == together


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float16},
        {"layers": 4},
        {"block": 32, "head_dim": 4},
        {"heads": 4, "head_dim": 4},
    ],
)
def test_every_change_of_a_bytes_meaning_changes_the_text(change: dict[str, object]) -> None:
    plain = next(iter(make_every_cache()))
    other = next(iter(make_every_cache(replace(CacheGeometry(), **change))))  # type: ignore[arg-type]
    assert build_codec(plain.caches, plain, 64).text != build_codec(other.caches, other, 64).text


def test_chunk_size_and_backend_are_in_the_text() -> None:
    layout = next(iter(LAYOUTS.values()))
    backends = dict.fromkeys(layout.caches, "amx")
    texts = {
        build_codec(layout.caches, layout, 64).text,
        build_codec(layout.caches, layout, 32).text,
        build_codec(layout.caches, layout, 64, backends).text,
    }
    assert len(texts) == 3
    described = json.loads(build_codec(layout.caches, layout, 64, backends).text)
    assert described["groups"][0]["layers"][0]["backend"] == "amx"
    assert described["groups"][0]["layer_count"] == 3


def test_a_layer_that_shares_the_kv_of_another_is_stored_once() -> None:
    layout = next(iter(make_every_cache()))
    caches = dict(layout.caches, shared=layout.caches["model.layers.0.attn"])
    spec = layout.kv_cache_groups[0].kv_cache_spec
    sharing = SyntheticCache(
        "test", caches, layout.num_blocks, (SyntheticGroup(tuple(caches), spec),)
    )
    assert (
        build_codec(caches, sharing, 64).shard_bytes
        == build_codec(layout.caches, layout, 64).shard_bytes
    )


def test_groups_that_alias_the_same_bytes_are_laid_out_separately() -> None:
    layout = next(iter(make_every_cache()))
    names = tuple(layout.caches)
    caches = {
        **layout.caches,
        **{f"other.{i}": layout.caches[name] for i, name in enumerate(names)},
    }
    spec = layout.kv_cache_groups[0].kv_cache_spec
    groups = (SyntheticGroup(names, spec), SyntheticGroup(("other.0", "other.1", "other.2"), spec))
    codec = build_codec(caches, SyntheticCache("test", caches, layout.num_blocks, groups), 64)
    assert codec.shard_bytes[0] == codec.shard_bytes[1]
    verify_round_trip(caches, codec, make_engine(caches, codec))


@pytest.mark.parametrize(
    ("tensor", "blocks", "page", "message"),
    [
        (torch.zeros(10, 16), 10, 128, "specification 128"),
        (torch.zeros(10, 16), 7, 64, "has 7 blocks"),
        (torch.zeros(16), 16, 4, "at least two dimensions"),
        (torch.zeros(16).as_strided((8, 8), (1, 1)), 8, 32, "overlap"),
        (torch.zeros(10, 16), 3, 64, "at least 4"),
        ([torch.zeros(10, 16)], 10, 64, "must be one tensor"),
        (None, 10, 64, "no tensor"),
    ],
)
def test_unsupported_tensors_are_rejected_with_a_reason(
    tensor: object, blocks: int, page: int, message: str
) -> None:
    layout = _one_layer(torch.zeros(1), blocks, page)
    with pytest.raises(CodecError, match=message):
        build_codec({"layer.0": tensor}, layout, 16)


class _State:
    """A specification as vLLM's ``MambaSpec``: a convolution and a recurrent state in padded
    pages."""

    block_size, page_size_bytes, page_size_padded = 16, 192, 192
    shapes, dtypes = ((3, 8), (4, 4)), (torch.float16, torch.float32)


def _states(blocks: int, layers: int) -> dict[str, object]:
    """As vLLM registers them: strided views of the pages of one allocation per layer."""
    caches: dict[str, object] = {}
    for layer in range(layers):
        raw = torch.randint(0, 256, (blocks * 192,), dtype=torch.uint8)
        conv = raw.view(torch.float16).as_strided((blocks, 3, 8), (96, 8, 1), 0)
        recurrent = raw.view(torch.float32).as_strided((blocks, 4, 4), (48, 4, 1), 12)
        caches[f"layers.{layer}.mixer"] = [conv, recurrent]
    return caches


def test_an_object_of_a_linear_state_is_one_page_without_its_padding() -> None:
    caches = _states(20, 2)
    group = SyntheticGroup(tuple(caches), _State())  # type: ignore[arg-type]
    cache = SyntheticCache("test", caches, 20, (group,))  # type: ignore[arg-type]
    codec = build_codec(caches, cache, 64, {"layers.1.mixer": "GDN"}, (1,))
    assert codec.shard_bytes == (2 * (48 + 64),)
    assert [layer.name for layer in codec.groups[0].layers][1:3] == [
        "layers.0.mixer[1]",
        "layers.1.mixer[0]",
    ]
    assert codec.text.count('"backend":"GDN"') == 2
    verify_round_trip(caches, codec, make_engine(caches, codec))


def test_a_state_that_is_registered_as_whole_pages_is_copied_as_it_is() -> None:
    caches: dict[str, object] = {
        f"layers.{layer}.mixer": torch.zeros((20, 1, 1, 192), dtype=torch.int8) for layer in (0, 1)
    }
    group = SyntheticGroup(tuple(caches), _State())  # type: ignore[arg-type]
    cache = SyntheticCache("test", caches, 20, (group,))  # type: ignore[arg-type]
    codec = build_codec(caches, cache, 64, object_blocks=(1,))
    assert codec.shard_bytes == (2 * 192,)
    verify_round_trip(caches, codec, make_engine(caches, codec))


@pytest.mark.parametrize("what", ["a tensor", "one tensor", "beyond the page"])
def test_states_that_contradict_their_specification_are_rejected(what: str) -> None:
    class Wrong(_State):
        page_size_bytes = 100 if what == "beyond the page" else 192

    caches = _states(20, 1)
    (name,) = caches
    tensors = caches[name]
    assert isinstance(tensors, list)
    if what != "beyond the page":
        caches[name] = tensors[0] if what == "a tensor" else tensors[:1]
    group = SyntheticGroup((name,), Wrong())  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="or one for each part"):
        build_codec(caches, SyntheticCache("test", caches, 20, (group,)), 16)  # type: ignore[arg-type]


def test_objects_may_be_the_last_blocks_of_their_chunk() -> None:
    layout = next(iter(LAYOUTS.values()))
    whole = build_codec(layout.caches, layout, 64)
    codec = build_codec(layout.caches, layout, 64, object_blocks=(3,))
    assert codec.groups[0].shard_bytes == whole.groups[0].block_bytes * 3
    assert codec.text != whole.text
    verify_round_trip(layout.caches, codec, make_engine(layout.caches, codec))


@pytest.mark.parametrize("blocks", [(0,), (5,), (1, 1)])
def test_objects_of_an_impossible_size_are_rejected(blocks: tuple[int, ...]) -> None:
    layout = next(iter(LAYOUTS.values()))
    with pytest.raises(CodecError, match="must be"):
        build_codec(layout.caches, layout, 64, object_blocks=blocks)


def test_a_chunk_that_is_no_multiple_of_a_block_is_rejected() -> None:
    layout = next(iter(LAYOUTS.values()))
    with pytest.raises(CodecError, match="must be a multiple"):
        build_codec(layout.caches, layout, 40)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tensor_whose_elements_do_not_overlap_round_trips(data: st.DataObject) -> None:
    """Blocks first or second, up to four page dimensions in any order of strides.

    With gaps, offsets, kernel blocks and all item sizes.
    """
    blocks = data.draw(st.integers(5, 9))
    kernel = data.draw(st.sampled_from([1, 1, 2, 3]))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    second = data.draw(st.booleans())
    shape = [2, blocks * kernel, *sizes] if second else [blocks * kernel, *sizes]
    block_dim = 1 if second else 0
    order = data.draw(st.permutations(range(len(shape))))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
    strides = [0] * len(shape)
    extent = 1
    for dim in order:
        strides[dim] = extent + data.draw(st.sampled_from([0, 0, 1, 5]))
        extent += strides[dim] * (shape[dim] - 1)
    offset = data.draw(st.integers(0, 3))
    storage = torch.randint(0, 256, ((extent + offset) * dtype.itemsize,), dtype=torch.uint8).view(
        dtype
    )
    tensor = storage.as_strided(shape, strides, offset)
    page = dtype.itemsize * kernel
    for dim, size in enumerate(shape):
        page *= size if dim != block_dim else 1
    layout = _one_layer(tensor, blocks, page, block=1)
    before = storage.clone()
    codec = build_codec(layout.caches, layout, 3)
    assert codec.groups[0].block_bytes == page
    verify_round_trip(layout.caches, codec, make_engine(layout.caches, codec))
    assert torch.equal(before.view(torch.uint8), storage.view(torch.uint8)), (
        "nothing beside the pages may change"
    )


def _two_groups(registered: bool) -> SyntheticCache:
    """Layers of group 0, and a group whose layers are on another pipeline stage."""
    layout = LAYOUTS[next(iter(LAYOUTS))]
    (group,) = layout.kv_cache_groups
    elsewhere = SyntheticGroup((), group.kv_cache_spec)
    groups = (elsewhere, group) if registered else (elsewhere, elsewhere)
    return replace(layout, kv_cache_groups=groups)


def test_a_group_without_layers_on_this_rank_has_no_bytes_and_is_not_copied() -> None:
    layout = _two_groups(registered=True)
    codec = build_codec(layout.caches, layout, 64)
    assert codec.shard_bytes == (0, 4 * 3 * CacheGeometry().page_bytes)
    engine = make_engine(layout.caches, codec)
    verify_round_trip(layout.caches, codec, engine)
    pool = pageable_scratch(codec.shard_bytes[1])
    engine.attach(pool)
    block = CacheGeometry().blocks - 1
    for direction in Direction:
        handle = engine.submit([Copy(0, 0, 0, (block,))], direction)
        assert engine.done(handle)
        assert (handle.total_bytes, engine.in_flight_bytes(direction)) == (0, 0)
    assert not pool.memory.any()
    both = engine.submit([Copy(0, 0, 0, (block,)), Copy(1, 0, 0, (block,))], Direction.TO_HOST)
    assert engine.done(both)
    assert both.total_bytes == 3 * CacheGeometry().page_bytes
    # Another layout of ranks is another namespace.
    assert json.loads(codec.text)["groups"][0]["layer_count"] == 0
    with pytest.raises(CodecError, match="no layer of any KV cache group"):
        build_codec(layout.caches, _two_groups(registered=False), 64)
