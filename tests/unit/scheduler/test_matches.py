"""What is offered to vLLM from RAM, without a call to anyone."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_rig import CHUNK, DISK, RAM, Rig, topology

from kvtier.tierd.wire import Load, Promote


def test_an_unattached_engine_offers_nothing() -> None:
    rig = Rig(attach=False)
    assert rig.ask(rig.request(300)) == 0


def test_nothing_is_offered_before_the_snapshot_has_come() -> None:
    rig = Rig(attach=False)
    rig.client.welcome()
    rig.client.ready(snapshot=False)
    assert rig.ask(rig.request(300)) == 0


def test_the_whole_chunks_in_ram_are_offered_at_once(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 3))
    assert rig.ask(request) == 3 * CHUNK
    assert rig.client.sent == []


def test_a_gap_ends_the_offer(rig: Rig) -> None:
    request = rig.request(400)
    rig.hold([request.key(0), request.key(1), request.key(3)])
    assert rig.ask(request) == 2 * CHUNK


def test_a_missing_first_chunk_means_nothing(rig: Rig) -> None:
    request = rig.request(400)
    rig.hold(request.keys(1, 4))
    assert rig.ask(request) == 0


def test_a_hit_that_ends_inside_a_chunk_is_offered_from_there_on(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    assert rig.ask(request, 96) == 4 * CHUNK - 96


def test_a_hit_that_is_no_block_boundary_is_left_alone(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    assert rig.ask(request, 70) == 0


def test_a_prompt_may_be_offered_wholly(rig: Rig) -> None:
    """vLLM computes the last token once more, which full attention does not mind."""
    request = rig.request(4 * CHUNK)
    rig.hold(request.keys(0, 4))
    assert rig.ask(request) == 4 * CHUNK


def test_what_the_gpu_holds_is_not_offered(rig: Rig) -> None:
    request = rig.request(4 * CHUNK + 5)
    rig.hold(request.keys(0, 4))
    assert rig.ask(request, 4 * CHUNK) == 0


def test_too_few_tokens_are_not_worth_a_load() -> None:
    rig = Rig(topology(min_load_tokens=130))
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    assert rig.ask(request, 2 * CHUNK) == 0
    assert rig.ask(request, 96) == 4 * CHUNK - 96


def test_the_least_worth_loading_changes_under_a_running_engine() -> None:
    rig = Rig()
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    rig.client.welcome(settings=topology(min_load_tokens=1000).live.model_dump_json(by_alias=True))
    rig.client.ready()
    rig.hold(request.keys(0, 4))
    assert rig.ask(request) == 0


def test_asking_again_gives_the_same_without_looking_again(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    first = rig.ask(request)
    rig.scheduler.session.replica.get_bits = None  # type: ignore[assignment]
    assert [rig.ask(request) for _ in range(50)] == [first] * 50


def test_a_key_that_leaves_is_not_offered_again(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    assert rig.ask(request) == 4 * CHUNK
    rig.client.leaving([request.key(2)])
    assert rig.ask(request) == 2 * CHUNK


def test_keys_that_arrive_meanwhile_are_noticed_after_a_moment(rig: Rig) -> None:
    request = rig.request(300)
    assert rig.ask(request) == 0
    rig.hold(request.keys(0, 4))
    assert rig.ask(request) == 0
    rig.now += 0.06
    assert rig.ask(request) == 4 * CHUNK


def test_a_lost_tierd_means_nothing_at_once_and_never_later(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    assert rig.ask(request) == 4 * CHUNK
    rig.client.lose()
    assert rig.ask(request) == 0


def test_a_gap_in_the_deltas_means_nothing_until_a_snapshot_has_come(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 2))
    rig.client._sequence += 1
    rig.hold(request.keys(2, 1))
    assert rig.ask(request) == 0
    rig.client.delta(added=dict.fromkeys(request.keys(0, 3), RAM), snapshot=True)
    assert rig.ask(request) == 3 * CHUNK


@pytest.mark.parametrize(
    "more",
    [{"prompt_embeds": object()}, {"resumable": True}, {"skip_reading_prefix_cache": True}],
    ids=lambda more: next(iter(more)),
)
def test_requests_whose_hash_does_not_say_what_was_computed_take_no_part(
    rig: Rig, more: dict[str, object]
) -> None:
    request = rig.request(300, **more)
    rig.hold(request.keys(0, 4))
    assert rig.ask(request) == 0


def test_a_load_names_its_keys_and_the_blocks_they_go_to(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    offered = rig.ask(request, 96)
    assert offered == 160
    rig.admit(request, 96, offered)
    (load,) = rig.client.take(Load)
    assert load.promotion == 0
    assert [b"\0" + block_hash for _, block_hash in load.keys] == request.keys(1, 3)
    (job,) = rig.build().loads
    assert (job.load, job.request_id) == (load.load, "r")
    table = rig.tables["r"]
    assert [(run.first, list(run.blocks)) for run in job.runs] == [
        (1, table[3:4]),
        (0, table[4:6]),
        (0, table[6:8]),
    ]
    assert job.timeout_seconds >= 1.0


def test_the_second_call_after_a_load_begins_nothing(rig: Rig) -> None:
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    rig.admit(request, 0, rig.ask(request) or 0)
    (job,) = rig.build().loads
    rig.report(loads=[rig.result(job.load, 4)])
    rig.scheduler.update_state_after_alloc(request, (rig.tables["r"],), 0)  # type: ignore[arg-type]
    assert rig.build({"r": 44}).loads == []
    assert len(rig.client.take(Load)) == 1


def test_a_load_goes_to_the_worker_even_if_tierd_cannot_be_told(rig: Rig) -> None:
    """vLLM waits for a report from the moment it allocated, and only the worker can give it."""
    request = rig.request(300)
    rig.hold(request.keys(0, 4))
    offered = rig.ask(request) or 0
    rig.client.accepts = False
    rig.admit(request, 0, offered)
    assert len(rig.build().loads) == 1
    assert rig.scheduler.loads.counts.failures["not_sent"] == 1


def test_under_a_heavier_ram_a_shorter_prefix_from_ram_wins() -> None:
    rig = Rig(topology(ram=100, disk=10))
    request = rig.request(8 * CHUNK)
    rig.hold(request.keys(0, 4), RAM)
    rig.hold(request.keys(4, 4), DISK)
    assert rig.ask(request) == 4 * CHUNK
    assert rig.client.take(Promote) == []
