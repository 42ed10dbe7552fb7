"""What a step sends to the processes of the ranks: few bytes, few objects, and nothing is lost."""

from __future__ import annotations

import pickle
import pickletools
import random
from typing import Any

import pytest
from tests.unit.scheduler.scheduler_testbed import BLOCK, CHUNK, SchedulerTestbed

from kvtier.engines.common.jobs import ArrivedKeys, BlockRun, LoadJob, LoadRuns, StoreJob
from kvtier.engines.vllm.metadata import StepMetadata
from kvtier.tiers.base import ALIGNMENT_BYTES

BLOCKS = 4
"""Of 16 tokens in a chunk of 64."""
BYTES_PER_KEY = 8 + 4 * BLOCKS + 2
STEP_BYTES = 400
"""Names of classes and fields, and what there is once in a job."""


def _load(chunks: int, groups: int = 1, number: int = 7) -> LoadJob:
    """Chunks of several groups, each with as many blocks; the first chunk begins inside."""
    source = random.Random(chunks)
    runs = []
    for chunk in range(chunks):
        for group in range(groups):
            first = 1 if chunk == 0 else 0
            blocks = [source.randrange(1, 1 << 20) for _ in range(BLOCKS - first)]
            runs.append(BlockRun(group, first, tuple(blocks)))
    keys = len(runs)
    slots = tuple(source.randrange(1 << 30) * ALIGNMENT_BYTES for _ in range(keys))
    generations = tuple(2 * source.randrange(1, 1 << 31) for _ in range(keys))
    return LoadJob(number, "request", LoadRuns.of(runs), 5.0, 3, slots, generations)


def _stores(chunks: int) -> list[StoreJob]:
    return [
        StoreJob(
            chunk,
            ALIGNMENT_BYTES * chunk,
            3,
            BlockRun(0, 0, tuple(range(4 * chunk, 4 * chunk + 4))),
        )
        for chunk in range(chunks)
    ]


def _sent(metadata: StepMetadata) -> bytes:
    return pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL)


def _objects(content: bytes) -> int:
    return sum(code.name != "FRAME" for code, _, _ in pickletools.genops(content))


def _plain(metadata: StepMetadata) -> dict[str, Any]:
    return {name: getattr(metadata, name) for name in metadata.__dataclass_fields__}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("chunks", [64, 1024])
def test_a_load_takes_few_bytes_for_a_key(chunks: int, groups: int) -> None:
    metadata = StepMetadata(step=5, loads=[_load(chunks, groups)], idle=True)
    assert len(_sent(metadata)) <= BYTES_PER_KEY * chunks * groups + STEP_BYTES
    again = pickle.loads(_sent(metadata))
    assert _plain(again) == _plain(metadata)


def test_the_number_of_objects_does_not_grow_with_the_chunks() -> None:
    def step(chunks: int) -> StepMetadata:
        keys = _load(chunks)
        arrived = (ArrivedKeys(7, keys.slots, keys.generations, last=True),)
        return StepMetadata(
            step=5, loads=[keys], stores=_stores(chunks), arrived_keys=arrived, identity=2
        )

    few, many = step(16), step(1024)
    assert _objects(_sent(few)) == _objects(_sent(many))
    for each in (few, many):
        assert _plain(pickle.loads(_sent(each))) == _plain(each)


def test_a_step_without_jobs_sends_only_what_differs_from_the_default() -> None:
    assert len(_sent(StepMetadata(step=1000, idle=True))) <= 100
    assert _plain(pickle.loads(_sent(StepMetadata()))) == _plain(StepMetadata())


@pytest.mark.parametrize("slot", [-1, ALIGNMENT_BYTES + 1, 1 << 62, 1 << 70])
@pytest.mark.parametrize("generation", [-2, 2, 1 << 32, 1 << 70])
def test_numbers_that_do_not_fit_arrive_as_they_are(slot: int, generation: int) -> None:
    """The rank rejects such a job. Neither side of the engine may end for it."""
    run = BlockRun(0, 0, (1, 2, 3, -4, 1 << 40))
    metadata = StepMetadata(
        step=1,
        loads=[LoadJob(7, "r", (run, run), 5.0, 3, (slot, 0), (generation, 2))],
        stores=[StoreJob(1 << 70, slot, 3, run)],
        arrived_keys=(ArrivedKeys(7, (slot, 0), (generation,), last=False),),
    )
    again = pickle.loads(_sent(metadata))
    assert _plain(again) == _plain(metadata)


def test_runs_are_a_sequence() -> None:
    runs = [BlockRun(0, 1, (5, 6)), BlockRun(1, 0, ()), BlockRun(0, 0, (7,))]
    made = LoadRuns.of(runs)
    assert list(made) == runs
    assert (made[-1], made[1:], made[:0], len(made)) == (runs[2], tuple(runs[1:]), (), 3)
    assert made == tuple(runs)
    assert made != tuple(runs[:2])
    with pytest.raises(IndexError):
        made[3]
    assert LoadRuns.of(made) is made


def test_the_step_of_a_request_sends_few_bytes(testbed: SchedulerTestbed) -> None:
    chunks = 100
    request = testbed.request(chunks * CHUNK + 50)
    testbed.hold(request.keys(0, chunks))
    testbed.admit(request, 0, testbed.ask(request, 0) or 0)
    step = testbed.build()
    assert [len(job.slots) for job in step.loads] == [chunks]
    assert len(_sent(step)) <= (8 + 4 * CHUNK // BLOCK) * chunks + STEP_BYTES
    assert len(_sent(testbed.build())) <= STEP_BYTES / 2
