"""``kvtier-operator``: the command of the operator's image.

Exit status: 0 after SIGTERM or SIGINT, 2 for invalid settings or options, 1 for other errors.
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
WEBHOOK_STOP_SECONDS = 20.0
"""How long a part may take to stop before it is cancelled: for the webhook, after it has drained.
The chart's grace period is 5 s longer than that."""
WEBHOOK_SWITCH_SECONDS = 0.0005
"""The interpreter's thread switch interval. The default of 5 ms is a quarter of the time that an
admission may take, and is lost whenever the event loop handles a change while a thread decides."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The KVTier operator: reconciles KVTierPolicies (controller) and injects pods (webhook).",
)

SettingsFile = Annotated[
    Path, typer.Option("--settings", help="Settings file, as the chart writes it.")
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option("--kubeconfig", help="Kubeconfig to use instead of the pod's service account."),
]
Context = Annotated[
    str | None,
    typer.Option("--context", help="Context of the kubeconfig. Defaults to the current one."),
]
Style = Annotated[runtime.LogFormat, typer.Option("--log-format", help="Format of log lines.")]
Level = Annotated[
    runtime.LogLevel, typer.Option("--log-level", help="Least severe log lines that are written.")
]


@dataclass(slots=True)
class Dependencies:
    """What a part of the operator needs to run."""

    settings: Settings
    access: credentials.Credentials
    api: Any
    api_metrics: ApiMetrics
    registry: CollectorRegistry
    stop: asyncio.Event

    def client(self, write_seconds: Callable[[], float] = lambda: float("inf")) -> ApiClient:
        """A client. See ``ApiClient`` for ``write_seconds``."""
        return ApiClient(
            self.api, self.access, observer=self.api_metrics.call, write_seconds=write_seconds
        )


Part = Callable[[Dependencies], Awaitable[None]]


@app.command()
def controller(
    settings: SettingsFile = DEFAULT_FILE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    log_format: Style = runtime.LogFormat.JSON,
    log_level: Level = runtime.LogLevel.INFO,
) -> None:
    """Reconciles policies. If there are several replicas, one is the leader and the others wait."""
    from kvtier_operator.controller.controller import Controller, ControllerOptions
    from kvtier_operator.controller.metrics import LeaderMetrics
    from kvtier_operator.kube.election import Elector, elector_of

    async def part(given: Dependencies) -> None:
        state = runtime.Health()
        chosen = given.settings.controller.leader_election
        elector: Elector | None = None
        if chosen.enabled:
            on_change = LeaderMetrics(given.registry).changed
            elector = elector_of(given.api, given.settings.namespace, chosen, on_change)
        client = given.client() if elector is None else given.client(elector.remaining_seconds)
        async with runtime.serve(given.settings.monitoring, given.registry, state):
            reconciling = Controller(
                given.settings,
                client,
                given.registry,
                elector=elector,
                options=ControllerOptions(on_restart=given.api_metrics.restart),
            )
            reconciling.add_checks(state)
            await reconciling.run(given.stop)

    runtime.configure(log_format, log_level)
    asyncio.run(_serve(part, load(settings), kubeconfig, context, CONTROLLER_STOP_SECONDS))


@app.command()
def webhook(
    settings: SettingsFile = DEFAULT_FILE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    log_format: Style = runtime.LogFormat.JSON,
    log_level: Level = runtime.LogLevel.INFO,
) -> None:
    """Injects pods and validates policies. All replicas serve."""
    from kvtier_operator.webhook.server import WebhookOptions, serve

    async def part(given: Dependencies) -> None:
        await serve(
            given.settings,
            given.client(),
            given.stop,
            registry=given.registry,
            options=WebhookOptions(on_restart=given.api_metrics.restart),
        )

    sys.setswitchinterval(WEBHOOK_SWITCH_SECONDS)
    runtime.configure(log_format, log_level)
    loaded = load(settings)
    stop_seconds = loaded.webhook.drain_seconds + WEBHOOK_STOP_SECONDS
    asyncio.run(_serve(part, loaded, kubeconfig, context, stop_seconds))


@app.command()
def version() -> None:
    """Prints the version."""
    typer.echo(__version__)


@app.command("settings")
def show_settings(settings: SettingsFile = DEFAULT_FILE) -> None:
    """Prints the settings, including defaults."""
    document = load(settings).model_dump(mode="json", by_alias=True)
    typer.echo(yaml.safe_dump(document, sort_keys=False), nl=False)


async def _serve(
    part: Part,
    settings: Settings,
    kubeconfig: Path | None,
    context: str | None,
    stop_seconds: float,
) -> None:
    """Runs a part until SIGTERM or SIGINT. If it does not stop in time, it is cancelled."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    registry = new_registry()
    api_metrics = ApiMetrics(registry)
    access = await credentials.load(kubeconfig, context)
    async with open_api(access) as api:
        running = asyncio.ensure_future(
            part(Dependencies(settings, access, api, api_metrics, registry, stop))
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
            logger.warning("cancelled, because it did not stop within %g s", stop_seconds)
    logger.info("stopped")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns the exit status. ``arguments``: those of the process if None."""
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
