"""lmcache tiers in a topology: what is valid, what is built, what is reported and limited."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.lmcache_backends import require_lmcache

from kvtier.config import lmcache_url
from kvtier.config.loader import load_structural
from kvtier.config.models import LiveTier, LMCacheTierDocument, Topology
from kvtier.config.writer import write
from kvtier.errors import ConfigurationError, KVTierError
from kvtier.harness.tierd_testbed import TierdTestbed
from kvtier.store.store import executor_lanes
from kvtier.tierd import tier_factory
from kvtier.tierd.tier_factory import build_tiers
from kvtier.tiers.filesystem import index
from kvtier.tiers.lmcache import LMCacheTier
from kvtier.tiers.lmcache.process import LANES

VALID = (
    "redis://cache:6379",
    "redis://cache",
    "rediss://cache:6380/2?ssl_cert_reqs=required",
    "rediss://cache?ssl_ca_certs=/etc/ca.crt&ssl_check_hostname=false&ssl_cert_reqs=none",
    "redis://cache:6379/0?client_name=kvtier&protocol=3",
    "redis://[::1]:6379/0",
    "lm://cache:65432",
    "fs://localhost:0/var/lib/lmcache",
)
INVALID = {
    "s3://bucket.s3.region": "must start with redis:// or rediss:// or lm:// or fs://",
    "redis:/cache": "must start with",
    "redis://:6379": "must name a host",
    "redis://user:password@cache:6379": "must not contain a user or a password",
    "redis://cache:99999": "port between 1 and 65535",
    "redis://cache:0": "port between 1 and 65535",
    "redis://cache:6379/zero": "the number of a database",
    "redis://cache:6379?socket_timeout=0": "must have no options but",
    "redis://cache:6379#x": "must not have a fragment",
    "redis://cache:6379?ssl_cert_reqs=none": "must start with rediss:// for the option",
    "redis://cache:6379?ssl_ca_certs=/etc/ca.crt": "must start with rediss:// for the option",
    "rediss://cache?ssl_cert_reqs=never": "must have one of none, optional, required",
    "rediss://cache?ssl_cert_reqs=": "must have one of none, optional, required",
    "rediss://cache?ssl_check_hostname=maybe": "must have one of true, false",
    "redis://cache?protocol=7": "must have one of 2, 3",
    "redis://cache?protocol=x": "must have one of 2, 3",
    "redis://cache?client_name=a%20b": "must have a text without spaces",
    "redis://cache?client_name=a&client_name=b": "must have each option once",
    "redis://the cache:6379": "must not contain spaces",
    "lm://cache": "must name a port",
    "lm://cache:1/path": "must not have a path",
    "lm://cache:1?a=b": "must not have options",
    "fs:///var/lib": "must name a host",
    "fs://localhost/var/lib": "must name a port",
    "fs://localhost:0": "must name an absolute directory",
    "fs://localhost:0/a/../b": "must name an absolute directory",
    "fs://localhost:0/a,b": "must name one directory",
}


@pytest.fixture
def case(tmp_path: Path) -> Iterator[TierdTestbed]:
    case = TierdTestbed(tmp_path / "case")
    yield case
    case.close()


def with_tiers(case: TierdTestbed, *documents: LMCacheTierDocument) -> Topology:
    tiers = {**case.live.tiers, **{each.name: LiveTier() for each in documents}}
    live = case.live.model_copy(update={"tiers": tiers})
    structural = case.topology.structural.model_copy(
        update={"tiers": [*case.topology.structural.tiers, *documents], "live": live}
    )
    return Topology(structural=structural, live=live)


@pytest.mark.parametrize("url", VALID)
def test_a_valid_url(url: str) -> None:
    assert lmcache_url.requirement(url) == ""


@pytest.mark.parametrize(("url", "message"), INVALID.items())
def test_an_invalid_url_names_the_requirement(url: str, message: str) -> None:
    assert message in lmcache_url.requirement(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret@cache:6379",
        "redis://:s3cret/x@cache:6379/0",
        "redis://cache:6379?password=s3cret",
        "redis://cache:6379?password=a@s3cret",
        "rediss://cache/0#s3cret",
        "http://user:s3cret@cache",
        "redis//user:s3cret@cache",
        "user:s3cret@cache:6379",
        "redis://user:s3cret@cache:port",
    ],
)
def test_a_password_in_an_invalid_url_is_in_no_message(case: TierdTestbed, url: str) -> None:
    write(case.topology_directory, with_tiers(case, LMCacheTierDocument(name="far", url=url)))
    with pytest.raises(ConfigurationError, match=r"tiers\.far\.url") as found:
        load_structural(case.topology_directory / "structural.json")
    assert "s3cret" not in str(found.value)


@pytest.mark.slow
def test_lmcaches_own_parsers_take_every_valid_url() -> None:
    require_lmcache()
    code = (
        "import sys\n"
        "from lmcache.v1.storage_backend.connector import parse_remote_url\n"
        "from lmcache.v1.storage_backend.connector.fs_adapter import FsConnectorAdapter\n"
        "from lmcache.v1.storage_backend.connector.lm_adapter import LMServerConnectorAdapter\n"
        "from lmcache.v1.storage_backend.connector.redis_adapter import RedisConnectorAdapter\n"
        "from redis.asyncio import ConnectionPool\n"
        "connect = lambda url: ConnectionPool.from_url(url).make_connection()\n"
        "adapters = [FsConnectorAdapter(), LMServerConnectorAdapter(), RedisConnectorAdapter()]\n"
        "for url in sys.argv[1:]:\n"
        "    taken = [type(each).__name__ for each in adapters if each.can_parse(url)]\n"
        "    parse = connect if url.startswith('redis') else parse_remote_url\n"
        "    assert len(taken) == 1, (url, taken)\n"
        "    print(url, parse(url))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, *VALID], check=True, stdout=subprocess.PIPE, text=True
    )
    assert len(found.stdout.splitlines()) == len(VALID)


def test_a_topology_with_an_invalid_url_is_rejected(case: TierdTestbed) -> None:
    write(
        case.topology_directory,
        with_tiers(case, LMCacheTierDocument(name="far", url="redis://u:p@cache:1")),
    )
    with pytest.raises(ConfigurationError, match=r"tiers\.far\.url.*must not contain a user"):
        load_structural(case.topology_directory / "structural.json")


def test_credentials_for_a_server_without_them_are_rejected(case: TierdTestbed) -> None:
    far = LMCacheTierDocument(name="far", url="lm://cache:1", credentials_directory="/secret")
    write(case.topology_directory, with_tiers(case, far))
    with pytest.raises(ConfigurationError, match=r"tiers\.far\.credentialsDirectory.*only redis"):
        load_structural(case.topology_directory / "structural.json")


def test_what_a_back_end_cannot_do_is_a_condition(
    case: TierdTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.lmcache.tier.require_lmcache", lambda: None)
    near = LMCacheTierDocument(name="near", url="redis://cache:1")
    far = LMCacheTierDocument(name="far", url="lm://cache:1")
    built = build_tiers(with_tiers(case, near, far))
    assert [tier.name for tier in built.tiers] == ["near", "far"]
    assert [(each.type, each.message.partition(":")[0]) for each in built.conditions] == [
        ("TierLimited", "tier far")
    ]


def test_without_the_package_the_tier_is_not_built(
    case: TierdTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise KVTierError("the package lmcache is not installed")

    monkeypatch.setattr("kvtier.tiers.lmcache.tier.require_lmcache", absent)
    far = LMCacheTierDocument(name="far", url="redis://cache:1")
    built = build_tiers(with_tiers(case, far))
    assert built.tiers == ()
    assert built.missing == (far,)
    assert [each.type for each in built.conditions] == ["TierNotServed"]


def test_objects_that_must_be_sealed_are_not_stored_in_an_lmcache_tier(
    case: TierdTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.lmcache.tier.require_lmcache", lambda: None)
    topology = with_tiers(case, LMCacheTierDocument(name="far", url="redis://cache:1"))
    isolation = topology.structural.isolation.model_copy(update={"key_directory": "/keys"})
    structural = topology.structural.model_copy(update={"isolation": isolation})
    built = build_tiers(topology.model_copy(update={"structural": structural}))
    assert built.tiers == ()
    assert "cannot be protected by isolation keys" in built.conditions[0].message


def test_the_index_is_shared_with_other_tiers_and_live_values_arrive(
    case: TierdTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.lmcache.tier.require_lmcache", lambda: None)
    monkeypatch.setattr(index, "MAX_INDEXED_OBJECTS", 6)
    documents = [LMCacheTierDocument(name=name, url="redis://cache:1") for name in ("near", "far")]
    topology = with_tiers(case, *documents)
    tiers = {
        **topology.live.tiers,
        "near": LiveTier(load_timeout_seconds=3, capacity_bytes=1 << 20),
    }
    built = build_tiers(
        topology.model_copy(update={"live": topology.live.model_copy(update={"tiers": tiers})})
    )
    near, far = built.tiers
    assert isinstance(near, LMCacheTier)
    assert isinstance(far, LMCacheTier)
    assert near._index.max_objects == far._index.max_objects == 3
    assert near.usage().capacity_bytes == 1 << 20
    assert near._limits.load_timeout_seconds == 3


def test_no_more_calls_run_than_the_process_has_lanes(case: TierdTestbed) -> None:
    lanes = executor_lanes(with_tiers(case, LMCacheTierDocument(name="far", url="lm://cache:1")))
    assert lanes["read:far"] == LANES["read"]
    assert lanes["write:far"] == LANES["write"]


@pytest.mark.parametrize("has_tier", [True, False])
def test_the_child_process_may_allocate_more_than_tierd(
    case: TierdTestbed, monkeypatch: pytest.MonkeyPatch, has_tier: bool
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(threading, "stack_size", lambda _: 0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(resource, "setrlimit", lambda _, values: limits.append(values))
    documents = [LMCacheTierDocument(name="far", url="lm://cache:1")] if has_tier else []
    topology = with_tiers(case, *documents)
    bound = tier_factory.limit_data(topology.structural, 1 << 30)
    assert limits == [(bound, resource.RLIM_INFINITY if has_tier else bound)]
