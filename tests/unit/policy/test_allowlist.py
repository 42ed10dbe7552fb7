"""An administrator allows hostPath directories and exports by namespace and path."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.policies import changed, complete_policy

from kvtier_operator.api.allowlist import AllowedVolume, is_below, volume_errors
from kvtier_operator.api.documents import load_policy
from kvtier_operator.api.validation import InvalidDocumentError, validated

DISK = {"namespaces": ["default"], "hostPath": "/mnt/nvme"}
EXPORT = {"namespaces": ["*"], "nfs": {"server": "NAS.example", "exportPrefix": "/kv"}}


def _refused(entries: list[dict[str, Any]], changes: dict[str, Any] | None = None) -> list[str]:
    policy = load_policy(json.dumps(changed(complete_policy(), changes or {})))
    return [
        refusal.message
        for refusal in volume_errors(policy, [validated(AllowedVolume, entry) for entry in entries])
    ]


def test_an_empty_list_allows_nothing() -> None:
    disk, export = _refused([])
    assert "spec.tiers[1].fileSystem.volume.hostPath.path" in disk
    assert 'hostPath "/mnt/nvme/kv" is not allowed: allowedVolumes has no hostPath entry' in disk
    assert 'for namespace "default"' in disk
    assert 'NFS export "nas.example:/kv" is not allowed: allowedVolumes has no nfs entry' in export


def test_a_volume_that_is_listed_for_the_namespace_is_allowed() -> None:
    assert _refused([DISK, EXPORT]) == []


def test_an_entry_of_another_namespace_does_not_count() -> None:
    assert len(_refused([{**DISK, "namespaces": ["other"]}, EXPORT])) == 1


@pytest.mark.parametrize(
    ("path", "below"),
    [
        ("/mnt/kv", True),
        ("/mnt/kv/a", True),
        ("/mnt/kv/", True),
        ("/mnt/kvx", False),
        ("/mnt", False),
        ("/mnt/kv/../x", False),
    ],
)
def test_paths_are_compared_by_component(path: str, below: bool) -> None:
    assert is_below(path, "/mnt/kv") is below


def test_the_message_names_what_is_allowed() -> None:
    (message,) = _refused([{**DISK, "hostPath": "/mnt/other"}, EXPORT])
    assert "/mnt/other and below" in message


def test_mount_options_beyond_tuning_must_be_listed() -> None:
    option = {"spec.tiers.2.fileSystem.volume.nfs.mountOptions": ["vers=4.2", "nconnect=8"]}
    (message,) = _refused([DISK, EXPORT], option)
    assert "mountOptions[0]" in message
    assert _refused([DISK, {**EXPORT, "mountOptions": ["vers"]}], option) == []
    assert _refused([DISK, {**EXPORT, "mountOptions": ["vers=4.2"]}], option) == []
    assert len(_refused([DISK, {**EXPORT, "mountOptions": ["vers=3"]}], option)) == 1
    # What two entries allow apart is not allowed together: the API server's guard on volumes looks
    # at one entry at a time.
    both = {"spec.tiers.2.fileSystem.volume.nfs.mountOptions": ["vers=4.2", "sec=krb5p"]}
    apart = [{**EXPORT, "mountOptions": ["vers"]}, {**EXPORT, "mountOptions": ["sec=krb5p"]}]
    [message] = _refused([DISK, *apart], both)
    assert "mountOptions[1]" in message
    assert _refused([DISK, *apart, {**EXPORT, "mountOptions": ["vers", "sec=krb5p"]}], both) == []


@pytest.mark.parametrize(
    "entry",
    [
        {"namespaces": ["a"]},
        {**DISK, "nfs": EXPORT["nfs"]},
        {**DISK, "hostPath": "../x"},
        {"hostPath": "/x"},
    ],
)
def test_an_invalid_entry_is_an_error(entry: dict[str, Any]) -> None:
    with pytest.raises(InvalidDocumentError):
        validated(AllowedVolume, entry)
