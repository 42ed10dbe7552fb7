"""The payload registers itself with an ATOM whose command line has not been changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.atom_tiers import topology

from kvtier import payload
from kvtier.config.models import Topology
from kvtier.config.writer import write

CONFIG = """
import json
from dataclasses import dataclass, field

@dataclass
class Config:
    model: str
    kv_transfer_config: dict = field(default_factory=dict)
    tensor_parallel_size: int = 1

    def __post_init__(self):
        if isinstance(self.kv_transfer_config, str):
            self.kv_transfer_config = json.loads(self.kv_transfer_config)
"""
FACTORY = """
class KVConnectorFactory:
    known = {}

    @classmethod
    def register(cls, name, *, worker_module, worker_class, scheduler_module, scheduler_class,
                 aliases=(), requires_pd_staging=True):
        cls.known[name] = (worker_module, worker_class, scheduler_class, requires_pd_staging)
"""
PROGRAM = """
import json, sys
from atom.config import Config
from atom.kv_transfer.disaggregation.factory import KVConnectorFactory
given = json.loads(sys.argv[1])
config = Config("model", **given)
print(json.dumps([config.kv_transfer_config, KVConnectorFactory.known]))
"""


@pytest.fixture(scope="module")
def payload_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return payload.write(tmp_path_factory.mktemp("payload"))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """ATOM's two modules, and a sitecustomize of the image's own."""
    package = tmp_path / "image" / "atom"
    disaggregation = package / "kv_transfer" / "disaggregation"
    disaggregation.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kv_transfer" / "__init__.py").write_text("")
    (disaggregation / "__init__.py").write_text("")
    (package / "config.py").write_text(CONFIG)
    (disaggregation / "factory.py").write_text(FACTORY)
    (tmp_path / "image" / "sitecustomize.py").write_text(
        "import sys; print('the image', file=sys.stderr)\n"
    )
    return tmp_path / "image"


def run(
    payload_directory: Path, image: Path, given: dict[str, object], **variables: str
) -> tuple[object, dict[str, object], str]:
    path = [payload_directory / payload.ATOM_DIRECTORY, payload_directory, image]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")},
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(given)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    config, known = json.loads(done.stdout.splitlines()[-1])
    return config, known, done.stderr


def directory_of(tmp_path: Path, engine_type: str = "ATOM") -> str:
    document = topology(512)
    structural = document.structural.model_copy(update={"engine_type": engine_type})
    target = tmp_path / "topology"
    write(target, Topology(structural=structural, live=document.live))
    return str(target)


def test_the_connector_is_registered_and_configured(
    payload_directory: Path, image: Path, tmp_path: Path
) -> None:
    directory = directory_of(tmp_path)
    config, known, errors = run(payload_directory, image, {}, KVTIER_TOPOLOGY=directory)
    assert isinstance(config, dict)
    assert config.pop("engine_id")
    assert config == {"kv_connector": "kvtier", "kv_role": "offload", "topology": directory}
    module = "kvtier.engines.atom.connector"
    classes = ["KVTierOffloadConnector", "KVTierOffloadScheduler"]
    assert known["kvtier"] == [module, *classes, False]
    assert "the image" in errors, "the image's own sitecustomize runs too"


@pytest.mark.parametrize(
    ("given", "variables", "kept"),
    [
        ({"kv_transfer_config": '{"kv_connector": "moriio"}'}, {}, {"kv_connector": "moriio"}),
        ({}, {"ATOM_KV_OFFLOAD": "1"}, {}),
    ],
)
def test_what_the_user_has_configured_takes_precedence(
    payload_directory: Path,
    image: Path,
    tmp_path: Path,
    given: dict[str, object],
    variables: dict[str, str],
    kept: object,
) -> None:
    directory = directory_of(tmp_path)
    config, known, errors = run(
        payload_directory, image, given, KVTIER_TOPOLOGY=directory, **variables
    )
    assert config == kept
    assert "kvtier" in known, "a composite connector may name it"
    assert "KVTier: not attached" in errors


@pytest.mark.parametrize("directory", ["missing", "another engine"])
def test_a_topology_that_cannot_be_used_leaves_the_engine_alone(
    payload_directory: Path, image: Path, tmp_path: Path, directory: str
) -> None:
    path = directory_of(tmp_path, "VLLM") if directory == "another engine" else "/nowhere"
    config, _, errors = run(payload_directory, image, {}, KVTIER_TOPOLOGY=path)
    assert config == {}
    assert "KVTier: not attached" in errors


def test_without_a_topology_nothing_is_changed(payload_directory: Path, image: Path) -> None:
    config, known, errors = run(payload_directory, image, {})
    assert (config, known) == ({}, {})
    assert "KVTier" not in errors


def test_the_cache_engine_path_is_configured_by_its_own_variables(
    payload_directory: Path, image: Path
) -> None:
    config, known, said = run(
        payload_directory,
        image,
        {},
        KVTIER_LMCACHE_CONFIG="/etc/lmcache.yaml",
        KVTIER_LMCACHE_MODEL_REVISION="abc",
    )
    assert isinstance(config, dict)
    assert len(config.pop("engine_id")) == 32
    assert config == {
        "kv_connector": "kvtier-lmcache",
        "kv_role": "offload",
        "lmcache_config": "/etc/lmcache.yaml",
        "model_revision": "abc",
    }
    assert set(known) == {"kvtier", "kvtier-lmcache"}
    assert "not attached" not in said


def test_two_ways_to_attach_at_once_attach_nothing(
    payload_directory: Path, image: Path, tmp_path: Path
) -> None:
    config, _, said = run(
        payload_directory,
        image,
        {},
        KVTIER_TOPOLOGY=directory_of(tmp_path),
        KVTIER_LMCACHE_CONFIG="/etc/lmcache.yaml",
    )
    assert config == {}
    assert "both set" in said
