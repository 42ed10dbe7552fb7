"""Engines share objects exactly if they have the same weights, to the last bit."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.config.models import Daemon
from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import (
    CHUNK_TOKENS,
    EngineOptions,
    EngineTestbed,
    running_reference,
)
from kvtier.harness.tiny_model import prompt

CHUNKS = 6
PROJECTION = "model.layers.0.self_attn.k_proj.weight"
"""The CPU engine packs it, so that it is no parameter of the loaded model."""
TOKENS = prompt(CHUNKS * CHUNK_TOKENS + 5, 900)


def _negate(values: np.ndarray) -> None:
    values *= -1


def _flip_one_bit(values: np.ndarray) -> None:
    values.view("<u4")[0] ^= 1


def _edited(model: Path, directory: Path, edit: Callable[[np.ndarray], None]) -> Path:
    """Returns a copy of ``model`` with one changed projection: same name, size and shape."""
    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    begin, end = json.loads(content[8:start])[PROJECTION]["data_offsets"]
    values = np.frombuffer(content[start + begin : start + end], dtype="<f4").copy()
    edit(values)
    content[start + begin : start + end] = values.tobytes()
    file.write_bytes(content)
    return directory


@pytest.fixture(scope="module")
def negated(model: Path, scratch: Path) -> Path:
    return _edited(model, scratch / "negated", _negate)


@pytest.fixture(scope="module")
def plain_negated(negated: Path, payload: Path, scratch: Path) -> Iterator[ReferenceEngine]:
    with running_reference(negated, payload, scratch / "plain-negated.log") as engine:
        yield engine


@pytest.fixture(scope="module")
def case(model: Path, payload: Path, scratch: Path) -> Iterator[EngineTestbed]:
    case = EngineTestbed(scratch / "weights", model, payload, EngineOptions(daemon=Daemon.SIDECAR))
    try:
        case.start_daemon()
        yield case
    finally:
        case.close()


def test_only_engines_with_the_same_weights_share(
    case: EngineTestbed,
    model: Path,
    negated: Path,
    scratch: Path,
    plain: ReferenceEngine,
    plain_negated: ReferenceEngine,
) -> None:
    """One scenario in order, because each start of an engine takes long."""
    namespaces = []

    def start(directory: Path) -> str:
        if case.engine is not None:
            case.engine.kill()
        case.start(model=str(directory))
        case.wait_attached()
        namespaces.append(case.drive("connector")["namespace"])
        return str(namespaces[-1])

    original, changed = plain.tokens(TOKENS), plain_negated.tokens(TOKENS)
    assert original != changed
    start(model)
    assert case.requests().run(TOKENS) == original
    case.settle_stores()
    assert (case.files_root / namespaces[0]).is_dir(), "an unpinned local model persists"

    for directory in (negated, _edited(model, scratch / "one-bit", _flip_one_bit)):
        start(directory)
        with case.loads() as loads:
            answer = case.requests().run(TOKENS)
        assert loads.tokens == 0
        assert answer == (changed if directory is negated else original)
        case.settle_stores()
    assert len(set(namespaces)) == 3

    # The same weights in another directory: everything is shared.
    copy = shutil.copytree(model, scratch / "copy")
    (copy / "generation_config.json").write_text("{}")
    (copy / "preprocessor_config.json").write_text('{"image_mean": [0.1]}')
    assert start(copy) == namespaces[0]
    with case.loads() as loads:
        assert case.requests().run(TOKENS) == original
    assert loads.tokens == CHUNKS * CHUNK_TOKENS
    assert start(negated) == namespaces[1]
    with case.loads() as loads:
        assert case.requests().run(TOKENS) == changed
    assert loads.tokens == CHUNKS * CHUNK_TOKENS
