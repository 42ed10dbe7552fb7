"""Requests with LoRA adapters: vLLM's hash has the adapter's name, KVTier adds what lies in its files."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.scheduler.scheduler_rig import CHUNK, RAM, FakeRequest, Rig

from kvtier.engines.vllm.lora import AdapterDigests, adapter_digest


def _lora(
    name: str = "x", number: int = 1, path: str = "/x", inplace: bool = False
) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path, load_inplace=inplace)


class _Digests:
    """Digests that the test releases."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.asked: list[str] = []
        self.adapters = AdapterDigests(self._digest)

    def _digest(self, path: str) -> bytes:
        self.asked.append(path)
        assert self.release.wait(30)
        if path == "/missing":
            raise FileNotFoundError(path)
        return path.encode().ljust(32)

    def known(self, lora: SimpleNamespace) -> bytes | str:
        """Waits for an answer other than "unknown"."""
        self.release.set()
        for _ in range(3000):
            state = self.adapters.digest(lora)
            if state != "unknown":
                return state
            threading.Event().wait(0.01)
        raise AssertionError("the digest did not come")


@pytest.fixture
def digests() -> _Digests:
    return _Digests()


def _stored(rig: Rig, request: FakeRequest) -> list[bytes]:
    """Keys that a computed request stores."""
    from kvtier.tierd.wire import Reserve

    rig.run({request.request_id: request.num_tokens})
    request.append(1)
    rig.build({request.request_id: 1})
    return [b"\0" + item[2] for reserve in rig.client.take(Reserve) for item in reserve.items]


def test_until_the_digest_is_known_it_neither_loads_nor_stores(digests: _Digests) -> None:
    rig = Rig(adapters=digests.adapters)
    rig.client.credit(8)
    request = rig.request(300, lora=_lora())
    rig.hold(request.keys(0, 4))
    assert rig.ask(request) == 0
    assert _stored(rig, request) == []
    digests.known(_lora())
    assert len(rig.build({"r": 1}).stores) == 4


def test_its_keys_are_neither_the_base_models_nor_another_adapters(digests: _Digests) -> None:
    rig = Rig(adapters=digests.adapters)
    rig.client.credit(32)
    digests.known(_lora("x", 1, "/x"))
    digests.known(_lora("x", 2, "/y"))
    keys = []
    for name, lora in (("base", None), ("x", _lora("x", 1, "/x")), ("y", _lora("x", 2, "/y"))):
        request = rig.request(300, name, lora=lora)
        assert rig.ask(request) == 0
        keys.append(_stored(rig, request))
    assert [len(each) for each in keys] == [4, 4, 4]
    assert len({key for each in keys for key in each}) == 12


def test_the_same_files_give_the_same_keys(digests: _Digests) -> None:
    rig = Rig(adapters=digests.adapters)
    rig.client.credit(8)
    digests.known(_lora())
    stored = _stored(rig, _asked(rig, rig.request(300, "one", lora=_lora())))
    rig.hold(stored, RAM)
    assert rig.ask(rig.request(300, "two", lora=_lora())) == 4 * CHUNK


def _asked(rig: Rig, request: FakeRequest) -> FakeRequest:
    assert rig.ask(request) == 0
    return request


def test_an_adapter_without_readable_files_is_not_cached(digests: _Digests) -> None:
    rig = Rig(adapters=digests.adapters)
    assert digests.known(_lora(path="/missing")) == "unreadable"
    request = rig.request(300, lora=_lora(path="/missing"))
    assert rig.ask(request) == 0
    assert rig.scheduler._states["r"].skip_reason == "adapter_unreadable"


def test_an_adapter_that_was_replaced_in_place_is_out_for_good(digests: _Digests) -> None:
    rig = Rig(adapters=digests.adapters)
    rig.client.credit(32)
    digests.known(_lora())
    running = _asked(rig, rig.request(300, "running", lora=_lora()))
    rig.run({"running": 300})
    running.append(1)
    rig.ask(rig.request(300, "replacing", lora=_lora(inplace=True)))
    assert rig.build({"running": 1}).stores == []
    assert digests.adapters.digest(_lora()) == "replaced"
    assert digests.adapters.digest(_lora(number=9)) == "replaced"
    assert digests.adapters.digest(_lora("other", 2, "/y")) == "unknown"


def test_one_number_with_two_paths_is_out(digests: _Digests) -> None:
    """The engine keeps computing with what it loaded first under a number."""
    digests.known(_lora(path="/x"))
    assert digests.adapters.digest(_lora(path="/y")) == "replaced"
    assert digests.adapters.digest(_lora(path="/x")) == "replaced"


def test_asking_again_reads_nothing_again(digests: _Digests) -> None:
    for _ in range(5):
        digests.adapters.digest(_lora())
    digests.known(_lora())
    assert digests.asked == ["/x"]


def test_a_digest_covers_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    first = adapter_digest(str(tmp_path))
    assert adapter_digest(str(tmp_path)) == first
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weightz")
    second = adapter_digest(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert len({first, second, adapter_digest(str(tmp_path))}) == 3


def test_no_directory_and_an_empty_one_have_no_digest(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError):
            adapter_digest(str(path))


def test_files_changed_after_the_engine_started_may_not_be_what_it_loaded_so_no_other_engine_shares(
    tmp_path: Path,
) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    now = time.time()
    early, other = (adapter_digest(str(tmp_path), now - 60, nonce) for nonce in (b"one", b"other"))
    assert early != other
    settled, same = (adapter_digest(str(tmp_path), now + 60, nonce) for nonce in (b"one", b"other"))
    assert settled == same == adapter_digest(str(tmp_path))
    assert settled not in (early, other)
