"""Certificates: what is made verifies, what is wrong is replaced, and a rotation leaves no gap."""

from __future__ import annotations

import base64
import ssl
from dataclasses import replace

import pytest

from kvtier_operator.certs import certificates
from kvtier_operator.certs.certificates import KeyPair, issue, problem, step
from kvtier_operator.certs.serve import ServingCertificate
from kvtier_operator.settings import Settings

NAMES = ("kvtier-webhook.kvtier-system.svc", "127.0.0.1")
NOW = 1_800_000_000.0
DAY = 24 * 3600.0
LIFETIME, BEFORE = 90 * DAY, 30 * DAY


def shaken(material: KeyPair, name: str) -> str:
    """What a client that trusts the bundle says to the pair: empty if it takes it."""
    serving = ServingCertificate()
    serving.take(material.certificate, material.key)
    client = ssl.create_default_context(cadata=material.bundle.decode())
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(incoming, outgoing, server_hostname=name)
    theirs = serving.context.wrap_bio(outgoing, incoming, server_side=True)
    for _ in range(4):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    return ""


def made(now: float, lifetime: float = LIFETIME) -> KeyPair:
    return step(None, NAMES, now, lifetime, BEFORE, spread=False).material


def real() -> KeyPair:
    import time

    return made(time.time())


def test_what_is_made_verifies_by_every_name() -> None:
    material = real()
    assert [shaken(material, name) for name in NAMES] == ["", ""]
    assert shaken(material, "other.svc") != ""


def test_names_are_the_services_and_what_the_administrator_adds() -> None:
    settings = Settings.model_validate(
        {
            "namespace": "ops",
            "webhook": {"certificates": {"serviceName": "w", "extraNames": ["10.0.0.1"]}},
        }
    )
    assert certificates.server_names(settings) == (
        "w.ops.svc",
        "w.ops.svc.cluster.local",
        "10.0.0.1",
    )


def test_nothing_is_done_before_it_is_due() -> None:
    material = made(NOW)
    quiet = step(material, NAMES, NOW + DAY, LIFETIME, BEFORE, spread=True)
    assert (quiet.change, quiet.material) == ("", material)
    assert quiet.wait_seconds == pytest.approx(LIFETIME - BEFORE - DAY)


def test_a_rotation_first_tells_clients_then_serves_and_the_old_ca_goes_when_it_expires() -> None:
    first = made(NOW)
    due = NOW + LIFETIME - BEFORE
    waiting = step(first, NAMES, due, LIFETIME, BEFORE, spread=True)
    assert waiting.change
    assert (waiting.material.certificate, waiting.material.key) == (first.certificate, first.key)
    assert waiting.material.bundle.endswith(first.bundle)
    assert waiting.material.bundle != first.bundle
    assert problem(waiting.material, NAMES, due) == ""

    held = step(waiting.material, NAMES, due + DAY, LIFETIME, BEFORE, spread=False)
    assert (held.change, held.material) == ("", waiting.material)

    serving = step(waiting.material, NAMES, due + 60, LIFETIME, BEFORE, spread=True)
    assert serving.material == KeyPair(
        waiting.material.next_certificate, waiting.material.next_key, waiting.material.bundle
    )
    assert problem(serving.material, NAMES, due + 60) == ""
    # A replica that still shows the old certificate is trusted as well.
    old = replace(first, bundle=serving.material.bundle)
    assert problem(old, NAMES, due + 60) == ""

    pruned = step(serving.material, NAMES, NOW + LIFETIME + 1, LIFETIME, BEFORE, spread=True)
    assert pruned.change == "an expired CA is no longer trusted"
    assert serving.material.bundle.startswith(pruned.material.bundle)
    assert pruned.material.bundle.count(b"BEGIN CERTIFICATE") == 1


def test_both_certificates_of_a_rotation_verify_for_a_client_with_either_bundle() -> None:
    import time

    now = time.time()
    first = made(now)
    waiting = step(first, NAMES, now + LIFETIME - BEFORE, LIFETIME, BEFORE, spread=True).material
    again = issue(NAMES, now, LIFETIME)
    both = replace(waiting, bundle=again.authority + first.bundle)
    assert shaken(both, NAMES[0]) == ""
    assert shaken(KeyPair(again.certificate, again.key, both.bundle), NAMES[0]) == ""


def test_an_expired_certificate_with_one_that_waits_is_replaced_by_that() -> None:
    first = made(NOW)
    waiting = step(first, NAMES, NOW + LIFETIME - BEFORE, LIFETIME, BEFORE, spread=False).material
    late = step(waiting, NAMES, NOW + LIFETIME + 1, LIFETIME, BEFORE, spread=False)
    assert late.material.certificate == waiting.next_certificate
    assert problem(late.material, NAMES, NOW + LIFETIME + 1) == ""


GOOD = made(NOW)
OTHER = made(NOW)


@pytest.mark.parametrize(
    ("material", "words"),
    [
        (replace(GOOD, certificate=b"x"), "cannot be read"),
        (replace(GOOD, key=b""), "cannot be read"),
        (replace(GOOD, key=OTHER.key), "do not belong together"),
        (made(NOW - 2 * LIFETIME), "expired"),
        (made(NOW + DAY), "not valid yet"),
        (replace(GOOD, bundle=OTHER.bundle), "not in the bundle"),
        (replace(GOOD, bundle=b""), "not in the bundle"),
        (
            step(None, ("other.svc",), NOW, LIFETIME, BEFORE, False).material,
            "lacks the name kvtier-webhook",
        ),
    ],
    ids=[
        "garbage",
        "no key",
        "another key",
        "expired",
        "future",
        "another CA",
        "no CA",
        "another name",
    ],
)
def test_what_cannot_serve_is_replaced_at_once(material: KeyPair, words: str) -> None:
    assert words in problem(material, NAMES, NOW)
    replaced = step(material, NAMES, NOW, LIFETIME, BEFORE, spread=True)
    assert words in replaced.change
    assert problem(replaced.material, NAMES, NOW) == ""


def test_a_waiting_pair_that_is_broken_is_made_anew_and_the_serving_one_serves_on() -> None:
    broken = replace(GOOD, next_certificate=b"x", next_key=b"y")
    again = step(broken, NAMES, NOW, LIFETIME, BEFORE, spread=True)
    assert again.material.certificate == GOOD.certificate
    assert (
        problem(
            KeyPair(
                again.material.next_certificate, again.material.next_key, again.material.bundle
            ),
            NAMES,
            NOW,
        )
        == ""
    )


def test_a_bundle_that_grew_without_end_is_cut() -> None:
    many = b"".join(made(NOW).bundle for _ in range(20))
    material = step(
        replace(GOOD, certificate=b"x", bundle=many), NAMES, NOW, LIFETIME, BEFORE, spread=True
    ).material
    assert material.bundle.count(b"BEGIN CERTIFICATE") <= certificates.MAX_AUTHORITIES
    assert problem(material, NAMES, NOW) == ""


def test_the_secret_holds_what_was_put_in() -> None:
    material = step(GOOD, NAMES, NOW + LIFETIME - BEFORE, LIFETIME, BEFORE, spread=True).material
    assert certificates.from_secret({"data": certificates.secret_data(material)}) == material
    assert certificates.secret_data(GOOD)["next.key"] is None


@pytest.mark.parametrize(
    "secret", [None, {}, {"data": None}, {"data": {"tls.crt": "", "other": "eA=="}}]
)
def test_an_empty_secret_holds_nothing(secret: object) -> None:
    assert certificates.from_secret(secret) is None  # type: ignore[arg-type]


def test_a_secret_of_garbage_is_read_as_such() -> None:
    material = certificates.from_secret(
        {"data": {"tls.crt": "%%%", "tls.key": base64.b64encode(b"x").decode()}}
    )
    assert material is not None
    assert "cannot be read" in problem(material, NAMES, NOW)
