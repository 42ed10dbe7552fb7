"""Pushing images and chart to a registry, as a release does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import images
from tests.support import registry
from tools.imagebuild import builder

import kvtier

pytestmark = pytest.mark.slow

helm = pytest.importorskip(
    "helm_python", reason="the chart is packaged by Helm's own code: helm-python-sdk"
)
ROOT = Path(__file__).resolve().parents[3]


def release(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/release"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_directory_without_images_is_rejected(tmp_path: Path) -> None:
    done = release("registry.example/kvtier", "--images", str(tmp_path), "--out", str(tmp_path))
    assert done.returncode == 1
    assert "has no archive of operator, payload: run tools/images" in done.stderr


def test_a_release_pushes_what_was_built_and_its_chart_names_it_by_digest(tmp_path: Path) -> None:
    try:
        archives = images.shipped()
    except images.NoImagesError as error:
        pytest.skip(str(error))
    built = json.loads((archives[0].parent / "digests.json").read_text())
    source, out = tmp_path / "images", tmp_path / "out"
    source.mkdir()
    for path in archives:
        shutil.copy(path, source)
    with registry.served() as found:
        owner = f"{found.address}/kvtier"
        done = release(owner, "--images", str(source), "--out", str(out), "--insecure")
        assert done.returncode == 0, done.stderr
        references = json.loads((out / "digests.json").read_text())
        for name in builder.IMAGES:
            media_type, content = found.manifests[f"kvtier/{name}", kvtier.__version__]
            assert media_type == "application/vnd.oci.image.index.v1+json"
            # The index, and in it the very image that was built and tested.
            assert references[name] == f"{owner}/{name}@{registry.digest_of(content)}"
            (entry,) = json.loads(content)["manifests"]
            assert entry["digest"] == built[f"{name}-{builder.own_architecture()}"]
            manifest = json.loads(found.manifests[f"kvtier/{name}", entry["digest"]][1])
            assert {layer["digest"] for layer in manifest["layers"]} <= set(found.blobs)
        _check_chart(out / "chart/kvtier", references)


def _check_chart(chart: Path, references: dict[str, str]) -> None:
    wanted = {"operator": references["operator"], "payload": references["payload"]}
    values = yaml.safe_load((chart / "values.yaml").read_text())["images"]
    assert {key: values[key] for key in ("operator", "payload", "tierd")} == {
        **wanted,
        "tierd": references["payload"],
    }
    assert (chart / "values.yaml").read_text().count("@sha256:") == 3
    with helm.Chart.load(chart) as loaded:
        texts = loaded.render({}, name="kvtier", namespace="kvtier-system")
    objects: list[dict[str, Any]] = [
        body
        for name, text in texts.items()
        if not name.endswith("NOTES.txt")
        for body in yaml.safe_load_all(text)
        if body
    ]
    used = {
        container["image"]
        for body in objects
        if body["kind"] == "Deployment"
        for container in body["spec"]["template"]["spec"]["containers"]
    }
    assert used == {references["operator"]}
