"""tools/helm, which stands in for `helm` where that is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.chart.rendered import CHART, REPOSITORY, helm


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "tools" / "helm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_packaged_chart_is_an_archive_that_renders(tmp_path: Path) -> None:
    done = run("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("kvtier-*.tgz")
    assert str(archive) in done.stdout
    with helm.Chart.load(archive) as chart:
        assert any("Deployment" in text for text in chart.render({}, name="kvtier").values())


def test_errors_are_one_line(tmp_path: Path) -> None:
    done = run("package", str(tmp_path / "none"))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr


def test_values_of_later_files_and_options_win(tmp_path: Path) -> None:
    """The command is loaded as a module: it has no suffix."""
    from importlib.machinery import SourceFileLoader
    from importlib.util import module_from_spec, spec_from_loader

    loader = SourceFileLoader("kvtier_tools_helm", str(REPOSITORY / "tools" / "helm"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    for name, text in (("a", "x: {y: 1, z: 1}\nlist: [1]"), ("b", "x: {y: 2}\nlist: [2]")):
        (tmp_path / name).write_text(text)
    options = module.parser().parse_args(
        [
            *("install", "kvtier", "chart", "-f", str(tmp_path / "a"), "-f", str(tmp_path / "b")),
            *("--set-json", "x.w.v=[3]"),
        ]
    )
    assert module.values_of(options) == {"x": {"y": 2, "z": 1, "w": {"v": [3]}}, "list": [2]}
