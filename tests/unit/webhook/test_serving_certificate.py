"""Certificates are taken into use as files change, and a broken one never takes the place of one that works."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvtier_operator.certs import certificates
from kvtier_operator.certs.certificates import Issued
from kvtier_operator.certs.serve import CertificateDirectory, ServingCertificate, UnusableError
from kvtier_operator.kube.cache import Change
from kvtier_operator.settings import Settings
from kvtier_operator.webhook.server import SecretFollower

NAMES = ("w.svc",)


def issue() -> Issued:
    return certificates.issue(NAMES, time.time(), 3600)


def write(directory: Path, issued: Issued, version: str) -> None:
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


def test_a_directory_is_followed_through_the_kubelets_swap(tmp_path: Path) -> None:
    ends: list[float] = []
    serving = ServingCertificate(ends.append)
    directory = CertificateDirectory(tmp_path, serving)
    directory.look()
    assert not serving.loaded
    write(tmp_path, issue(), "..1")
    directory.look()
    directory.look()
    assert serving.loaded
    assert len(ends) == 1
    write(tmp_path, certificates.issue(NAMES, time.time(), 7200), "..2")
    directory.look()
    assert len(ends) == 2
    assert ends[1] > ends[0]


def test_what_is_wrong_is_said_once_and_the_old_pair_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[float] = []
    serving = ServingCertificate(ends.append)
    directory = CertificateDirectory(tmp_path, serving)
    good = issue()
    write(tmp_path, good, "..1")
    directory.look()
    write(tmp_path, Issued(good.certificate, issue().key, good.authority), "..2")
    for _ in range(3):
        directory.look()
    assert len(ends) == 1
    assert caplog.text.count("cannot be used together") == 1


@pytest.mark.parametrize("broken", [(b"", b""), (b"x", b"y")])
def test_garbage_is_refused(broken: tuple[bytes, bytes]) -> None:
    serving = ServingCertificate()
    good = issue()
    serving.take(good.certificate, good.key)
    if broken != (b"", b""):
        with pytest.raises(UnusableError):
            serving.take(*broken)
    with pytest.raises(UnusableError):
        serving.take(good.certificate, b"y")
    assert not serving.take(good.certificate, good.key)


def test_the_secret_is_followed_and_its_deletion_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends: list[float] = []
    serving = ServingCertificate(ends.append)
    follower = SecretFollower(Settings(), serving)

    def secret(issued: Issued) -> dict[str, object]:
        material = certificates.KeyPair(issued.certificate, issued.key, issued.authority)
        return {"metadata": {"name": "s"}, "data": certificates.secret_data(material)}

    follower.changed({"metadata": {"name": "s"}}, Change.ADDED)
    assert not serving.loaded
    first = secret(issue())
    follower.changed(first, Change.MODIFIED)
    follower.changed(first, Change.DELETED)
    assert serving.loaded
    follower.changed({"data": {"tls.crt": "eA==", "tls.key": "eA=="}}, Change.ADDED)
    assert "replaced by the controller" in caplog.text
    follower.changed(secret(issue()), Change.MODIFIED)
    assert len(ends) == 2
