"""The Secret and both configurations are kept right, from any state, beside anybody else, killed at any call."""

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
from kvtier_operator.certs.rotate import CertificateKeeper, keep_certificates
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
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Server(Client):
    """Secrets and configurations as an API server keeps them. ``fail_at``: the calls (by number) that fail; half of
    them after they took effect.
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
        kept = {key: value for key, value in data.items() if value is not None}
        self._store(kind, name, {**found, "metadata": dict(found["metadata"]), "data": kept})
        return self._answered(lost, self.objects[kind, name])

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str, resource_version: str = ""
    ) -> None:
        raise NotImplementedError

    @property
    def material(self) -> certificates.KeyPair:
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
        if certificates.problem(self.material, names, clock()):
            return False
        return self.bundles() == {certificates.bundle_field(self.material.bundle)}


def keeper(server: Server, clock: Clock) -> CertificateKeeper:
    return CertificateKeeper(server, SETTINGS, clock)


def rounds(keeping: CertificateKeeper, number: int = 1) -> float:
    wait = 0.0
    for _ in range(number):
        wait = asyncio.run(keeping.round())
    return wait


def test_from_nothing_one_round_makes_everything() -> None:
    server, clock = Server(), Clock()
    keeping = keeper(server, clock)
    assert rounds(keeping) == pytest.approx(1600)
    assert server.right(clock)
    assert keeping.ends == clock() + 2000


def test_a_round_with_nothing_to_do_only_reads() -> None:
    server, clock = Server(), Clock()
    keeping = keeper(server, clock)
    rounds(keeping)
    server.calls.clear()
    rounds(keeping)
    assert sorted(call.split()[0] for call in server.calls) == ["get"] * 3


def test_two_that_begin_at_once_agree() -> None:
    server, clock = Server(), Clock()

    async def both() -> None:
        await asyncio.gather(keeper(server, clock).round(), keeper(server, clock).round())

    asyncio.run(both())
    assert server.right(clock)
    assert server.calls.count("create secrets") == 2


def test_a_bundle_that_somebody_took_away_is_repaired() -> None:
    server, clock = Server(), Clock()
    keeping = keeper(server, clock)
    rounds(keeping)
    server.objects[MUTATING_WEBHOOKS, "kvtier"] = copy.deepcopy(
        {
            **webhook_configurations.mutating(SETTINGS),
            "metadata": {"name": "kvtier", "resourceVersion": "9"},
        }
    )
    assert not server.right(clock)
    rounds(keeping)
    assert server.right(clock)


@pytest.mark.parametrize(
    "data",
    [{}, {"tls.crt": "eA==", "tls.key": "eA=="}, {"tls.crt": "%"}, {"ca.crt": "eA=="}],
    ids=["empty", "garbage", "no base64", "only a CA"],
)
def test_a_secret_with_wrong_content_is_filled(data: Mapping[str, str]) -> None:
    server, clock = Server(), Clock()
    server.objects[SECRETS, SECRET] = {
        "metadata": {"name": SECRET, "resourceVersion": "5"},
        "data": dict(data),
    }
    rounds(keeper(server, clock))
    assert server.right(clock)


def test_a_secret_that_was_deleted_is_made_again_and_replicas_with_the_old_certificate_stay_trusted() -> (
    None
):
    server, clock = Server(), Clock()
    keeping = keeper(server, clock)
    rounds(keeping)
    first = server.material
    del server.objects[SECRETS, SECRET]
    rounds(keeping)
    assert server.right(clock)
    old = certificates.KeyPair(first.certificate, first.key, server.material.bundle)
    assert server.material.certificate != first.certificate
    assert not certificates.problem(old, certificates.server_names(SETTINGS), clock())


def test_an_expired_certificate_is_replaced_at_once() -> None:
    server, clock = Server(), Clock()
    rounds(keeper(server, clock))
    first = server.material
    clock.now += 5000
    rounds(keeper(server, clock))
    assert server.right(clock)
    assert server.material.certificate != first.certificate


def test_a_rotation_changes_what_serves_only_after_its_ca_was_known_for_a_while() -> None:
    server, clock = Server(), Clock()
    keeping = keeper(server, clock)
    rounds(keeping)
    first = server.material
    clock.now += 1601
    assert rounds(keeping) <= SPREAD
    assert server.material.certificate == first.certificate
    assert server.right(clock)
    clock.now += SPREAD / 2
    rounds(keeping)
    assert server.material.certificate == first.certificate
    clock.now += SPREAD / 2
    rounds(keeping)
    assert server.material.certificate != first.certificate
    assert server.right(clock)
    # The old one is trusted for as long as a replica may show it.
    old = certificates.KeyPair(first.certificate, first.key, server.material.bundle)
    assert not certificates.problem(old, certificates.server_names(SETTINGS), clock())


def test_without_configurations_there_is_a_certificate_all_the_same() -> None:
    server, clock = Server(), Clock()
    for kind in (MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS):
        del server.objects[kind, "kvtier"]
    rounds(keeper(server, clock))
    assert not certificates.problem(server.material, certificates.server_names(SETTINGS), clock())


@pytest.mark.parametrize("lost", [False, True], ids=["call lost", "answer lost"])
@pytest.mark.parametrize("number", range(1, 30))
def test_killed_at_any_call_of_a_life_the_next_one_goes_on(number: int, lost: bool) -> None:
    """A first start and a whole rotation, with one call that fails and a new keeper after it."""
    server, clock = Server(), Clock()
    server.fail_at = {number: lost}
    keeping = keeper(server, clock)
    trusted: set[str] = set()
    for _ in range(60):
        try:
            rounds(keeping)
        except ApiError:
            keeping = keeper(server, clock)
        if (SECRETS, SECRET) in server.objects and "" not in server.bundles():
            # Never a moment in which a configuration does not trust what serves.
            trusted |= server.bundles()
            for field in server.bundles():
                shown = certificates.KeyPair(
                    server.material.certificate, server.material.key, base64.b64decode(field)
                )
                assert not certificates.problem(shown, certificates.server_names(SETTINGS), clock())
        clock.now += 100
    assert server.right(clock)
    assert len(trusted) >= 3


def test_it_runs_until_it_is_stopped_and_counts_what_fails() -> None:
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
            keep_certificates(
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


def test_mounted_certificates_are_somebody_elses() -> None:
    mounted = Settings.model_validate({"webhook": {"certificates": {"mode": "Mounted"}}})
    server = Server()
    asyncio.run(keep_certificates(server, mounted, asyncio.Event()))
    assert server.calls == []
