"""Rotation reconciles the Secret and the configurations from any state, killed at any call."""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.support import webhook_configurations

from kvtier_operator.certs import certificates
from kvtier_operator.certs.rotate import CertificateRotation, rotate_certificates
from kvtier_operator.kube.resources import (
    MUTATING_WEBHOOKS,
    SECRETS,
    VALIDATING_WEBHOOKS,
    ApiError,
    Client,
    Kind,
    Object,
)
from kvtier_operator.settings import Settings

SETTINGS = Settings.model_validate(
    {"webhook": {"certificates": {"lifetimeSeconds": 2000, "renewBeforeSeconds": 400}}}
)
SECRET = SETTINGS.webhook.certificates.secret_name
SPREAD = certificates.settle_seconds(400)


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Server(Client):
    """Secrets and configurations as an API server keeps them. ``fail_at``: the calls (by number)
    that fail; half of them after they took effect.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[Kind, str], dict[str, Any]] = {}
        self.versions = itertools.count(1)
        self.calls: list[str] = []
        self.fail_at: dict[int, bool] = {}
        for kind, rendered in (
            (MUTATING_WEBHOOKS, webhook_configurations.mutating(SETTINGS)),
            (VALIDATING_WEBHOOKS, webhook_configurations.validating(SETTINGS)),
        ):
            self.objects[kind, "kvtier"] = {
                **rendered,
                "metadata": {"name": "kvtier", "resourceVersion": "0"},
            }

    def _called(self, verb: str, kind: Kind) -> bool:
        """Whether the call's answer gets lost; raises where the call itself does."""
        self.calls.append(f"{verb} {kind.plural}")
        lost = self.fail_at.get(len(self.calls))
        if lost is False:
            raise ApiError(503, "ServiceUnavailable", "a fault")
        return bool(lost)

    def _answered(self, lost: bool, found: Object) -> Object:
        if lost:
            raise ApiError(0, "Timeout", "a fault")
        return copy.deepcopy(found)

    def _store(self, kind: Kind, name: str, found: dict[str, Any]) -> None:
        found["metadata"]["resourceVersion"] = str(next(self.versions))
        self.objects[kind, name] = found

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        lost = self._called("get", kind)
        found = copy.deepcopy(self.objects.get((kind, name)))
        await asyncio.sleep(0)
        if found is None:
            raise ApiError(404, "NotFound", name)
        return self._answered(lost, found)

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Sequence[Object]:
        raise NotImplementedError

    async def create(self, kind: Kind, namespace: str | None, body: Object) -> Object:
        lost = self._called("create", kind)
        name = body["metadata"]["name"]
        if (kind, name) in self.objects:
            raise ApiError(409, "AlreadyExists", name)
        self._store(kind, name, copy.deepcopy(dict(body)))
        return self._answered(lost, self.objects[kind, name])

    async def apply(
        self, kind: Kind, body: Object, *, subresource: str | None = None, force: bool = True
    ) -> Object:
        lost = self._called("apply", kind)
        found = self.objects[kind, body["metadata"]["name"]]
        for hook in body["webhooks"]:
            assert hook.keys() == {"name", "clientConfig"}
            assert hook["clientConfig"].keys() == {"caBundle"}
            held = next(each for each in found["webhooks"] if each["name"] == hook["name"])
            held["clientConfig"]["caBundle"] = hook["clientConfig"]["caBundle"]
        return self._answered(lost, found)

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        body: Object,
        *,
        subresource: str | None = None,
    ) -> Object:
        lost = self._called("patch", kind)
        found = self.objects.get((kind, name))
        if found is None:
            raise ApiError(404, "NotFound", name)
        if body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", name)
        data = {**(found.get("data") or {}), **body["data"]}
        stored = {key: value for key, value in data.items() if value is not None}
        self._store(kind, name, {**found, "metadata": dict(found["metadata"]), "data": stored})
        return self._answered(lost, self.objects[kind, name])

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str, resource_version: str = ""
    ) -> None:
        raise NotImplementedError

    @property
    def pair(self) -> certificates.KeyPair:
        found = certificates.from_secret(self.objects[SECRETS, SECRET])
        assert found is not None
        return found

    def bundles(self) -> set[str]:
        kinds = (MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS)
        hooks = [hook for kind in kinds for hook in self.objects[kind, "kvtier"]["webhooks"]]
        return {hook["clientConfig"].get("caBundle", "") for hook in hooks}

    def right(self, clock: Clock) -> bool:
        """Whether what serves is trusted by every configuration."""
        names = certificates.server_names(SETTINGS)
        if certificates.problem(self.pair, names, clock()):
            return False
        return self.bundles() == {certificates.encode_bundle(self.pair.bundle)}


def rotation_of(server: Server, clock: Clock) -> CertificateRotation:
    return CertificateRotation(server, SETTINGS, clock)


def rounds(rotation: CertificateRotation, number: int = 1) -> float:
    wait = 0.0
    for _ in range(number):
        wait = asyncio.run(rotation.reconcile())
    return wait


def test_one_reconcile_creates_everything() -> None:
    server, clock = Server(), Clock()
    rotation = rotation_of(server, clock)
    assert rounds(rotation) == pytest.approx(1600)
    assert server.right(clock)
    assert rotation.expiry == clock() + 2000


def test_a_reconcile_with_nothing_to_do_only_reads() -> None:
    server, clock = Server(), Clock()
    rotation = rotation_of(server, clock)
    rounds(rotation)
    server.calls.clear()
    rounds(rotation)
    assert sorted(call.split()[0] for call in server.calls) == ["get"] * 3


def test_two_concurrent_rotations_agree() -> None:
    server, clock = Server(), Clock()

    async def both() -> None:
        await asyncio.gather(
            rotation_of(server, clock).reconcile(), rotation_of(server, clock).reconcile()
        )

    asyncio.run(both())
    assert server.right(clock)
    assert server.calls.count("create secrets") == 2


def test_a_removed_bundle_is_restored() -> None:
    server, clock = Server(), Clock()
    rotation = rotation_of(server, clock)
    rounds(rotation)
    server.objects[MUTATING_WEBHOOKS, "kvtier"] = copy.deepcopy(
        {
            **webhook_configurations.mutating(SETTINGS),
            "metadata": {"name": "kvtier", "resourceVersion": "9"},
        }
    )
    assert not server.right(clock)
    rounds(rotation)
    assert server.right(clock)


@pytest.mark.parametrize(
    "data",
    [{}, {"tls.crt": "eA==", "tls.key": "eA=="}, {"tls.crt": "%"}, {"ca.crt": "eA=="}],
    ids=["empty", "garbage", "no base64", "only a CA"],
)
def test_a_secret_with_invalid_content_is_replaced(data: Mapping[str, str]) -> None:
    server, clock = Server(), Clock()
    server.objects[SECRETS, SECRET] = {
        "metadata": {"name": SECRET, "resourceVersion": "5"},
        "data": dict(data),
    }
    rounds(rotation_of(server, clock))
    assert server.right(clock)


def test_a_deleted_secret_is_recreated_and_the_old_ca_stays_trusted() -> None:
    server, clock = Server(), Clock()
    rotation = rotation_of(server, clock)
    rounds(rotation)
    first = server.pair
    del server.objects[SECRETS, SECRET]
    rounds(rotation)
    assert server.right(clock)
    old = certificates.KeyPair(first.certificate, first.key, server.pair.bundle)
    assert server.pair.certificate != first.certificate
    assert not certificates.problem(old, certificates.server_names(SETTINGS), clock())


def test_an_expired_certificate_is_replaced_at_once() -> None:
    server, clock = Server(), Clock()
    rounds(rotation_of(server, clock))
    first = server.pair
    clock.now += 5000
    rounds(rotation_of(server, clock))
    assert server.right(clock)
    assert server.pair.certificate != first.certificate


def test_a_renewed_pair_is_activated_after_its_ca_was_distributed() -> None:
    server, clock = Server(), Clock()
    rotation = rotation_of(server, clock)
    rounds(rotation)
    first = server.pair
    clock.now += 1601
    assert rounds(rotation) <= SPREAD
    assert server.pair.certificate == first.certificate
    assert server.right(clock)
    clock.now += SPREAD / 2
    rounds(rotation)
    assert server.pair.certificate == first.certificate
    clock.now += SPREAD / 2
    rounds(rotation)
    assert server.pair.certificate != first.certificate
    assert server.right(clock)
    # The old one is trusted for as long as a replica may show it.
    old = certificates.KeyPair(first.certificate, first.key, server.pair.bundle)
    assert not certificates.problem(old, certificates.server_names(SETTINGS), clock())


def test_a_certificate_is_issued_without_webhook_configurations() -> None:
    server, clock = Server(), Clock()
    for kind in (MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS):
        del server.objects[kind, "kvtier"]
    rounds(rotation_of(server, clock))
    assert not certificates.problem(server.pair, certificates.server_names(SETTINGS), clock())


@pytest.mark.parametrize("lost", [False, True], ids=["call lost", "answer lost"])
@pytest.mark.parametrize("number", range(1, 30))
def test_a_rotation_killed_at_any_call_is_continued(number: int, lost: bool) -> None:
    """A first start and a whole rotation, with one call that fails and a new rotation after it."""
    server, clock = Server(), Clock()
    server.fail_at = {number: lost}
    rotation = rotation_of(server, clock)
    trusted: set[str] = set()
    for _ in range(60):
        try:
            rounds(rotation)
        except ApiError:
            rotation = rotation_of(server, clock)
        if (SECRETS, SECRET) in server.objects and "" not in server.bundles():
            # Never a moment in which a configuration does not trust what serves.
            trusted |= server.bundles()
            for field in server.bundles():
                shown = certificates.KeyPair(
                    server.pair.certificate, server.pair.key, base64.b64decode(field)
                )
                assert not certificates.problem(shown, certificates.server_names(SETTINGS), clock())
        clock.now += 100
    assert server.right(clock)
    assert len(trusted) >= 3


def test_the_loop_runs_until_stopped_and_counts_failures() -> None:
    server, clock = Server(), Clock()
    server.fail_at = {1: False}
    seen: list[float] = []
    failed: list[None] = []

    class Counted:
        def certificate_ends(self, seconds: float) -> None:
            seen.append(seconds)

        def certificate_failed(self) -> None:
            failed.append(None)

    async def go() -> None:
        stop, changed = asyncio.Event(), asyncio.Event()
        running = asyncio.ensure_future(
            rotate_certificates(
                server, SETTINGS, stop, changed=changed, wall_clock=clock, metrics=Counted()
            )
        )
        async with asyncio.timeout(20):
            while not seen:
                changed.set()
                await asyncio.sleep(0.01)
        stop.set()
        await running

    asyncio.run(go())
    assert server.right(clock)
    assert seen[0] == clock() + 2000
    assert len(failed) == 1


def test_mounted_certificates_are_not_rotated() -> None:
    mounted = Settings.model_validate({"webhook": {"certificates": {"mode": "Mounted"}}})
    server = Server()
    asyncio.run(rotate_certificates(server, mounted, asyncio.Event()))
    assert server.calls == []
