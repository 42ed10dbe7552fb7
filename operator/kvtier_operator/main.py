"""``kvtier-operator``: the command of the operator's image.

Exit status: 0 stopped when asked to, 2 refused (settings, an option), 1 anything else.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from prometheus_client import CollectorRegistry
from typer.main import get_command

from kvtier import __version__
from kvtier.errors import KVTierError
from kvtier_operator import runtime
from kvtier_operator.kube import credentials
from kvtier_operator.kube.client import ApiClient, open_api
from kvtier_operator.runtime import ApiMetrics, new_registry
from kvtier_operator.settings import DEFAULT_FILE, Settings, load

logger = logging.getLogger(__name__)

CONTROLLER_STOP_SECONDS = 5.0
WEBHOOK_STOP_SECONDS = 25.0
"""How long a part may take to stop before it is cancelled; the webhook answers until nobody asks it any more."""
WEBHOOK_SWITCH_SECONDS = 0.0005
"""After how long a thread that computes makes way for another. The interpreter's own 5 ms are a quarter of what an admission may
take, and one waits for that each time that the loop takes in a change while a decision is being computed."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The KVTier operator: follows KVTierPolicies (controller) and attaches pods (webhook).",
)

SettingsFile = Annotated[
    Path, typer.Option("--settings", help="Settings, as the chart writes them.")
]
Kubeconfig = Annotated[
    Path | None, typer.Option("--kubeconfig", help="Instead of the service account that a pod has.")
]
Context = Annotated[
    str | None, typer.Option("--context", help="Of the kubeconfig; default: its current one.")
]
Style = Annotated[runtime.LogFormat, typer.Option("--log-format", help="How log lines look.")]


@dataclass(slots=True)
class Surroundings:
    """What a part of the operator is given to run."""

    settings: Settings
    access: credentials.Credentials
    api: Any
    api_metrics: ApiMetrics
    registry: CollectorRegistry
    stop: asyncio.Event

    def client(self, write_seconds: Callable[[], float] = lambda: float("inf")) -> ApiClient:
        """A client; see there for ``write_seconds``."""
        return ApiClient(
            self.api, self.access, observer=self.api_metrics.call, write_seconds=write_seconds
        )


Part = Callable[[Surroundings], Awaitable[None]]


@app.command()
def controller(
    settings: SettingsFile = DEFAULT_FILE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    log_format: Style = runtime.LogFormat.JSON,
) -> None:
    """Follows policies: applies what they need, reports about them, re-tunes and restarts. The leader
    among the replicas works."""
    from kvtier_operator.controller.controller import control
    from kvtier_operator.controller.metrics import LeaderMetrics
    from kvtier_operator.kube.election import Elector, elector_of

    async def part(given: Surroundings) -> None:
        state = runtime.Health()
        chosen = given.settings.controller.leader_election
        elector: Elector | None = None
        if chosen.enabled:
            on_change = LeaderMetrics(given.registry).changed
            elector = elector_of(given.api, given.settings.namespace, chosen, on_change)
        client = given.client() if elector is None else given.client(elector.remaining_seconds)
        async with runtime.serve(given.settings.monitoring, given.registry, state):
            await control(
                given.settings,
                client,
                given.stop,
                registry=given.registry,
                health=state,
                elector=elector,
                on_restart=given.api_metrics.restart,
            )

    _run(part, load(settings), kubeconfig, context, log_format, CONTROLLER_STOP_SECONDS)


@app.command()
def webhook(
    settings: SettingsFile = DEFAULT_FILE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    log_format: Style = runtime.LogFormat.JSON,
) -> None:
    """Answers the API server's questions about pods and policies. Any number of replicas."""
    from kvtier_operator.webhook.server import serve

    async def part(given: Surroundings) -> None:
        await serve(
            given.settings,
            given.client(),
            given.stop,
            registry=given.registry,
            on_restart=given.api_metrics.restart,
        )

    sys.setswitchinterval(WEBHOOK_SWITCH_SECONDS)
    _run(part, load(settings), kubeconfig, context, log_format, WEBHOOK_STOP_SECONDS)


@app.command()
def version() -> None:
    """Prints the version."""
    typer.echo(__version__)


@app.command("settings")
def show_settings(settings: SettingsFile = DEFAULT_FILE) -> None:
    """Prints the settings in force, defaults included."""
    document = load(settings).model_dump(mode="json", by_alias=True)
    typer.echo(yaml.safe_dump(document, sort_keys=False), nl=False)


def _run(
    part: Part,
    settings: Settings,
    kubeconfig: Path | None,
    context: str | None,
    log_format: runtime.LogFormat,
    stop_seconds: float,
) -> None:
    runtime.configure(log_format)
    asyncio.run(_serve(part, settings, kubeconfig, context, stop_seconds))


async def _serve(
    part: Part,
    settings: Settings,
    kubeconfig: Path | None,
    context: str | None,
    stop_seconds: float,
) -> None:
    """Runs a part until SIGTERM or SIGINT; one that does not stop in time is cancelled."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    registry = new_registry()
    api_metrics = ApiMetrics(registry)
    access = await credentials.load(kubeconfig, context)
    async with open_api(access) as api:
        running = asyncio.ensure_future(
            part(Surroundings(settings, access, api, api_metrics, registry, stop))
        )
        asked = asyncio.ensure_future(stop.wait())
        await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not running.done():
            logger.info("stopping")
            await asyncio.wait({running}, timeout=stop_seconds)
            running.cancel()
        try:
            await running
        except asyncio.CancelledError:
            logger.warning("a part did not stop in time and was cancelled")
    logger.info("stopped")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (the process's own if None) and returns the exit status."""
    try:
        get_command(app).main(args=arguments, prog_name="kvtier-operator")
    except KVTierError as error:
        sys.stderr.write(f"kvtier-operator: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"kvtier-operator: {error}\n")
        return 1
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
