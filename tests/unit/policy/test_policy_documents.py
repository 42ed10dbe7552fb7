"""Files that hold policies, and files that do not, are handled as a user would expect."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import yaml
from tests.support.policies import changed, complete_policy

from kvtier_operator.api.documents import Checked, load_policy, parse
from kvtier_operator.api.validation import InvalidDocumentError

SMALL = """
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {name: small}
spec:
  podSelector: {}
  tiers:
  - name: ram
    memory: {capacity: 1Gi}
"""


def _only(text: str | bytes) -> Checked:
    (checked,) = parse(text)
    return checked


def _message(text: str | bytes) -> str:
    return "\n".join(refusal.message for refusal in _only(text).errors)


def test_a_small_policy_is_accepted_with_all_defaults() -> None:
    policy = _only(SMALL).policy
    assert policy is not None
    spec = policy.spec
    assert (policy.namespace, spec.engine.type, spec.engine.connector, spec.engine.delivery) == (
        "default",
        "VLLM",
        "KVTier",
        "InitContainer",
    )
    assert (spec.engine.daemon, spec.engine.hash_seed, spec.engine.local_ranks) == (
        "Sidecar",
        "0",
        None,
    )
    assert (spec.tokens_per_chunk, spec.min_load_tokens, spec.selection) == (64, 512, "Cost")
    tier = spec.tiers[0]
    assert (tier.load_weight, tier.lookup_timeout_milliseconds, tier.load_timeout_seconds) == (
        100,
        50,
        5,
    )
    assert (tier.store_policy, tier.max_pending_store_bytes.size_bytes) == ("All", 1 << 30)
    assert tier.memory is not None
    assert (tier.memory.eviction_policy, tier.memory.persistence) == ("LRU", "Pod")
    assert (spec.breaker.failure_threshold, spec.breaker.period_seconds) == (5, 60)
    assert (
        spec.isolation.salt,
        spec.isolation.model_revision,
        spec.isolation.key_secret_ref.name,
        spec.isolation.encryption,
    ) == ("", "", "", "None")
    assert spec.security.storage_gid == 3000
    daemon = spec.resources.daemon
    assert (
        daemon.requests["cpu"].text,
        daemon.limits["cpu"].text,
        spec.resources.memory_policy,
    ) == (
        "1",
        "8",
        "Validate",
    )
    assert (spec.attach.mode, spec.attach.start_timeout_seconds, spec.attach.retry_seconds) == (
        "Webhook",
        120,
        600,
    )
    assert (spec.rollout.strategy, spec.monitoring.pod_monitor) == ("OnPodRestart", "Auto")


def test_a_file_tier_has_the_defaults_of_the_api() -> None:
    policy = complete_policy()
    policy["spec"]["tiers"][1] = {
        "name": "disk",
        "fileSystem": {
            "capacity": "1Gi",
            "sharing": "Node",
            "volume": {"hostPath": {"path": "/kv"}},
        },
    }
    tier = load_policy(json.dumps(policy)).spec.tier("disk")
    files = tier.file_system
    assert files is not None
    assert (files.high_watermark_percent, files.low_watermark_percent, files.retention_seconds) == (
        90,
        75,
        604_800,
    )
    assert (files.direct_io, files.sync, files.read_threads, files.write_threads) == (
        "Auto",
        "None",
        8,
        4,
    )
    assert files.volume.host_path is not None
    assert files.volume.host_path.type == "Directory"


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "---\n", "---\n---\n", b""])
def test_an_empty_file_is_rejected(text: str) -> None:
    assert "the file is empty; must have apiVersion kvtier.io/v1alpha1" in _message(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [1, 2", "line 1"),
        ("a:\n\tb: 1", "line 2, column 1"),
        ("%nonsense", "YAML or JSON"),
        ('{"a": 1,,}', "YAML or JSON"),
        (b"\xff\xfe\x00", "UTF-8"),
        ("a: !!python/object/apply:os.system [id]", "YAML or JSON"),
        ("a: *missing", "line 1"),
    ],
)
def test_a_file_that_is_not_yaml_is_an_error_with_the_position(
    text: str | bytes, part: str
) -> None:
    assert part in _message(text)


@pytest.mark.parametrize("text", ["just text", "- a\n- b", "42", "[]"])
def test_a_document_that_is_not_a_mapping_is_an_error(text: str) -> None:
    assert "a mapping" in _message(text)


def test_a_duplicate_key_is_rejected_with_key_and_position() -> None:
    assert "the key 'spec' is defined more than once" in _message(SMALL + "spec: {}\n")
    assert "line 10" in _message(SMALL + "spec: {}\n")


def test_a_nested_duplicate_key_is_rejected() -> None:
    assert "'capacity' is defined more than once" in _message(
        SMALL.replace("capacity: 1Gi", "capacity: 1Gi, capacity: 2Gi")
    )


def test_a_duplicate_key_in_json_is_rejected() -> None:
    assert "'kind' is defined more than once" in _message(
        '{"kind": "KVTierPolicy", "kind": "KVTierPolicy"}'
    )


def test_a_key_that_is_not_text_is_an_error() -> None:
    assert "True is not text" in _message(SMALL + "yes: 1\n")


def test_json_is_read_with_tabs_and_a_byte_order_mark() -> None:
    text = "\ufeff" + json.dumps(complete_policy(), indent="\t")
    assert _only(text.encode()).policy is not None


def test_a_date_stays_text() -> None:
    policy = load_policy(
        SMALL.replace("podSelector: {}", "podSelector: {matchLabels: {released: 2024-01-01}}")
    )
    assert policy.spec.pod_selector.match_labels == {"released": "2024-01-01"}


def test_an_unknown_field_is_named_with_the_nearest_known_one() -> None:
    message = _message(SMALL.replace("capacity:", "capasity:"))
    assert "spec.tiers[0].memory.capasity: Forbidden: unknown field" in message
    assert 'did you mean "capacity"?' in message


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("min_load_tokens", "minLoadTokens"),
        ("minloadtokens", "minLoadTokens"),
        ("chunkToken", "chunkTokens"),
        ("selektion", "selection"),
    ],
)
def test_the_nearest_field_is_found_across_spelling_and_case(written: str, meant: str) -> None:
    message = _message(json.dumps(changed(complete_policy(), {f"spec.{written}": 1})))
    assert f"spec.{written}: Forbidden: unknown field" in message
    assert f'did you mean "{meant}"?' in message


def test_an_unknown_field_that_resembles_none_is_named_with_all_known_ones() -> None:
    message = _message(json.dumps(changed(complete_policy(), {"spec.breaker.zzz": 1})))
    assert "failureThreshold, periodSeconds" in message


def test_an_unknown_field_is_rejected_even_if_it_is_null() -> None:
    assert "spec.zzz: Forbidden: unknown field" in _message(
        json.dumps(changed(complete_policy(), {"spec.zzz": None}))
    )


def test_null_is_the_same_as_absent() -> None:
    with_null = load_policy(
        json.dumps(changed(complete_policy(), {"spec.engine": None, "spec.chunkTokens": None}))
    )
    assert with_null.spec.tokens_per_chunk == 64
    assert "engine" not in with_null.spec.model_fields_set


def test_all_errors_are_reported_together() -> None:
    wrong = changed(
        complete_policy(), {"spec.chunkTokens": 7, "spec.tiers.1.loadWeight": 0, "spec.zzz": 1}
    )
    assert {refusal.field for refusal in _only(json.dumps(wrong)).errors} == {
        "spec.chunkTokens",
        "spec.tiers[1].loadWeight",
        "spec.zzz",
    }


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"apiVersion": "kvtier.io/v1"}, "apiVersion"),
        ({"kind": "Policy"}, "kind"),
        ({"kind": 7}, "kind"),
    ],
)
def test_an_unsupported_kind_or_version_is_the_only_error(
    changes: dict[str, Any], field: str
) -> None:
    refusals = _only(json.dumps(changed(complete_policy(), {**changes, "spec.zzz": 1}))).errors
    assert [refusal.field for refusal in refusals] == [field]


def test_a_missing_kind_is_named() -> None:
    assert 'kind: Required value: must be "KVTierPolicy"' in _message(
        "apiVersion: kvtier.io/v1alpha1"
    )


def test_several_documents_are_each_reported_with_their_index() -> None:
    bad = SMALL.replace("1Gi", "none")
    checked = parse(f"---\n{SMALL}---\n{bad}---\n{SMALL}---\n")
    assert [entry.where for entry in checked] == ["document 0", "document 1", "document 2"]
    assert [entry.policy is not None for entry in checked] == [True, False, True]


def test_lists_as_kubectl_prints_them_are_read_item_by_item() -> None:
    items = [complete_policy(), {"apiVersion": "v1", "kind": "Pod"}]
    checked = parse(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    assert [(entry.where, entry.policy is not None) for entry in checked] == [
        ("item 0", True),
        ("item 1", False),
    ]
    own_kind = parse(
        json.dumps(
            {"apiVersion": "kvtier.io/v1alpha1", "kind": "KVTierPolicyList", "items": items[:1]}
        )
    )
    assert own_kind[0].policy is not None


@pytest.mark.parametrize("items", [[], None, {}])
def test_a_list_without_items_is_rejected(items: object) -> None:
    message = _message(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    assert "a list of at least one policy" in message


def test_fields_added_by_the_api_server_are_accepted() -> None:
    policy = complete_policy()
    policy["metadata"] |= {
        "uid": "u",
        "generation": 3,
        "resourceVersion": "9",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{"manager": "kubectl"}],
        "annotations": {"a": "b"},
    }
    policy["status"] = {"observedGeneration": 3, "laterField": True, "conditions": []}
    assert load_policy(yaml.safe_dump(policy)).metadata.generation == 3


def test_load_policy_needs_exactly_one_policy() -> None:
    with pytest.raises(InvalidDocumentError, match="2 policies"):
        load_policy(f"{SMALL}---\n{SMALL}")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        "{a: " * 20_000,
        "- " * 20_000,
        '{"a":' * 5_000 + "1" + "}" * 5_000,
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n"
            for i in range(12)
        ),
        "a: &a {x: 1}\n"
        + "".join(
            f"b{i}: &b{i} {{<<: [{','.join(['*a' if i == 0 else f'*b{i - 1}'] * 9)}]}}\n"
            for i in range(12)
        ),
        "x" * ((1 << 20) + 1),
    ],
    ids=["flow lists", "flow mappings", "block lists", "json", "aliases", "merges", "long"],
)
def test_a_small_file_cannot_expand_into_a_large_one(text: str) -> None:
    started = time.process_time()
    assert _only(text).policy is None
    assert time.process_time() - started < 30


def test_a_long_value_is_cut_in_messages() -> None:
    refusal = _only(json.dumps(changed(complete_policy(), {"spec.selection": "x" * 5000}))).errors[
        0
    ]
    assert len(refusal.value) <= 80


@pytest.mark.parametrize(
    ("connector", "given", "expected"),
    [
        ("KVTier", None, 64),
        ("Offloading", None, 256),
        ("LMCache", None, 256),
        ("Offloading", 64, 64),
        ("KVTier", 256, 256),
    ],
)
def test_the_default_chunk_depends_on_the_connector(
    connector: str, given: int | None, expected: int
) -> None:
    document = {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": "chat"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "chat"}},
            "engine": {"connector": connector},
            "tiers": [{"name": "ram", "memory": {"capacity": "8Gi"}}],
        },
    }
    if given is not None:
        document["spec"]["chunkTokens"] = given  # type: ignore[index]
    assert load_policy(json.dumps(document)).spec.tokens_per_chunk == expected
