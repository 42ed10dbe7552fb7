"""Whom a new tierd waits for."""

from __future__ import annotations

from pathlib import Path

from kvtier.processes import Liveness, ProcessIdentity
from kvtier.tierd.fencing import (
    UNVERIFIABLE_TIMEOUT_SECONDS,
    AttachedWorker,
    SessionFiles,
    StartupFence,
)

FAR = ProcessIdentity(7, 70, "elsewhere")
NEAR = ProcessIdentity(8, 80, "here")


class Fates:
    def __init__(self) -> None:
        self.gone: set[ProcessIdentity] = set()

    def __call__(self, process: ProcessIdentity) -> Liveness:
        if process in self.gone:
            return Liveness.GONE
        return Liveness.ALIVE if process.pid_namespace == "here" else Liveness.UNKNOWN


def worker(
    process: ProcessIdentity, epoch: int = 3, engine: str = "e", rank: int = 0
) -> AttachedWorker:
    return AttachedWorker(engine, rank, epoch, process)


def make(directory: Path, *workers: AttachedWorker) -> tuple[StartupFence, SessionFiles, Fates]:
    files, fates = SessionFiles(directory, 0o600), Fates()
    for each in workers:
        files.add(each)
    return StartupFence(files, 100.0, fates), files, fates


def test_without_predecessors_there_is_no_fence(tmp_path: Path) -> None:
    assert not make(tmp_path)[0].is_active


def test_the_next_process_reads_what_was_written(tmp_path: Path) -> None:
    fence, _, _ = make(tmp_path, worker(NEAR), worker(FAR, epoch=4, rank=1))
    assert set(fence.waiting) == {worker(NEAR), worker(FAR, epoch=4, rank=1)}


def test_the_fence_opens_when_each_worker_has_drained_its_epoch(tmp_path: Path) -> None:
    fence, files, _ = make(tmp_path, worker(NEAR), worker(FAR, epoch=5))
    fence.worker_attached(worker(NEAR), 2)
    assert len(fence.waiting) == 2
    fence.worker_attached(worker(NEAR), 3)
    assert fence.waiting == [worker(FAR, epoch=5)]
    fence.worker_attached(worker(FAR), 9)
    assert not fence.is_active
    assert files.read() == []


def test_a_report_of_another_process_or_rank_does_not_count(tmp_path: Path) -> None:
    fence, _, _ = make(tmp_path, worker(NEAR))
    fence.worker_attached(worker(ProcessIdentity(8, 81, "here")), 9)
    fence.worker_attached(worker(NEAR, rank=1), 9)
    fence.worker_attached(worker(NEAR, engine="f"), 9)
    assert fence.is_active


def test_an_exited_process_is_not_waited_for(tmp_path: Path) -> None:
    fence, files, fates = make(tmp_path, worker(NEAR))
    fence.check(100.0)
    assert fence.is_active
    fates.gone.add(NEAR)
    fence.check(100.5)
    assert not fence.is_active
    assert files.read() == []


def test_an_invisible_process_is_waited_for_a_minute_and_a_living_one_without_limit(
    tmp_path: Path,
) -> None:
    fence, _, _ = make(tmp_path, worker(NEAR), worker(FAR))
    fence.check(100.0 + UNVERIFIABLE_TIMEOUT_SECONDS - 0.1)
    assert len(fence.waiting) == 2
    fence.check(100.0 + UNVERIFIABLE_TIMEOUT_SECONDS)
    assert fence.waiting == [worker(NEAR)]
    fence.check(1e9)
    assert fence.is_active


def test_an_unreadable_file_counts_as_an_invisible_worker(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    fence, _, _ = make(tmp_path)
    fence.check(100.0)
    assert fence.is_active
    fence.check(100.0 + UNVERIFIABLE_TIMEOUT_SECONDS)
    assert not fence.is_active
