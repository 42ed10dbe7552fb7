"""The serving certificate follows its files, and a broken pair never replaces a working one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvtier_operator.certs import certificates
from kvtier_operator.certs.certificates import IssuedCertificate
from kvtier_operator.certs.serve import (
    CertificateDirectory,
    ServingCertificate,
    UnusableCertificateError,
)
from kvtier_operator.kube.lister import ChangeType
from kvtier_operator.settings import Settings
from kvtier_operator.webhook.server import SecretFollower

NAMES = ("w.svc",)


def issue() -> IssuedCertificate:
    return certificates.issue(NAMES, time.time(), 3600)


def write(directory: Path, issued: IssuedCertificate, version: str) -> None:
    """As the kubelet does: a new directory, then one link."""
    content = directory / version
    content.mkdir()
    (content / "tls.crt").write_bytes(issued.certificate)
    (content / "tls.key").write_bytes(issued.key)
    for name in ("tls.crt", "tls.key"):
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    (directory / "..tmp").symlink_to(version)
    (directory / "..tmp").rename(directory / "..data")


def test_a_directory_is_reloaded_after_the_kubelet_swaps_it(tmp_path: Path) -> None:
    ends: list[float] = []
    serving = ServingCertificate(ends.append)
    directory = CertificateDirectory(tmp_path, serving)
    directory.poll()
    assert not serving.loaded
    write(tmp_path, issue(), "..1")
    directory.poll()
    directory.poll()
    assert serving.loaded
    assert len(ends) == 1
    write(tmp_path, certificates.issue(NAMES, time.time(), 7200), "..2")
    directory.poll()
    assert len(ends) == 2
    assert ends[1] > ends[0]


def test_a_failure_is_logged_once_and_the_old_pair_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[float] = []
    serving = ServingCertificate(ends.append)
    directory = CertificateDirectory(tmp_path, serving)
    good = issue()
    write(tmp_path, good, "..1")
    directory.poll()
    write(tmp_path, IssuedCertificate(good.certificate, issue().key, good.authority), "..2")
    for _ in range(3):
        directory.poll()
    assert len(ends) == 1
    assert caplog.text.count("cannot be used together") == 1


@pytest.mark.parametrize("broken", [(b"", b""), (b"x", b"y")])
def test_an_unusable_pair_is_an_error(broken: tuple[bytes, bytes]) -> None:
    serving = ServingCertificate()
    good = issue()
    serving.load(good.certificate, good.key)
    if broken != (b"", b""):
        with pytest.raises(UnusableCertificateError):
            serving.load(*broken)
    with pytest.raises(UnusableCertificateError):
        serving.load(good.certificate, b"y")
    assert not serving.load(good.certificate, good.key)


def test_the_secret_is_reloaded_and_its_deletion_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends: list[float] = []
    serving = ServingCertificate(ends.append)
    follower = SecretFollower(Settings(), serving)

    def secret(issued: IssuedCertificate) -> dict[str, object]:
        pair = certificates.KeyPair(issued.certificate, issued.key, issued.authority)
        return {"metadata": {"name": "s"}, "data": certificates.secret_data(pair)}

    follower.changed({"metadata": {"name": "s"}}, ChangeType.ADDED)
    assert not serving.loaded
    first = secret(issue())
    follower.changed(first, ChangeType.MODIFIED)
    follower.changed(first, ChangeType.DELETED)
    assert serving.loaded
    follower.changed({"data": {"tls.crt": "eA==", "tls.key": "eA=="}}, ChangeType.ADDED)
    assert "the controller replaces it" in caplog.text
    follower.changed(secret(issue()), ChangeType.MODIFIED)
    assert len(ends) == 2
