"""Issued certificates verify, unusable ones are replaced, and a rotation leaves no gap."""

from __future__ import annotations

import base64
import ssl
from dataclasses import replace

import pytest

from kvtier_operator.certs import certificates
from kvtier_operator.certs.certificates import KeyPair, issue, next_step, problem
from kvtier_operator.certs.serve import ServingCertificate
from kvtier_operator.settings import Settings

NAMES = ("kvtier-webhook.kvtier-system.svc", "127.0.0.1")
NOW = 1_800_000_000.0
DAY = 24 * 3600.0
LIFETIME, BEFORE = 90 * DAY, 30 * DAY


def handshake_error(pair: KeyPair, name: str) -> str:
    """What a client that trusts the bundle says to the pair: empty if it takes it."""
    serving = ServingCertificate()
    serving.load(pair.certificate, pair.key)
    client = ssl.create_default_context(cadata=pair.bundle.decode())
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
    return next_step(None, NAMES, now, lifetime, BEFORE, distributed=False).pair


def real() -> KeyPair:
    import time

    return made(time.time())


def test_an_issued_certificate_verifies_for_every_name() -> None:
    pair = real()
    assert [handshake_error(pair, name) for name in NAMES] == ["", ""]
    assert handshake_error(pair, "other.svc") != ""


def test_names_are_those_of_the_service_and_extra_names() -> None:
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


def test_nothing_changes_before_the_renewal_is_due() -> None:
    pair = made(NOW)
    quiet = next_step(pair, NAMES, NOW + DAY, LIFETIME, BEFORE, distributed=True)
    assert (quiet.change, quiet.pair) == ("", pair)
    assert quiet.wait_seconds == pytest.approx(LIFETIME - BEFORE - DAY)


def test_a_rotation_distributes_the_ca_then_activates_the_pair_and_drops_the_expired_ca() -> None:
    first = made(NOW)
    due = NOW + LIFETIME - BEFORE
    waiting = next_step(first, NAMES, due, LIFETIME, BEFORE, distributed=True)
    assert waiting.change
    assert (waiting.pair.certificate, waiting.pair.key) == (first.certificate, first.key)
    assert waiting.pair.bundle.endswith(first.bundle)
    assert waiting.pair.bundle != first.bundle
    assert problem(waiting.pair, NAMES, due) == ""

    held = next_step(waiting.pair, NAMES, due + DAY, LIFETIME, BEFORE, distributed=False)
    assert (held.change, held.pair) == ("", waiting.pair)

    serving = next_step(waiting.pair, NAMES, due + 60, LIFETIME, BEFORE, distributed=True)
    assert serving.pair == KeyPair(
        waiting.pair.next_certificate, waiting.pair.next_key, waiting.pair.bundle
    )
    assert problem(serving.pair, NAMES, due + 60) == ""
    # A replica that still shows the old certificate is trusted as well.
    old = replace(first, bundle=serving.pair.bundle)
    assert problem(old, NAMES, due + 60) == ""

    pruned = next_step(serving.pair, NAMES, NOW + LIFETIME + 1, LIFETIME, BEFORE, distributed=True)
    assert pruned.change == "removed expired CA from the bundle"
    assert serving.pair.bundle.startswith(pruned.pair.bundle)
    assert pruned.pair.bundle.count(b"BEGIN CERTIFICATE") == 1


def test_both_certificates_of_a_rotation_verify_for_a_client_with_either_bundle() -> None:
    import time

    now = time.time()
    first = made(now)
    waiting = next_step(
        first, NAMES, now + LIFETIME - BEFORE, LIFETIME, BEFORE, distributed=True
    ).pair
    again = issue(NAMES, now, LIFETIME)
    both = replace(waiting, bundle=again.authority + first.bundle)
    assert handshake_error(both, NAMES[0]) == ""
    assert handshake_error(KeyPair(again.certificate, again.key, both.bundle), NAMES[0]) == ""


def test_the_next_pair_replaces_an_expired_certificate() -> None:
    first = made(NOW)
    waiting = next_step(
        first, NAMES, NOW + LIFETIME - BEFORE, LIFETIME, BEFORE, distributed=False
    ).pair
    late = next_step(waiting, NAMES, NOW + LIFETIME + 1, LIFETIME, BEFORE, distributed=False)
    assert late.pair.certificate == waiting.next_certificate
    assert problem(late.pair, NAMES, NOW + LIFETIME + 1) == ""


GOOD = made(NOW)
OTHER = made(NOW)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (replace(GOOD, certificate=b"x"), "not valid PEM"),
        (replace(GOOD, key=b""), "not valid PEM"),
        (replace(GOOD, key=OTHER.key), "does not belong to"),
        (made(NOW - 2 * LIFETIME), "expired"),
        (made(NOW + DAY), "not valid yet"),
        (replace(GOOD, bundle=OTHER.bundle), "not in the bundle"),
        (replace(GOOD, bundle=b""), "not in the bundle"),
        (
            next_step(None, ("other.svc",), NOW, LIFETIME, BEFORE, False).pair,
            "not valid for kvtier-webhook",
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
def test_an_unusable_pair_is_reissued_at_once(pair: KeyPair, words: str) -> None:
    assert words in problem(pair, NAMES, NOW)
    replaced = next_step(pair, NAMES, NOW, LIFETIME, BEFORE, distributed=True)
    assert words in replaced.change
    assert problem(replaced.pair, NAMES, NOW) == ""


def test_a_broken_next_pair_is_reissued_and_the_serving_pair_stays() -> None:
    broken = replace(GOOD, next_certificate=b"x", next_key=b"y")
    again = next_step(broken, NAMES, NOW, LIFETIME, BEFORE, distributed=True)
    assert again.pair.certificate == GOOD.certificate
    assert (
        problem(
            KeyPair(again.pair.next_certificate, again.pair.next_key, again.pair.bundle),
            NAMES,
            NOW,
        )
        == ""
    )


def test_the_bundle_is_bounded() -> None:
    many = b"".join(made(NOW).bundle for _ in range(20))
    pair = next_step(
        replace(GOOD, certificate=b"x", bundle=many), NAMES, NOW, LIFETIME, BEFORE, distributed=True
    ).pair
    assert pair.bundle.count(b"BEGIN CERTIFICATE") <= certificates.MAX_AUTHORITIES
    assert problem(pair, NAMES, NOW) == ""


def test_the_secret_round_trips() -> None:
    pair = next_step(GOOD, NAMES, NOW + LIFETIME - BEFORE, LIFETIME, BEFORE, distributed=True).pair
    assert certificates.from_secret({"data": certificates.secret_data(pair)}) == pair
    assert certificates.secret_data(GOOD)["next.key"] is None


@pytest.mark.parametrize(
    "secret", [None, {}, {"data": None}, {"data": {"tls.crt": "", "other": "eA=="}}]
)
def test_an_empty_secret_has_no_pair(secret: object) -> None:
    assert certificates.from_secret(secret) is None  # type: ignore[arg-type]


def test_a_secret_with_garbage_has_an_unusable_pair() -> None:
    pair = certificates.from_secret(
        {"data": {"tls.crt": "%%%", "tls.key": base64.b64encode(b"x").decode()}}
    )
    assert pair is not None
    assert "not valid PEM" in problem(pair, NAMES, NOW)
