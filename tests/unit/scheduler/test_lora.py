"""Requests with LoRA adapters: the digest of the files becomes part of their keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.scheduler.scheduler_testbed import CHUNK, RAM, FakeRequest, SchedulerTestbed

from kvtier.engines.common.lora import (
    CHECK_SECONDS,
    AdapterDigests,
    AdapterFiles,
    adapter_digest,
)


def _lora(
    name: str = "x", number: int = 1, path: str = "/x", inplace: bool = False, **more: object
) -> SimpleNamespace:
    return SimpleNamespace(
        lora_name=name, lora_int_id=number, lora_path=path, load_inplace=inplace, **more
    )


class _Digests(AdapterFiles):
    """Digests that the test releases."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.read_paths: list[str] = []
        self.contents: dict[str, bytes] = {}
        self.now = 0.0
        self.adapters = AdapterDigests(self, lambda: self.now)

    def state(self, path: str) -> object:
        assert self.release.wait(30)
        return self.contents.get(path)

    def digest(self, path: str, number: int) -> bytes:
        self.read_paths.append(path)
        if path == "/missing":
            raise FileNotFoundError(path)
        return path.encode().ljust(32) + self.contents.get(path, b"")

    def known(self, lora: SimpleNamespace) -> bytes | str:
        """Waits for an answer other than "unknown"."""
        self.release.set()
        for _ in range(3000):
            state = self.adapters.digest(lora)
            if state not in ("unknown", "checked"):
                return state
            threading.Event().wait(0.01)
        raise AssertionError("the digest did not come")


@pytest.fixture
def digests() -> _Digests:
    return _Digests()


def _stored(testbed: SchedulerTestbed, request: FakeRequest) -> list[bytes]:
    """Keys that a computed request stores."""
    from kvtier.tierd.wire import Reserve

    testbed.run({request.request_id: request.num_tokens})
    request.append(1)
    testbed.build({request.request_id: 1})
    return [b"\0" + item[2] for reserve in testbed.client.take(Reserve) for item in reserve.items]


def test_requests_are_not_cached_until_the_adapter_digest_is_known(digests: _Digests) -> None:
    testbed = SchedulerTestbed(adapters=digests.adapters)
    testbed.client.credit(8)
    request = testbed.request(300, lora=_lora())
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) == 0
    assert _stored(testbed, request) == []
    digests.known(_lora())
    assert len(testbed.build({"r": 1}).stores) == 4


def test_adapter_keys_differ_from_the_base_model_and_other_adapters(digests: _Digests) -> None:
    testbed = SchedulerTestbed(adapters=digests.adapters)
    testbed.client.credit(32)
    digests.known(_lora("x", 1, "/x"))
    digests.known(_lora("x", 2, "/y"))
    keys = []
    for name, lora in (("base", None), ("x", _lora("x", 1, "/x")), ("y", _lora("x", 2, "/y"))):
        request = testbed.request(300, name, lora=lora)
        assert testbed.ask(request) == 0
        keys.append(_stored(testbed, request))
    assert [len(each) for each in keys] == [4, 4, 4]
    assert len({key for each in keys for key in each}) == 12


def test_the_same_files_give_the_same_keys(digests: _Digests) -> None:
    testbed = SchedulerTestbed(adapters=digests.adapters)
    testbed.client.credit(8)
    digests.known(_lora())
    stored = _stored(testbed, _matched(testbed, testbed.request(300, "one", lora=_lora())))
    testbed.hold(stored, RAM)
    assert testbed.ask(testbed.request(300, "two", lora=_lora())) == 4 * CHUNK


def _matched(testbed: SchedulerTestbed, request: FakeRequest) -> FakeRequest:
    assert testbed.ask(request) == 0
    return request


def test_unreadable_adapters_are_not_cached(digests: _Digests) -> None:
    testbed = SchedulerTestbed(adapters=digests.adapters)
    assert digests.known(_lora(path="/missing")) == "unreadable"
    request = testbed.request(300, lora=_lora(path="/missing"))
    assert testbed.ask(request) == 0
    assert testbed.scheduler._states["r"].skip_reason == "adapter_unreadable"


def test_an_adapter_replaced_in_place_is_never_cached_again(digests: _Digests) -> None:
    testbed = SchedulerTestbed(adapters=digests.adapters)
    testbed.client.credit(32)
    digests.known(_lora())
    running = _matched(testbed, testbed.request(300, "running", lora=_lora()))
    testbed.run({"running": 300})
    running.append(1)
    testbed.ask(testbed.request(300, "replacing", lora=_lora(inplace=True)))
    assert testbed.build({"running": 1}).stores == []
    assert digests.adapters.digest(_lora()) == "replaced"
    assert digests.adapters.digest(_lora(number=9)) == "replaced"
    assert digests.adapters.digest(_lora("other", 2, "/y")) == "unknown"


def test_an_adapter_number_with_two_paths_is_not_cached(digests: _Digests) -> None:
    """The engine keeps computing with what it loaded first under a number."""
    digests.known(_lora(path="/x"))
    assert digests.adapters.digest(_lora(path="/y")) == "replaced"
    assert digests.adapters.digest(_lora(path="/x")) == "replaced"


def test_a_digest_is_computed_once(digests: _Digests) -> None:
    for _ in range(5):
        digests.adapters.digest(_lora())
    digests.known(_lora())
    assert digests.read_paths == ["/x"]


def test_a_digest_covers_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    first = adapter_digest(str(tmp_path))
    assert adapter_digest(str(tmp_path)) == first
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weightz")
    second = adapter_digest(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert len({first, second, adapter_digest(str(tmp_path))}) == 3


def test_missing_and_empty_directories_have_no_digest(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError):
            adapter_digest(str(path))


def test_adapters_changed_after_the_engine_started_are_not_shared(
    tmp_path: Path,
) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    now = time.time()
    early, other = (adapter_digest(str(tmp_path), now - 60, nonce) for nonce in (b"one", b"other"))
    assert early != other
    settled, same = (adapter_digest(str(tmp_path), now + 60, nonce) for nonce in (b"one", b"other"))
    assert settled == same == adapter_digest(str(tmp_path))
    assert settled not in (early, other)


def test_an_adapter_changed_after_the_engine_started_is_valid_for_its_number_only(
    tmp_path: Path,
) -> None:
    """The files may have changed between vLLM's read of them and the digest's."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    files = AdapterFiles()
    path = str(tmp_path)
    assert files.digest(path, 1) == files.digest(path, 1) != files.digest(path, 2)
    files._loaded_after = time.time() + 60
    assert files.digest(path, 1) == files.digest(path, 2) == adapter_digest(path)


def test_each_change_of_an_adapters_files_is_seen(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"weights")
    files, path = AdapterFiles(), str(tmp_path)
    states = [files.state(path), files.state(path)]
    weights.with_suffix(".new").write_bytes(b"weightz")
    weights.with_suffix(".new").rename(weights)
    states.append(files.state(path))
    (tmp_path / "more").mkdir()
    states.append(files.state(path))
    assert states[0] == states[1]
    assert len(set(states)) == 3
    with pytest.raises(FileNotFoundError):
        files.state(str(tmp_path / "absent"))


def _removed(testbed: SchedulerTestbed) -> None:
    testbed.scheduler.on_adapter_removed()


def _reset(testbed: SchedulerTestbed) -> None:
    testbed.scheduler.reset_cache()


@pytest.mark.parametrize("event", [_removed, _reset])
def test_an_adapter_whose_files_changed_before_it_was_loaded_again_takes_no_part(
    digests: _Digests, event: Callable[[SchedulerTestbed], None]
) -> None:
    """Otherwise KV of the files of before is loaded for those that the engine has now."""
    testbed = SchedulerTestbed(adapters=digests.adapters)
    testbed.client.credit(32)
    digests.known(_lora())
    stored = _stored(testbed, _matched(testbed, testbed.request(300, "one", lora=_lora())))
    assert len(stored) == 4
    event(testbed)
    digests.contents["/x"] = b"other"
    assert digests.known(_lora()) == "replaced"
    testbed.hold(stored, RAM)
    request = testbed.request(300, "two", lora=_lora())
    assert testbed.ask(request) == 0
    testbed.finish(request)
    assert testbed.scheduler.skipped["adapter_replaced"] == 1


def test_an_adapter_whose_files_are_the_same_is_read_once(digests: _Digests) -> None:
    testbed = SchedulerTestbed(adapters=digests.adapters)
    testbed.client.credit(32)
    digest = digests.known(_lora())
    stored = _stored(testbed, _matched(testbed, testbed.request(300, "one", lora=_lora())))
    _removed(testbed)
    testbed.hold(stored, RAM)
    assert digests.known(_lora()) == digest
    assert digests.read_paths == ["/x"]
    assert testbed.ask(testbed.request(300, "two", lora=_lora())) == 4 * CHUNK


def test_a_request_waits_while_the_files_are_compared_but_not_for_ever(digests: _Digests) -> None:
    testbed = SchedulerTestbed(adapters=digests.adapters)
    digests.known(_lora())
    digests.release.clear()
    _removed(testbed)
    request = testbed.request(300, lora=_lora())
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) is None
    digests.now += CHECK_SECONDS
    assert testbed.ask(request) == 0
    digests.release.set()


def test_two_layouts_of_the_same_files_do_not_share(digests: _Digests) -> None:
    """vLLM reads the weights of experts as the request says (``is_3d_lora_weight``)."""
    one = digests.known(_lora(number=1))
    assert digests.known(_lora(number=2, is_3d_lora_weight=True)) != one
    assert digests.adapters.digest(_lora(number=1, is_3d_lora_weight=True)) == "replaced"
