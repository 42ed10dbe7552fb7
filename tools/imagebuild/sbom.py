"""The software bill of materials of an image, as SPDX 2.3 in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tools.imagebuild.base import SUITE, Debian
from tools.imagebuild.packages import Package

CREATED = "1970-01-01T00:00:00Z"
"""The same input gives the same document."""
LICENSE = re.compile(r"^[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*$")


def document(
    reference: str, digest: str, debian: Iterable[Debian], python: Iterable[Package]
) -> str:
    """``digest``: the image's, ``sha256:...``. Debian packages are named with the checksum of what
    was downloaded.
    """
    name, _, version = reference.rpartition(":")
    image = {
        "SPDXID": "SPDXRef-Image",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "primaryPackagePurpose": "CONTAINER",
        "checksums": [{"algorithm": "SHA256", "checksumValue": digest.removeprefix("sha256:")}],
    }
    parts = [
        *(_debian(each) for each in debian if each.unpacked),
        *(_python(each) for each in python),
    ]
    described = {"relationshipType": "DESCRIBES", "relatedSpdxElement": "SPDXRef-Image"}
    contains = [
        {
            "spdxElementId": "SPDXRef-Image",
            "relationshipType": "CONTAINS",
            "relatedSpdxElement": part["SPDXID"],
        }
        for part in parts
    ]
    return json.dumps(
        {
            "spdxVersion": "SPDX-2.3",
            "dataLicense": "CC0-1.0",
            "SPDXID": "SPDXRef-DOCUMENT",
            "name": reference,
            "documentNamespace": f"https://kvtier.io/spdx/{name}/{digest.removeprefix('sha256:')}",
            "creationInfo": {"created": CREATED, "creators": ["Tool: kvtier-tools-images"]},
            "packages": [image, *parts],
            "relationships": [{"spdxElementId": "SPDXRef-DOCUMENT", **described}, *contains],
        },
        indent=1,
    )


def _part(kind: str, name: str, version: str, locator: str) -> dict[str, object]:
    return {
        "SPDXID": "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", f"{kind}-{name}"),
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": locator,
            }
        ],
    }


def _debian(package: Debian) -> dict[str, object]:
    version = package.version.replace("+", "%2B").replace(":", "%3A").replace("~", "%7E")
    locator = f"pkg:deb/debian/{package.name}@{version}?arch={package.architecture}&distro={SUITE}"
    found = _part("deb", package.name, package.version, locator)
    found["checksums"] = [{"algorithm": "SHA256", "checksumValue": package.sha256}]
    return found


def _python(package: Package) -> dict[str, object]:
    name = re.sub(r"[-_.]+", "-", package.name).lower()
    found = _part("pypi", name, package.version, f"pkg:pypi/{name}@{package.version}")
    if LICENSE.match(package.license):
        found["licenseDeclared"] = package.license
    return found
