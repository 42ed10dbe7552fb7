"""`make demo-cluster`: runs the end-to-end test on a new local cluster and prints a table.

    python tests/cluster/demo_cluster.py [--json]

With `--json` only the result is printed. KVTIER_DEMO_DIR names a directory to keep (default: a
temporary one). Requires root and the packages of tools/debian-packages, and reports what is
missing. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import clusters
import images
from e2e import FILE, NEW_TOKENS, RAM, EndToEndRun
from serving import EngineProcessError

from kvtier.cli.demo_display import Display


def main(arguments: list[str] | None = None) -> int:
    """0: every check passed. 1: a check failed. 2: no cluster can be started here."""
    parser = argparse.ArgumentParser(
        description="The whole loop on a real Kubernetes with a real vLLM."
    )
    parser.add_argument("--json", action="store_true", help="print the result only")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    quiet: Callable[[str], None] = lambda _: None  # noqa: E731
    display = Display(quiet, fancy=False) if options.json else Display()
    with _workplace() as home:
        try:
            with _node(home / "cluster", display) as cluster:
                loop = EndToEndRun(cluster, home, display)
                result = loop.run()
        except (clusters.NoClusterError, images.NoImagesError) as error:
            print(f"demo-cluster: {error}", file=sys.stderr)
            return 2
        except (AssertionError, EngineProcessError, clusters.ClusterBrokenError) as error:
            print(f"demo-cluster: {error}", file=sys.stderr)
            return 1
    if not options.json:
        _show(loop, display)
    print(json.dumps(result) if options.json else f"RESULT {json.dumps(result)}")
    return 0 if result["identical_tokens"] else 1


@contextmanager
def _workplace() -> Iterator[Path]:
    kept = os.environ.get("KVTIER_DEMO_DIR")
    if kept:
        home = Path(kept).resolve()
        home.mkdir(parents=True, exist_ok=True)
        if any(home.iterdir()):
            raise SystemExit(f"demo-cluster: KVTIER_DEMO_DIR={home} is not empty")
        yield home
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-", ignore_cleanup_errors=True) as made:
        # Pods look into it as users of their own.
        Path(made).chmod(0o755)
        yield Path(made)


@contextmanager
def _node(home: Path, display: Display) -> Iterator[clusters.Cluster]:
    holder = clusters.cluster(home, clusters.Parts.NODE)
    with display.step(
        "A Kubernetes comes up: etcd, API server, controllers, scheduler, and a node that runs pods"
    ):
        found = holder.__enter__()
    try:
        yield found
    finally:
        with display.step("The cluster goes"):
            holder.__exit__(None, None, None)


def _show(loop: EndToEndRun, display: Display) -> None:
    headings = ("after", "prompt", f"from {RAM}", f"from {FILE}", "first token", "tokens")
    rows = [
        (
            row.stage,
            row.prompt,
            str(row.ram),
            str(row.file),
            f"{row.first_token_seconds * 1e3:.0f} ms",
            "equal" if row.equal else "DIFFERENT",
        )
        for row in loop.rows
    ]
    display.table(
        f"Where prompts came from ({NEW_TOKENS} tokens each, "
        "compared with an engine without KVTier)",
        headings,
        rows,
    )
    print(loop.output.get)
    print(loop.output.describe)
    if loop.dashboards is not None and loop.dashboards.missing:
        print(f"No table of the dashboards: {loop.dashboards.missing} is not installed.")
        return
    display.table(
        "What the dashboards show now (rates over the last ten minutes)",
        ("dashboard", "panel", "series", "value"),
        loop.panels,
    )


def _stop(_: int, __: FrameType | None) -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main())
