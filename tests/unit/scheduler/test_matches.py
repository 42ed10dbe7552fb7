"""What is offered to vLLM from RAM, without a call to anyone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.scheduler.scheduler_testbed import (
    CHUNK,
    DISK,
    RAM,
    SchedulerTestbed,
    location_of,
    topology,
)
from vllm.multimodal.hasher import MultiModalHasher

from kvtier.engines.vllm.metrics import KVTierStats
from kvtier.store.generations import unpack_location
from kvtier.tierd.replication import Replica
from kvtier.tierd.wire import Load, LoadReleased, Promote


def _media(name: str, identifier: str = "") -> SimpleNamespace:
    """An image, by the name that it has in keys; with an adapter vLLM adds the adapter's."""
    return SimpleNamespace(mm_hash=name, identifier=identifier or name)


def test_a_detached_engine_matches_nothing() -> None:
    testbed = SchedulerTestbed(attach=False)
    assert testbed.ask(testbed.request(300)) == 0


def test_nothing_matches_before_the_snapshot_arrives() -> None:
    testbed = SchedulerTestbed(attach=False)
    testbed.client.welcome()
    testbed.client.ready(snapshot=False)
    assert testbed.ask(testbed.request(300)) == 0


def test_whole_chunks_in_ram_match_at_once(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 3))
    assert testbed.ask(request) == 3 * CHUNK
    assert testbed.client.sent == []


def test_a_missing_chunk_ends_the_match(testbed: SchedulerTestbed) -> None:
    request = testbed.request(400)
    testbed.hold([request.key(0), request.key(1), request.key(3)])
    assert testbed.ask(request) == 2 * CHUNK


def test_without_the_first_chunk_nothing_matches(testbed: SchedulerTestbed) -> None:
    request = testbed.request(400)
    testbed.hold(request.keys(1, 4))
    assert testbed.ask(request) == 0


def test_a_local_hit_inside_a_chunk_is_extended(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request, 96) == 4 * CHUNK - 96


def test_a_local_hit_that_is_no_block_boundary_is_not_extended(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request, 70) == 0


def test_a_whole_prompt_may_match(testbed: SchedulerTestbed) -> None:
    """vLLM computes the last token once more, which full attention does not mind."""
    request = testbed.request(4 * CHUNK)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) == 4 * CHUNK


def test_tokens_in_gpu_memory_do_not_match(testbed: SchedulerTestbed) -> None:
    request = testbed.request(4 * CHUNK + 5)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request, 4 * CHUNK) == 0


def test_matches_below_the_minimum_are_ignored() -> None:
    testbed = SchedulerTestbed(topology(min_load_tokens=130))
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request, 2 * CHUNK) == 0
    assert testbed.ask(request, 96) == 4 * CHUNK - 96


def test_the_minimum_can_change_while_the_engine_runs() -> None:
    testbed = SchedulerTestbed()
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    testbed.client.welcome(
        settings=topology(min_load_tokens=1000).live.model_dump_json(by_alias=True)
    )
    testbed.client.ready()
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) == 0


def test_repeated_lookups_use_the_cached_match(
    testbed: SchedulerTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    first = testbed.ask(request)
    monkeypatch.setattr(Replica, "get_hashed", None)
    assert [testbed.ask(request) for _ in range(50)] == [first] * 50


def test_an_evicted_key_no_longer_matches(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) == 4 * CHUNK
    testbed.client.leaving([request.key(2)])
    assert testbed.ask(request) == 2 * CHUNK


def test_new_keys_match_after_the_refresh_interval(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    assert testbed.ask(request) == 0
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) == 0
    testbed.now += 0.06
    assert testbed.ask(request) == 4 * CHUNK


def test_nothing_matches_once_tierd_is_lost(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) == 4 * CHUNK
    testbed.client.lose()
    assert testbed.ask(request) == 0


def test_a_missing_delta_disables_matches_until_a_snapshot_arrives(
    testbed: SchedulerTestbed,
) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 2))
    testbed.client._sequence += 1
    testbed.hold(request.keys(2, 1))
    assert testbed.ask(request) == 0
    testbed.client.delta(added=dict.fromkeys(request.keys(0, 3), RAM), snapshot=True)
    assert testbed.ask(request) == 3 * CHUNK


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"resumable": True}, "streaming_session"),
        ({"mm_features": [_media("my-image")]}, "media_id"),
        ({"mm_features": [_media("ab" * 32), _media("")]}, "media_id"),
        ({"mm_features": [_media("my-image", "adapter:my-image")]}, "media_id"),
        ({"mm_features": [SimpleNamespace(identifier="my-image")]}, "media_id"),
        ({"skip_reading_prefix_cache": True}, "not_read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_requests_that_must_not_be_loaded_are_skipped_and_counted_by_reason(
    testbed: SchedulerTestbed, more: dict[str, object], reason: str
) -> None:
    request = testbed.request(300, **more)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) == 0
    testbed.finish(request)
    stats = KVTierStats()
    testbed.scheduler.collect_stats(stats)
    assert stats.data["skipped_requests"] == {reason: 1}
    testbed.scheduler.collect_stats(stats)
    assert stats.data["skipped_requests"] == {reason: 1}


@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
def test_media_that_vllm_has_hashed_are_loaded(testbed: SchedulerTestbed, algorithm: Any) -> None:
    digest = MultiModalHasher.hash_kwargs(algorithm, model_id="m", image=b"an image")
    request = testbed.request(
        300, mm_features=[_media(digest), _media(digest, f"adapter:{digest}")]
    )
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) == 4 * CHUNK


def test_a_request_that_is_served_is_not_counted_as_skipped(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.ask(request)
    testbed.finish(request)
    stats = KVTierStats()
    testbed.scheduler.collect_stats(stats)
    assert "skipped_requests" not in stats.data


def test_a_load_names_its_keys_and_the_blocks_they_go_to(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    offered = testbed.ask(request, 96)
    assert offered == 160
    testbed.admit(request, 96, offered)
    (load,) = testbed.client.take(Load)
    assert load.promotion == 0
    assert [b"\0" + block_hash for _, block_hash in load.keys] == request.keys(1, 3)
    (job,) = testbed.build().loads
    assert (job.load, job.request_id) == (load.load, "r")
    table = testbed.tables["r"]
    assert [(run.first, list(run.blocks)) for run in job.runs] == [
        (1, table[3:4]),
        (0, table[4:6]),
        (0, table[6:8]),
    ]
    assert job.timeout_seconds >= 1.0


def test_the_second_call_after_a_load_starts_nothing(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    testbed.admit(request, 0, testbed.ask(request) or 0)
    (job,) = testbed.build().loads
    testbed.report(loads=[testbed.result(job.load, 4)])
    testbed.scheduler.update_state_after_alloc(request, (testbed.tables["r"],), 0)  # type: ignore[arg-type]
    assert testbed.build({"r": 44}).loads == []
    assert len(testbed.client.take(Load)) == 1


def test_a_load_reaches_the_worker_even_if_tierd_is_unreachable(testbed: SchedulerTestbed) -> None:
    """vLLM waits for a report from the moment it allocated, and only the worker can give it."""
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    offered = testbed.ask(request) or 0
    testbed.client.accepts = False
    testbed.admit(request, 0, offered)
    (job,) = testbed.build().loads
    assert len(job.slots) == 4, "the worker can load without a word from tierd"


def test_a_load_names_the_slots_and_generations_that_tierd_announced(
    testbed: SchedulerTestbed,
) -> None:
    request = testbed.request(300)
    keys = request.keys(0, 4)
    testbed.hold(keys)
    testbed.admit(request, 0, testbed.ask(request) or 0)
    (job,) = testbed.build().loads
    named = list(zip(job.slots, job.generations, strict=True))
    assert named == [unpack_location(location_of(key)) for key in keys]
    assert job.epoch == testbed.scheduler.session.epoch


def test_a_key_evicted_after_the_lookup_is_not_named(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300)
    keys = request.keys(0, 4)
    testbed.hold(keys)
    offered = testbed.ask(request) or 0
    testbed.client.leaving(keys[2:3])
    testbed.admit(request, 0, offered)
    (job,) = testbed.build().loads
    assert (len(job.slots), len(job.runs)) == (2, 4)


def test_tierd_may_evict_again_once_every_rank_has_reported() -> None:
    testbed = SchedulerTestbed(ranks=2)
    request = testbed.request(300)
    testbed.hold(request.keys(0, 4))
    testbed.admit(request, 0, testbed.ask(request) or 0)
    (job,) = testbed.build().loads
    testbed.report(loads=[testbed.result(job.load, 4)])
    assert testbed.client.take(LoadReleased) == []
    testbed.report(loads=[testbed.result(job.load, 4)])
    assert testbed.client.take(LoadReleased) == [LoadReleased(load=job.load)]


def test_a_higher_ram_weight_prefers_a_shorter_prefix_in_ram() -> None:
    testbed = SchedulerTestbed(topology(ram=100, disk=10))
    request = testbed.request(8 * CHUNK)
    testbed.hold(request.keys(0, 4), RAM)
    testbed.hold(request.keys(4, 4), DISK)
    assert testbed.ask(request) == 4 * CHUNK
    assert testbed.client.take(Promote) == []
