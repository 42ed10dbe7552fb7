"""``rediss://``: the server is authenticated by the CA of the Secret, or not used at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import lmcache_backends as backends

from kvtier.config.models import LMCacheTierDocument
from kvtier.errors import TierUnavailableError
from kvtier.harness.lmcache_servers import RedisProcess
from kvtier.testing.objects import buffer, make_object
from kvtier.tiers.base import TierLimits
from kvtier.tiers.lmcache import LMCacheTier
from kvtier_operator.certs.certificates import IssuedCertificate, issue

pytestmark = pytest.mark.slow
HOST = "127.0.0.1"
HOUR_SECONDS = 3600.0
PASSWORD = "s3cret"


class SecureRedis(RedisProcess):
    """Redis that listens with TLS only, and asks for a password."""

    scheme = "rediss"

    def __init__(self, directory: Path, issued: IssuedCertificate) -> None:
        super().__init__(directory)
        for name, content in (
            ("tls.crt", issued.certificate),
            ("tls.key", issued.key),
            ("ca.crt", issued.authority),
        ):
            (directory / name).write_bytes(content)

    def command(self) -> list[str]:
        files = [
            *("--tls-cert-file", "tls.crt", "--tls-key-file", "tls.key"),
            *("--tls-ca-cert-file", "ca.crt", "--tls-auth-clients", "no"),
        ]
        secure = ["--port", "0", "--tls-port", str(self.port), "--requirepass", PASSWORD]
        return [*super().command(), *secure, *files]


def certificate(*names: str) -> IssuedCertificate:
    return issue(names, time.time(), HOUR_SECONDS)


Start = Callable[[IssuedCertificate], SecureRedis]
Tier = Callable[[SecureRedis, bytes | None], LMCacheTier]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    backends.require_redis()
    started: list[SecureRedis] = []

    def started_with(issued: IssuedCertificate) -> SecureRedis:
        server = SecureRedis(tmp_path / f"server{len(started)}", issued)
        started.append(server)
        server.start()
        return server

    yield started_with
    for server in started:
        server.kill()


@pytest.fixture
def tier(child: backends.ReusedChild, tmp_path: Path) -> Tier:
    """Makes a tier whose Secret has the password and, if given, a CA."""

    def made(server: SecureRedis, authority: bytes | None) -> LMCacheTier:
        secret = tmp_path / "secret"
        secret.mkdir()
        (secret / "password").write_text(PASSWORD)
        if authority is not None:
            (secret / "ca.crt").write_bytes(authority)
        document = LMCacheTierDocument(
            name="remote", url=server.url, credentials_directory=str(secret)
        )
        return LMCacheTier(document, TierLimits(1 << 30), child)

    return made


def test_objects_travel_over_tls_to_the_server_that_the_secrets_ca_vouches_for(
    start: Start, tier: Tier
) -> None:
    issued = certificate(HOST)
    remote = tier(start(issued), issued.authority)
    remote.open(lambda *_: None)
    ref, payload, meta = make_object(1)
    remote.write(ref, payload, meta)
    into = buffer(payload.nbytes)
    assert remote.read(ref, into) == meta
    assert into == payload


@pytest.mark.parametrize("case", ["another CA", "no CA", "another name"])
def test_a_server_that_is_not_vouched_for_gets_neither_password_nor_object(
    start: Start, tier: Tier, case: str
) -> None:
    issued = certificate("cache.example" if case == "another name" else HOST)
    authorities = {
        "another CA": certificate(HOST).authority,
        "no CA": None,
        "another name": issued.authority,
    }
    server = start(issued)
    remote = tier(server, authorities[case])
    with pytest.raises(TierUnavailableError, match=r"(?i)certificate"):
        remote.open(lambda *_: None)
    with pytest.raises(TierUnavailableError):
        remote.write(*make_object(2))
