"""What a policy leaves in directories of nodes and exports is said when it goes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support import controllers
from tests.support.controllers import file_tier
from tests.unit.controller.test_plan import known

from kvtier_operator.controller.children.gc import orphaned_data
from kvtier_operator.settings import Settings

LIVE = {"liveGeneration": 1}
TIERS = (
    file_tier("export", {"nfs": {"server": "nas", "path": "/kv/a"}}),
    file_tier("local", {"hostPath": {"path": "/mnt/kv"}}, sharing="Node"),
    file_tier("claimed", {"claimTemplate": {"storageClassName": "fast"}}),
)


def allowed(**entry: Any) -> Settings:
    export = {"namespaces": ["n"], "nfs": {"server": "nas", "exportPrefix": "/kv"}, **entry}
    return controllers.settings(allowedVolumes=[export, {"namespaces": ["n"], "hostPath": "/mnt"}])


def test_each_directory_that_stays_is_named_by_volume_and_path() -> None:
    notes = orphaned_data(known(tiers=TIERS, status=LIVE), allowed().allowed_volumes)
    stays = "stays with what it stored; remove it once no pod uses it any more"
    assert [each.message for each in notes] == [
        f"tier export: directory n/u-1 in nas:/kv/a {stays}",
        f"tier local: directory n/u-1 in /mnt/kv of each node where its pods ran {stays}",
    ]
    assert {(each.type, each.reason, each.about[3:]) for each in notes} == {
        ("Normal", "DataLeft", ("chat", "u-1"))
    }


def test_of_a_shared_directory_it_is_not_said_that_it_may_be_removed() -> None:
    notes = orphaned_data(known(tiers=TIERS[:1], status=LIVE), allowed(shared=True).allowed_volumes)
    assert [each.message for each in notes] == [
        "tier export: what it stored in nas:/kv/a stays among what others store there, and is evicted like theirs"
    ]


@pytest.mark.parametrize(
    ("tiers", "status"),
    [(TIERS, None), (TIERS, {"conditions": []}), (TIERS[2:], LIVE), ((), LIVE)],
    ids=["never looked at", "never in force", "a claim goes with its policy", "memory alone"],
)
def test_where_no_directory_can_be_nothing_is_said(
    tiers: Any, status: dict[str, Any] | None
) -> None:
    assert orphaned_data(known(tiers=tiers, status=status), allowed().allowed_volumes) == []
