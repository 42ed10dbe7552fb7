"""The topology directory is read with limits. Live values are validated one by one."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.policies import complete_policy

from kvtier.config import writer
from kvtier.config.loader import (
    LIVE_FILE,
    MAX_DOCUMENT_BYTES,
    STRUCTURAL_FILE,
    load,
    load_live,
    load_structural,
    load_with_rejections,
    merge_live,
    read_bounded,
)
from kvtier.config.models import Live, Structural, Topology
from kvtier.errors import ConfigurationError
from kvtier_operator.api.documents import load_policy
from kvtier_operator.render.documents import pod_placement, structural

POLICY = load_policy(json.dumps(complete_policy()))
STRUCTURAL: Structural = structural(POLICY, pod_placement(POLICY))
BEFORE: Live = STRUCTURAL.live


def _merged(document: Any) -> tuple[Live, dict[str, str]]:
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    live, refusals = merge_live(content, BEFORE, STRUCTURAL)
    return live, {rejected.field: rejected.requirement for rejected in refusals}


class TestMerging:
    def test_every_valid_value_is_accepted(self) -> None:
        after, refusals = _merged(
            {
                "generation": 3,
                "selection": "Weighted",
                "minLoadTokens": 1,
                "minStoreTokens": 2,
                "breaker": {"failureThreshold": 2, "periodSeconds": 9},
                "tiers": {
                    "nvme": {
                        "loadWeight": 7,
                        "lookupTimeoutMilliseconds": 8,
                        "loadTimeoutSeconds": 9,
                        "storePolicy": "None",
                        "maxPendingStoreBytes": 0,
                        "maxWriteBytesPerSecond": 5,
                        "capacityBytes": 10,
                        "highWatermarkPercent": 60,
                        "lowWatermarkPercent": 50,
                        "retentionSeconds": 0,
                        "syncData": True,
                        "minFreeBytes": 11,
                        "minFreePercent": 12,
                        "volumeCapacityBytes": {"nvme0": 13},
                    }
                },
            }
        )
        assert refusals == {}
        assert (after.generation, after.selection, after.min_load_tokens) == (3, "Weighted", 1)
        assert after.min_store_tokens == 2
        assert (after.breaker.failure_threshold, after.breaker.period_seconds) == (2, 9)
        assert after.tiers["nvme"].model_dump(mode="json") == {
            "load_weight": 7,
            "lookup_timeout_milliseconds": 8,
            "load_timeout_seconds": 9,
            "store_policy": "None",
            "max_pending_store_bytes": 0,
            "max_write_bytes_per_second": 5,
            "capacity_bytes": 10,
            "high_watermark_percent": 60,
            "low_watermark_percent": 50,
            "retention_seconds": 0,
            "sync_data": True,
            "min_free_bytes": 11,
            "min_free_percent": 12,
            "volume_capacity_bytes": {"nvme0": 13},
        }
        assert after.tiers["shared"] == BEFORE.tiers["shared"]

    def test_an_absent_field_keeps_its_value(self) -> None:
        after, refusals = _merged({"tiers": {"nvme": {"loadWeight": 7}}})
        assert refusals == {}
        assert after.tiers["nvme"] == BEFORE.tiers["nvme"].model_copy(update={"load_weight": 7})
        assert after.model_copy(update={"tiers": BEFORE.tiers}) == BEFORE

    def test_an_unknown_tier_is_ignored(self) -> None:
        assert _merged({"tiers": {"later": {"anything": []}}}) == (BEFORE, {})

    def test_an_invalid_value_does_not_affect_the_others(self) -> None:
        after, refusals = _merged(
            {
                "selection": "Cheapest",
                "minLoadTokens": 8,
                "tiers": {"nvme": {"loadWeight": 0, "loadTimeoutSeconds": 9}},
            }
        )
        assert set(refusals) == {"selection", "tiers.nvme.loadWeight"}
        assert (after.selection, after.min_load_tokens) == (BEFORE.selection, 8)
        assert (after.tiers["nvme"].load_weight, after.tiers["nvme"].load_timeout_seconds) == (
            100,
            9,
        )

    @pytest.mark.parametrize("value", ["100", 100.0, True, None, [], {}, 10_001, -1, 10**30])
    def test_only_exactly_the_type_and_range_is_taken(self, value: Any) -> None:
        after, refusals = _merged({"tiers": {"nvme": {"loadWeight": value}}})
        assert (after, set(refusals)) == (BEFORE, {"tiers.nvme.loadWeight"})

    @pytest.mark.parametrize("number", [10**30, 10**400, 10**4000], ids=["30", "400", "4000"])
    def test_a_number_out_of_range_for_clock_or_wire_is_rejected(self, number: int) -> None:
        after, refusals = _merged(
            {
                "generation": number,
                "minLoadTokens": number,
                "breaker": {"failureThreshold": number, "periodSeconds": number},
                "tiers": {
                    "nvme": {
                        "maxPendingStoreBytes": number,
                        "maxWriteBytesPerSecond": number,
                        "capacityBytes": number,
                        "retentionSeconds": number,
                    }
                },
            }
        )
        assert after == BEFORE
        assert len(refusals) == 8

    def test_a_value_of_a_newer_version_is_rejected_and_the_others_apply(self) -> None:
        after, refusals = _merged(
            {
                "prefetch": 1,
                "breaker": {"jitter": 1, "periodSeconds": 9},
                "tiers": {"nvme": {"ttl": 1}},
            }
        )
        assert set(refusals) == {"prefetch", "breaker.jitter", "tiers.nvme.ttl"}
        assert after.breaker.period_seconds == 9

    @pytest.mark.parametrize(
        ("fields", "kept"),
        [
            ({"lowWatermarkPercent": 90}, (90, 75)),
            ({"lowWatermarkPercent": 99, "highWatermarkPercent": 80}, (90, 75)),
            ({"highWatermarkPercent": 75}, (90, 75)),
            ({"lowWatermarkPercent": 80, "highWatermarkPercent": "x"}, (90, 80)),
            ({"lowWatermarkPercent": 20, "highWatermarkPercent": 30}, (30, 20)),
        ],
        ids=str,
    )
    def test_watermarks_stay_in_order(self, fields: dict[str, Any], kept: tuple[int, int]) -> None:
        tier = _merged({"tiers": {"nvme": fields}})[0].tiers["nvme"]
        assert (tier.high_watermark_percent, tier.low_watermark_percent) == kept

    def test_the_capacity_of_memory_is_not_live(self) -> None:
        after, refusals = _merged({"tiers": {"ram": {"capacityBytes": 1, "loadWeight": 7}}})
        assert (after.tiers["ram"].capacity_bytes, after.tiers["ram"].load_weight) == (None, 7)
        assert set(refusals) == {"tiers.ram.capacityBytes"}

    def test_the_capacity_of_a_file_tier_cannot_be_removed(self) -> None:
        after, refusals = _merged({"tiers": {"nvme": {"capacityBytes": None}}})
        assert (after, set(refusals)) == (BEFORE, {"tiers.nvme.capacityBytes"})

    @pytest.mark.parametrize(
        ("document", "field"),
        [
            (b"", "live.json"),
            (b"{", "live.json"),
            (b"[]", "live.json"),
            (b"\xff", "live.json"),
            (b'{"generation": NaN}', "live.json"),
            (b'{"generation": 1, "generation": 2}', "live.json"),
            (b'{"a":' * 100_000, "live.json"),
            ({"tiers": []}, "tiers"),
            ({"tiers": {"nvme": 1}}, "tiers.nvme"),
            ({"breaker": 1}, "breaker"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_an_invalid_document_changes_nothing(self, document: Any, field: str) -> None:
        after, refusals = _merged(document)
        assert (after, set(refusals)) == (BEFORE, {field})

    def test_every_value_that_a_policy_accepts_is_a_valid_live_value(self) -> None:
        document = BEFORE.model_dump_json(by_alias=True).encode()
        assert _merged(document) == (BEFORE, {})

    @settings(max_examples=60, deadline=None)
    @given(
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False)
            | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        [*Live.model_fields, "tiers", "nvme", "ram", "loadWeight", "capacityBytes"]
                    ),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        )
    )
    def test_no_document_breaks_the_current_values(self, document: Any) -> None:
        after, _ = _merged(document)
        assert Live.model_validate_json(after.model_dump_json(by_alias=True)) == after
        assert set(after.tiers) == set(BEFORE.tiers)


class TestReading:
    def test_without_live_values_the_embedded_ones_hold(self, tmp_path: Path) -> None:
        writer.write(tmp_path, Topology(structural=STRUCTURAL, live=BEFORE))
        (tmp_path / LIVE_FILE).unlink()
        assert load_with_rejections(tmp_path) == (Topology(structural=STRUCTURAL, live=BEFORE), [])

    def test_live_values_are_laid_over_the_embedded_ones(self, tmp_path: Path) -> None:
        writer.write(tmp_path, Topology(structural=STRUCTURAL, live=BEFORE))
        (tmp_path / LIVE_FILE).write_text('{"minLoadTokens": 7, "selection": 1}')
        topology, refusals = load_with_rejections(tmp_path)
        assert topology.live == BEFORE.model_copy(update={"min_load_tokens": 7})
        assert [refusal.field for refusal in refusals] == ["selection"]

    def test_rejected_values_are_logged(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer.write(tmp_path, Topology(structural=STRUCTURAL, live=BEFORE))
        (tmp_path / LIVE_FILE).write_text('{"selection": 1}')
        load(tmp_path)
        assert "selection: Invalid value: 1: must be" in caplog.text

    def test_a_removed_file_keeps_the_current_values(self, tmp_path: Path) -> None:
        assert load_live(tmp_path / "none.json", BEFORE, STRUCTURAL) == (BEFORE, [])

    def test_a_directory_in_place_of_the_file_is_rejected(self, tmp_path: Path) -> None:
        live, refusals = load_live(tmp_path, BEFORE, STRUCTURAL)
        assert live == BEFORE
        assert "not a regular file" in str(refusals[0])

    def test_a_pipe_without_a_writer_does_not_hang(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OSError, match="not a regular file"):
            read_bounded(tmp_path / "pipe")

    def test_a_file_above_the_size_limit_is_rejected(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_bytes(b"x" * MAX_DOCUMENT_BYTES)
        assert len(read_bounded(file)) == MAX_DOCUMENT_BYTES
        file.write_bytes(b"x" * (MAX_DOCUMENT_BYTES + 1))
        with pytest.raises(OSError, match="longer than"):
            read_bounded(file)

    def test_a_hung_mount_ends_in_an_error_at_the_deadline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        release = threading.Event()

        def hang(path: Path, limit: int) -> bytes:
            release.wait(60)
            return b""

        monkeypatch.setattr("kvtier.config.loader._read", hang)
        with pytest.raises(TimeoutError):
            read_bounded(tmp_path / "file", deadline_seconds=0.05)
        live, refusals = load_live(tmp_path / "file", BEFORE, STRUCTURAL, deadline_seconds=0.05)
        release.set()
        assert live == BEFORE
        assert "not read within" in str(refusals[0])

    def test_a_swapped_link_is_followed(self, tmp_path: Path) -> None:
        # As the kubelet replaces a ConfigMap: live.json -> ..data/live.json, ..data -> another
        # directory.
        for name, tokens in (("first", 1), ("second", 2)):
            (tmp_path / name).mkdir()
            (tmp_path / name / LIVE_FILE).write_text(json.dumps({"minLoadTokens": tokens}))
        (tmp_path / "..data").symlink_to("first")
        (tmp_path / LIVE_FILE).symlink_to("..data/live.json")
        before, _ = load_live(tmp_path / LIVE_FILE, BEFORE, STRUCTURAL)
        (tmp_path / "next").symlink_to("second")
        (tmp_path / "next").rename(tmp_path / "..data")
        after, _ = load_live(tmp_path / LIVE_FILE, before, STRUCTURAL)
        assert (before.min_load_tokens, after.min_load_tokens) == (1, 2)


class TestStructural:
    def _changed(self, tmp_path: Path, change: Any) -> Path:
        document = STRUCTURAL.model_dump(mode="json", by_alias=True)
        change(document)
        (tmp_path / STRUCTURAL_FILE).write_text(json.dumps(document))
        return tmp_path / STRUCTURAL_FILE

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            (
                lambda document: document.update(schemaVersion=2),
                "schemaVersion: Invalid value: 2: must be 1",
            ),
            (lambda document: document.pop("schemaVersion"), "schemaVersion: Invalid value: None"),
            (lambda document: document.update(unknown=1), "unknown"),
            (lambda document: document.update(chunkTokens=0), "chunkTokens"),
            (lambda document: document["tiers"].reverse(), "only memory tier"),
            (
                lambda document: document["tiers"].append(document["tiers"][0]),
                "must have unique names",
            ),
            (lambda document: document["tiers"][1].update(path="kv"), "tiers.nvme.path"),
            (lambda document: document["tiers"][1].update(path="/kv/../x"), "tiers.nvme.path"),
            (lambda document: document.update(runDirectory="run"), "runDirectory"),
            (lambda document: document["live"]["tiers"].pop("nvme"), "values for nvme"),
            (
                lambda document: document["live"]["tiers"]["nvme"].pop("capacityBytes"),
                "must be set for a fileSystem tier",
            ),
            (
                lambda document: document["live"]["tiers"]["nvme"].update(lowWatermarkPercent=99),
                "below highWatermarkPercent",
            ),
        ],
    )
    def test_an_invalid_document_is_rejected_with_field_and_file(
        self, tmp_path: Path, change: Any, part: str
    ) -> None:
        path = self._changed(tmp_path, change)
        with pytest.raises(ConfigurationError) as caught:
            load_structural(path)
        assert part in str(caught.value)
        assert STRUCTURAL_FILE in str(caught.value)

    def test_a_missing_directory_is_a_configuration_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="No such file"):
            load(tmp_path / "none")

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff"])
    def test_invalid_json_is_a_configuration_error(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / STRUCTURAL_FILE).write_bytes(content)
        with pytest.raises(ConfigurationError):
            load(tmp_path)
