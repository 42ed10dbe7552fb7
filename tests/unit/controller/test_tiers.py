"""Statuses of tiers: a directory that pods share is counted once."""

from __future__ import annotations

import pytest
from tests.support.pods import (
    file_tier,
    injected_pod,
    policy,
    running,
    status_document,
    tier_document,
)
from tests.unit.controller.builders import status, view_of

from kvtier_operator.controller.status.tiers import rounded_bytes, rounded_percent

GIB = 1 << 30


def pods(tier: str, *places: tuple[str, int]):  # type: ignore[no-untyped-def]
    """One pod per (node, used GiB), each with a capacity of 10 GiB in that tier."""
    return [
        view_of(
            running(injected_pod(f"chat-{index}"), node=node),
            status_document(tier_document(tier, usedBytes=used * GIB, capacityBytes=10 * GIB)),
        )
        for index, (node, used) in enumerate(places)
    ]


def sums(of, found):  # type: ignore[no-untyped-def]
    """Used and capacity of the last tier, in GiB."""
    tier = status(*found, of=of).tiers[-1]
    return tier.used_bytes / GIB, tier.capacity_bytes / GIB


def test_memory_is_summed_over_pods() -> None:
    assert sums(policy(), pods("ram", ("a", 2), ("a", 4), ("b", 6))) == (12, 30)


def test_a_directory_of_the_whole_cluster_is_counted_once() -> None:
    shared = policy(file_tier("nas", "Cluster", {"nfs": {"server": "nas.example", "path": "/kv"}}))
    assert sums(shared, pods("nas", ("a", 4), ("a", 5), ("b", 5))) == (5, 10)


def test_a_directory_of_a_node_is_counted_once_per_node() -> None:
    assert sums(policy(file_tier("nvme", "Node")), pods("nvme", ("a", 4), ("a", 4), ("b", 2))) == (
        6,
        20,
    )


def test_a_directory_of_a_pod_is_summed() -> None:
    assert sums(policy(file_tier("nvme", "Pod")), pods("nvme", ("a", 4), ("a", 6), ("b", 5))) == (
        15,
        30,
    )


@pytest.mark.parametrize(
    "volume", [{"emptyDir": {}}, {"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}]
)
def test_a_volume_of_the_pod_is_summed_for_any_sharing(
    volume: dict[str, object],
) -> None:
    assert sums(policy(file_tier("nvme", "Node", volume)), pods("nvme", ("a", 4), ("a", 4))) == (
        8,
        20,
    )


def test_a_remote_store_is_counted_once() -> None:
    remote = policy(
        {"name": "remote", "lmcache": {"url": "redis://cache:6379", "capacity": "10Gi"}}
    )
    assert sums(remote, pods("remote", ("a", 3), ("b", 3))) == (3, 10)


def test_a_tier_has_the_worst_state_that_a_pod_reports() -> None:
    states = ("Healthy", "BreakerOpen", "Degraded", "Unknown")
    found = [
        view_of(running(injected_pod(f"chat-{word}")), status_document(tier_document("ram", word)))
        for word in states
    ]
    worst = [status(*found[:count]).tiers[0].state.value for count in (1, 2, 3, 4)]  # type: ignore[index]
    assert worst == ["Healthy", "BreakerOpen", "BreakerOpen", "BreakerOpen"]
    assert status(found[0], found[3]).tiers[0].state.value == "Unknown"  # type: ignore[index]
    assert status(found[3], found[2]).tiers[0].state.value == "Degraded"  # type: ignore[index]


def test_a_tier_that_no_pod_reports_is_unknown_and_has_no_numbers() -> None:
    (tier,) = status(view_of(running(injected_pod()))).tiers or ()
    assert (tier.state.value, tier.reporting_pods, tier.used_bytes, tier.hit_tokens_percent) == (
        "Unknown",
        0,
        None,
        None,
    )


def test_hits_are_weighted_by_prompt_tokens() -> None:
    def pod(name: str, prompt: int, ram: int, nvme: int):  # type: ignore[no-untyped-def]
        tiers = (tier_document("ram", hitTokens=ram), tier_document("nvme", hitTokens=nvme))
        return view_of(running(injected_pod(name)), status_document(*tiers, promptTokens=prompt))

    of = policy(file_tier("nvme", "Node"))
    found = status(pod("busy", 9000, 4500, 900), pod("idle", 1000, 0, 1000), of=of)
    assert [tier.hit_tokens_percent for tier in found.tiers or ()] == [45, 20]
    assert found.summary is not None
    assert found.summary.hit_tokens_percent == 65


def test_a_percentage_needs_prompt_tokens_and_is_at_most_100() -> None:
    assert rounded_percent(5, 0) is None
    assert rounded_percent(50, 10) == 100


def test_bytes_are_rounded_to_steps_of_five_percent_of_the_capacity() -> None:
    assert [rounded_bytes(used, 1000) for used in (0, 1, 49, 74, 76, 1000)] == [
        0,
        50,
        50,
        50,
        100,
        1000,
    ]
    assert rounded_bytes(7, 0) == 7


def test_the_sum_of_invalid_reports_fits_the_api() -> None:
    most = (1 << 63) - 1
    found = [
        view_of(
            running(injected_pod(f"chat-{index}")),
            status_document(tier_document("ram", usedBytes=most, capacityBytes=most)),
        )
        for index in range(3)
    ]
    (tier,) = status(*found).tiers or ()
    assert most - 20 <= (tier.used_bytes or 0) <= most == tier.capacity_bytes


def test_a_tier_status_has_the_name_of_its_claim() -> None:
    from tests.unit.controller.builders import reconcile_input

    of = policy(file_tier("nas", "Cluster", {"nfs": {"server": "nas.example", "path": "/kv"}}))
    found = status(of=of, plan=reconcile_input(claims={"nas": "chat-nas-0123"}))
    assert [tier.claim_name for tier in found.tiers or ()] == [None, "chat-nas-0123"]
