"""The fingerprint of weights: every bit counts, names of wrappers and order do not."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.engines.vllm import tensor_digests, weights, word_sums
from kvtier.engines.vllm.word_sums import CHUNK_BYTES
from kvtier.namespace import derive_namespace

KERNEL_PROGRAM = """
import torch
from kvtier.engines.vllm.word_sums import CHUNK_BYTES, WordSums
from kvtier.engines.vllm.word_sums_kernel import sum_chunks

sums = WordSums(torch.device("cpu"))
parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (1, 4096, CHUNK_BYTES + 8)]
expected = sums(sums.table(parts))
sums._kernel = sum_chunks
table = sums.table(parts)
print("equal" if torch.equal(sums(table), expected) else "different")
parts[0][0] ^= 1
print("noticed" if (sums(table) != expected).sum() == 2 else "missed")
"""


class _Packing:
    """A quant method that consumes its layer's weight, as the CPU engine's does."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.packed = [layer.weight.detach().clone()]
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class _Linear(torch.nn.Module):
    def __init__(self, values: torch.Tensor, packing: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(values.clone(), requires_grad=False)
        if packing:
            self.quant_method = _Packing()


class _Model(torch.nn.Module):
    def __init__(self, seed: int = 0, packing: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = _Linear(torch.randn(8, 6, generator=generator), packing)
        self.second = _Linear(torch.randn(8, 6, generator=generator).bfloat16())
        self.register_buffer("scale", torch.tensor(1.5))


class _LoraLayer(torch.nn.Module):
    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a_stacked = (torch.zeros(4),)


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No models are known, and the class of the quant method is not wrapped yet."""
    monkeypatch.setattr(weights, "_models", weights._LoadedModels())
    monkeypatch.setattr(weights._models, "installed", True)
    original = _Packing.process_weights_after_loading
    yield
    _Packing.process_weights_after_loading = original  # type: ignore[method-assign]


def _take(model: torch.nn.Module, draft: Any = None, **config: Any) -> weights.WeightsFingerprint:
    settings: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_eplb=config.get("eplb", False)),
        offload_config=SimpleNamespace(
            prefetch=SimpleNamespace(offload_group_size=config.get("prefetch", 0))
        ),
        cache_config=SimpleNamespace(calculate_kv_scales=config.get("scales", False)),
    )
    worker = SimpleWorker(settings, model, draft)
    weights._note_worker(worker)
    return weights.take(settings)


class SimpleWorker:
    """The part of vLLM's worker that is used."""

    def __init__(self, config: Any, model: torch.nn.Module, draft: Any) -> None:
        self.vllm_config, self._model, self._draft = config, model, draft

    def get_model(self) -> torch.nn.Module:
        return self._model

    def get_draft_model(self) -> Any:
        return self._draft


def test_equal_weights_have_equal_fingerprints() -> None:
    first = _take(_Model())
    assert len(first.text) == weights.DIGEST_DIGITS
    assert first.reason == ""
    assert first.hashed_bytes == 8 * 6 * 4 + 8 * 6 * 2 + 4
    assert _take(_Model()).text == first.text
    assert _take(_Model(seed=1)).text != first.text


@pytest.mark.parametrize("name", ["first.weight", "second.weight", "scale"])
def test_one_bit_of_any_parameter_or_buffer_changes_the_fingerprint(name: str) -> None:
    model = _Model()
    before = _take(model).text
    tensor = model.state_dict()[name]
    tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).bitwise_xor_(1)
    changed = _take(model).text
    assert changed not in ("", before)
    tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).bitwise_xor_(1)
    assert _take(model).text == before


@pytest.mark.parametrize("hash_on_host", [True, False], ids=["host", "device"])
def test_one_bit_of_one_element_of_a_large_weight_changes_the_digest(hash_on_host: bool) -> None:
    """A digest of samples of a weight would not see it, wherever they are taken."""
    weight = torch.zeros(1 << 16, dtype=torch.float32)
    words = weight.view(torch.int32)

    def digest() -> str:
        digests = tensor_digests.TensorDigests(hash_on_host)
        digests.add("weight", weight)
        digests.start()
        return digests.finish()["weight"]

    generator = torch.Generator().manual_seed(3)
    places = torch.randint(len(words), (6,), generator=generator).unique().tolist()
    found = {digest()}
    for place in places:
        words[place] ^= 1
        found.add(digest())
        words[place] ^= 1
    assert len(found) == 1 + len(places)


def test_a_negated_part_of_a_large_weight_changes_the_digest() -> None:
    """As the key projection in the middle of a fused weight."""
    model = _Model()
    model.first.weight = torch.nn.Parameter(torch.randn(1536, 512), requires_grad=False)
    before = _take(model).text
    with torch.no_grad():
        model.first.weight[700:701].neg_()
    assert _take(model).text not in ("", before)


def test_a_layout_change_changes_the_fingerprint() -> None:
    model, other = _Model(), _Model()
    other.first.weight.data = other.first.weight.data.t().contiguous().t()
    assert torch.equal(model.first.weight, other.first.weight)
    assert _take(model).text != _take(other).text


def _load(seed: int, values: float = 1.0) -> _Model:
    """A model as vLLM loads it: created, then filled, then processed."""
    model = _Model(seed, packing=True)
    weights._note_model(model)
    model.first.weight.data.mul_(values)
    model.first.quant_method.process_weights_after_loading(model.first)
    return model


def test_weights_that_a_layer_consumes_count() -> None:
    model = _load(0)
    assert model.first.weight.numel() == 0
    fingerprint = _take(model)
    assert fingerprint.reason == ""
    assert _take(_load(0)).text == fingerprint.text
    assert _take(_load(0, values=-1.0)).text not in ("", fingerprint.text)


def test_a_reload_replaces_the_digest_of_consumed_weights() -> None:
    model, fresh = _load(0), _load(1)
    original = _take(model).text
    for source, expected in ((_Model(1), _take(fresh).text), (_Model(0), original)):
        model.first.weight = torch.nn.Parameter(source.first.weight.clone(), requires_grad=False)
        model.second.weight.data.copy_(source.second.weight)
        model.first.quant_method.process_weights_after_loading(model.first)
        assert _take(model).text == expected


def test_a_parameter_that_vanished_unhashed_makes_the_weights_unknown() -> None:
    model = _Model()
    weights._note_model(model)
    model.second.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    found = _take(model)
    assert found.text == ""
    assert "1 weights cannot be read: second.weight" in found.reason


def test_a_meta_tensor_makes_the_weights_unknown() -> None:
    """vLLM leaves them behind after a weight update that failed."""
    model = _load(0)
    model.second.weight = torch.nn.Parameter(model.second.weight.to("meta"), requires_grad=False)
    assert "second.weight (not loaded)" in _take(model).reason
    assert _take(model).text == ""


def test_lora_wrappers_change_nothing() -> None:
    plain, wrapped = _load(0), _load(0)
    before = _take(plain).text
    wrapped.first = _LoraLayer(wrapped.first)  # type: ignore[assignment]
    wrapped.second = _LoraLayer(wrapped.second)  # type: ignore[assignment]
    assert _take(wrapped).text == before


class _Experts(torch.nn.Module):
    """A mixture of 4 experts, of which a data parallel rank with expert parallelism has a part."""

    def __init__(self, first: int, stop: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        experts = torch.randn(4, 8, 6, generator=generator)
        self.attention = _Linear(torch.randn(8, 6, generator=generator))
        self.w13_weight = torch.nn.Parameter(experts[first:stop].clone(), requires_grad=False)


@pytest.mark.parametrize(
    ("parts", "namespaces"),
    [
        # Without expert parallelism every engine has all experts: they share.
        (((0, 4), (0, 4)), 1),
        (((0, 2), (2, 4)), 2),
        (((0, 1), (1, 2), (2, 3), (3, 4)), 4),
        # Two deployments with equal parts share by rank, whatever their sizes are.
        (((0, 2), (2, 4), (0, 2), (2, 4)), 2),
        (((0, 4), (0, 2)), 2),
    ],
)
def test_data_parallel_engines_share_if_they_have_the_same_experts(
    parts: tuple[tuple[int, int], ...], namespaces: int
) -> None:
    texts = [_take(_Experts(*part)).text for part in parts]
    assert all(texts)
    found = {derive_namespace("{}", ["codec"], [text])[0] for text in texts}
    assert len(found) == namespaces


def test_a_draft_model_counts() -> None:
    alone = _take(_Model()).text
    drafts = {_take(_Model(), _Model(seed)).text for seed in (3, 4)}
    assert len({alone, *drafts}) == 3


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"eplb": True}, "expert load balancing"),
        ({"prefetch": 8}, "prefetch offloading"),
        ({"scales": True}, "KV scales"),
    ],
)
def test_weights_that_change_without_a_signal_have_no_fingerprint(
    config: dict[str, Any], words: str
) -> None:
    found = _take(_Model(), **config)
    assert found.text == ""
    assert words in found.reason


def test_models_that_were_loaded_unseen_have_no_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights._models, "installed", False)
    assert "KVTIER_TOPOLOGY" in _take(_Model()).reason


def test_a_tensor_that_cannot_be_read_is_reported_and_does_not_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: object) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tensor_digests, "is_dense", broken)
    assert "out of memory" in _take(_Model()).reason


@pytest.mark.parametrize("count", [1, 3, 4, 4095, 4096, 10_001, CHUNK_BYTES - 4, CHUNK_BYTES + 5])
def test_sums_on_a_device_equal_a_plain_computation(count: int) -> None:
    generator = np.random.default_rng(count)
    data = generator.integers(0, 256, count, dtype=np.uint8)
    sums = word_sums.WordSums(torch.device("cpu"))
    words = np.concatenate([data, np.zeros(-count % CHUNK_BYTES, np.uint8)]).view(np.int32)
    lanes = sums._lanes.numpy()
    expected = []
    with np.errstate(over="ignore"):
        for chunk in words.reshape(-1, word_sums.STEPS, word_sums.LANES).astype(np.int64):
            for column, multiplier in enumerate(word_sums.MULTIPLIERS):
                value = np.zeros(word_sums.LANES, np.int64)
                for row in chunk:
                    value = value * np.int64(multiplier) + row
                expected.append(int((value * lanes[column]).sum()))
    assert sums(sums.table([torch.from_numpy(data)])).flatten().tolist() == expected


def test_every_changed_bit_changes_both_sums_on_a_device() -> None:
    sums = word_sums.WordSums(torch.device("cpu"))
    data = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    before = sums(sums.table([data]))
    for position in range(0, 1000, 37):
        for bit in range(8):
            other = data.clone()
            other[position] ^= 1 << bit
            assert (sums(sums.table([other])) != before).sum() == 2


def _digests_of_a_device(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    digests = tensor_digests.TensorDigests(hash_on_host=False)
    for name, tensor in tensors.items():
        digests.add(name, tensor)
    digests.start()
    assert digests.done
    return digests.finish()


def test_digests_of_tensors_on_a_device_depend_on_every_tensor_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "one": torch.randn(7, 5, generator=generator).bfloat16(),
        "column major": torch.randn(6, 4, generator=generator).t(),
        "gaps": torch.randn(8, 8, generator=generator)[:, ::2],
        "large": torch.randn(CHUNK_BYTES // 4 + 3, generator=generator),
        "scalar": torch.tensor(1.5),
    }
    found = _digests_of_a_device(tensors)
    assert len(set(found.values())) == len(tensors)
    in_another_order = _digests_of_a_device(dict(reversed(tensors.items())))
    assert in_another_order == found
    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed[(-1,) * changed.dim()] += 1
        if changed.stride() != tensor.stride():
            continue
        others = _digests_of_a_device({**tensors, name: changed})
        assert [each for each in found if found[each] != others[each]] == [name]


def test_digests_are_computed_again_from_the_tensors_as_they_are_then() -> None:
    tensor = torch.zeros(1000)
    digests = tensor_digests.TensorDigests(hash_on_host=False)
    digests.add("weight", tensor)
    digests.start()
    before = digests.finish()
    assert digests.start_again()
    assert digests.finish() == before
    tensor[3] = 1
    assert digests.start_again()
    assert digests.finish() == _digests_of_a_device({"weight": tensor}) != before
    tensor.set_(tensor.view(10, 100))  # type: ignore[call-overload]
    assert not digests.start_again(), "its digest has other dimensions"
    tensor.set_(torch.zeros(1000))  # type: ignore[call-overload]
    assert not digests.start_again()
    del tensor
    assert not digests.start_again()


def test_modules_that_were_added_after_the_launch_are_found() -> None:
    model = _Model()
    first = _take(model)
    model.extra = torch.nn.Linear(4, 4)
    second = _take(model)
    assert second.text != first.text
    assert second.hashed_bytes > first.hashed_bytes


def test_weights_that_were_replaced_are_read_and_the_old_ones_are_freed() -> None:
    model = _Model()
    first = _take(model)
    old = weakref.ref(model.second.weight)
    model.second.weight.data[0, 0] += 1
    second = _take(model)
    assert second.text != first.text
    model.second.weight = torch.nn.Parameter(torch.zeros(8, 6).bfloat16(), requires_grad=False)
    assert old() is None, "nothing holds what the model does not hold"
    third = _take(model)
    assert third.text not in (first.text, second.text)


def test_the_kernel_computes_the_same_sums() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KERNEL_PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["equal", "noticed"], done.stderr[-2000:]


def test_sums_of_several_tensors_are_those_of_each() -> None:
    sums = word_sums.WordSums(torch.device("cpu"))
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (5, CHUNK_BYTES + 1, 8)]
    together = sums(sums.table(parts))
    assert torch.equal(together, torch.cat([sums(sums.table([each])) for each in parts]))


def test_installing_twice_wraps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader import utils
    from vllm.v1.worker.worker_base import WorkerBase

    monkeypatch.setattr(WorkerBase, "__init__", WorkerBase.__init__)
    monkeypatch.setattr(utils, "record_metadata_for_reloading", utils.record_metadata_for_reloading)
    weights.install()
    wrapped = WorkerBase.__init__, utils.record_metadata_for_reloading
    weights.install()
    assert (WorkerBase.__init__, utils.record_metadata_for_reloading) == wrapped


def test_a_device_that_does_not_answer_leaves_the_weights_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digests = tensor_digests.TensorDigests(hash_on_host=False)
    digests.add("a", torch.ones(8))
    digests.start()
    digests._events = [SimpleNamespace(query=lambda: False)]
    monkeypatch.setattr(tensor_digests, "DEVICE_SECONDS", 0.01)
    found = weights.PendingFingerprint(None, SimpleNamespace(digests=digests, consumed={})).result()  # type: ignore[arg-type]
    assert found.text == ""
    assert "the device did not answer within 0.01 s" in found.reason
