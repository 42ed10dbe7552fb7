"""Stale handles (ESTALE on NFS and FUSE) of a file that another host has removed or replaced cause
a miss of that object and do not count against the tier; a stale root directory does.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierMissError, TierUnavailableError
from kvtier.testing.objects import buffer, make_object
from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.directory import TierDirectory
from kvtier.tiers.filesystem.gc import collect
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.layout import Modes
from kvtier.tiers.filesystem.maintenance import remove_oldest
from kvtier.tiers.filesystem.verify import verify
from kvtier.tiers.filesystem.walker import ObjectFile, object_path

REF, PAYLOAD, META = make_object(1)
FOR_EVER = 1_000


def open_tier(root: Path) -> FileSystemTier:
    tier = FileSystemTier(
        FileSystemTierDocument(name="disk", path=str(root), sharing="Pod"), TierLimits(1 << 30)
    )
    tier.open(lambda *_: None)
    tier.write(REF, PAYLOAD, META)
    return tier


def path_in(root: Path) -> Path:
    return Path(object_path(str(root), REF.namespace, REF.key))


def fails(
    patch: pytest.MonkeyPatch,
    path: Path,
    *calls: str,
    times: int = FOR_EVER,
    number: int = errno.ESTALE,
) -> list[str]:
    """Lets the first ``times`` of these calls on ``path`` fail; all that were made."""
    made: list[str] = []

    def replaced(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(at: Any, *arguments: Any, **named: Any) -> Any:
            if isinstance(at, (str, Path)) and str(at) == str(path):
                made.append(name)
                if len(made) <= times:
                    raise OSError(number, os.strerror(number), str(path))
            return real(at, *arguments, **named)

        return call

    for name in calls:
        patch.setattr(os, name, replaced(name))
    return made


@pytest.mark.parametrize("times", [1, FOR_EVER])
def test_a_stale_read_is_retried_by_name_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    tier = open_tier(tmp_path)
    with monkeypatch.context() as patch:
        opened = fails(patch, path_in(tmp_path), "open", times=times)
        if times == 1:
            assert tier.read(REF, buffer(PAYLOAD.nbytes)) == META
        else:
            with pytest.raises(TierMissError, match="ESTALE"):
                tier.read(REF, buffer(PAYLOAD.nbytes))
            assert not tier.contains(REF)
    assert opened == ["open", "open"]
    assert tier.read(REF, buffer(PAYLOAD.nbytes)) == META


def test_a_file_replaced_while_it_is_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)

    def gone(*_: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", gone)
        with pytest.raises(TierMissError, match="ESTALE"):
            tier.read(REF, buffer(PAYLOAD.nbytes))
    assert tier.read(REF, buffer(PAYLOAD.nbytes)) == META


def test_a_stale_handle_counts_as_absent_for_probe_and_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    with monkeypatch.context() as patch:
        fails(patch, path_in(tmp_path), "stat", "lstat", "unlink")
        assert not tier.probe(REF)
        tier.delete(REF)
    assert not tier.contains(REF)
    assert tier.probe(REF)
    assert tier.contains(REF)


def test_a_stale_root_makes_the_tier_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    with monkeypatch.context() as patch:
        fails(patch, path_in(tmp_path), "open", "stat", "lstat", "unlink")
        fails(patch, tmp_path, "stat")
        calls = (
            lambda: tier.read(REF, buffer(PAYLOAD.nbytes)),
            lambda: tier.probe(REF),
            lambda: tier.delete(REF),
        )
        for call in calls:
            with pytest.raises(TierUnavailableError, match="ESTALE"):
                call()
    assert tier.contains(REF)
    assert tier.read(REF, buffer(PAYLOAD.nbytes)) == META


def test_eviction_continues_past_a_stale_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_tier(tmp_path).close()
    index = Index(1 << 30)
    index.add(REF.namespace, REF.key, path_in(tmp_path).stat().st_size)
    with monkeypatch.context() as patch:
        fails(patch, path_in(tmp_path), "lstat", "unlink")
        directory = TierDirectory(
            tmp_path, Modes(0o640, 0o750, None), index, lambda: TierLimits(1 << 30), shared=False
        )
        assert remove_oldest(directory) == [0]
    assert not index.contains(REF.namespace, REF.key)
    assert path_in(tmp_path).exists()


def test_verify_and_gc_count_stale_files_as_vanished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_tier(tmp_path).close()
    path = path_in(tmp_path)
    found = ObjectFile(REF.namespace, REF.key, path.stat().st_size, path.stat().st_mtime)
    with monkeypatch.context() as patch:
        fails(patch, path, "open", "unlink")
        checked = verify(tmp_path, [found], delete=True)
        collected = collect(tmp_path, 4096, None, dry_run=False)
    assert (checked.vanished, checked.bad) == (1, [])
    assert collected.objects == 0
    assert verify(tmp_path, [found], delete=False).objects == 1


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT])
def test_verify_reports_a_missing_directory_as_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    open_tier(tmp_path).close()
    path = path_in(tmp_path)
    found = ObjectFile(REF.namespace, REF.key, path.stat().st_size, path.stat().st_mtime)
    with monkeypatch.context() as patch:
        fails(patch, path, "open", number=number)
        fails(patch, tmp_path, "stat", number=number)
        checked = verify(tmp_path, [found], delete=True)
    assert (checked.vanished, [(bad.path, bad.corrupt) for bad in checked.bad]) == (
        0,
        [(str(path), False)],
    )
    assert path.exists()
