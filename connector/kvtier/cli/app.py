"""The commands of `kvtier`. Each is thin: what it does is a function elsewhere that needs neither typer nor rich."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier import __version__
from kvtier import payload as payloads
from kvtier.cli import directory as directories
from kvtier.cli import explain as explaining
from kvtier.cli import explain_plan as planning
from kvtier.cli import render as rendering
from kvtier.cli import validate as validating
from kvtier.cli.console import error_console, printed, printed_json
from kvtier.config.models import Daemon, Selection

app = typer.Typer(
    name="kvtier",
    help="KV cache tiers for LLM engines: check policies, render what they mean, explain their fields.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
PolicyFile = Annotated[
    str,
    typer.Option("--file", "-f", metavar="POLICY", help="The policy file; - is standard input."),
]


def _version(wanted: bool) -> None:
    if wanted:
        printed(f"kvtier {__version__}")
        raise typer.Exit(0)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """KV cache tiers for LLM engines: check policies, render what they mean, explain their fields."""


@app.command()
def validate(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Policy files; - is standard input.")
    ],
    as_json: Json = False,
) -> None:
    """Check policy files. Accepted: YAML or JSON with one or several KVTierPolicy documents, or Lists of them.

    Exit status 0: all accepted; 2: something was refused, and is named with field, value and what is accepted.
    """
    reports = [validating.check(name) for name in files]
    if as_json:
        printed_json(validating.as_json(reports))
    else:
        for report in reports:
            validating.show(report)
    raise typer.Exit(0 if all(report.accepted for report in reports) else 2)


@app.command()
def render(
    file: PolicyFile,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The policy of that name, where the file holds several."),
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write structural.json and live.json there, for engines on this machine.",
        ),
    ] = None,
    engine_args: Annotated[
        bool, typer.Option("--engine-args", help="Print the arguments that attach an engine.")
    ] = False,
    engine_env: Annotated[
        bool,
        typer.Option(
            "--engine-env",
            help="Print the environment that attaches an engine whose command stays as it is.",
        ),
    ] = False,
    payload: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where `kvtier payload DIR` wrote the connector; into PYTHONPATH."
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[=VALUE]",
            help="What the engine's environment holds already (PYTHONPATH, PYTHONHASHSEED and VLLM_PLUGINS matter); "
            "without a value: that of this process.",
        ),
    ] = None,
    tier_path: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="With --topology: the directory of a file tier."),
    ] = None,
    run_directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --topology: where engine and tierd meet; memory-backed. Default: below /dev/shm.",
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With --topology: where tierd serves metrics; port 0 takes a free one.",
        ),
    ] = None,
    daemon: Annotated[
        Daemon | None,
        typer.Option(
            help="With --topology: who starts tierd. Default: Engine, the first engine process."
        ),
    ] = None,
    generation: Annotated[int, typer.Option(min=0, help="Number of the live values.")] = 0,
    as_json: Json = False,
) -> None:
    """Print what a policy means, with no cluster at hand.

    Alone: all Kubernetes documents, for clusters without the operator. With --topology, --engine-args or --engine-env:
    what an engine needs; without --topology these two name the directory that pods mount.
    """
    request = rendering.Request(
        file=file,
        policy=policy,
        topology=topology,
        engine_args=engine_args,
        engine_env=engine_env,
        payload=payload,
        env=tuple(env or ()),
        tier_paths=tuple(tier_path or ()),
        run_directory=run_directory,
        http=http,
        daemon=daemon,
        generation=generation,
    )
    rendered = rendering.render(request)
    for note in rendered.notes:
        error_console().print(note, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        printed_json(rendered.document)
    else:
        printed(rendered.text)


@app.command()
def explain(
    field: Annotated[
        str | None,
        typer.Argument(
            metavar="[FIELD]", help="For example spec.tiers.fileSystem.capacity. None: all fields."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a field of KVTierPolicy: type, default, whether it changes under a running engine, what is accepted."""
    explained = explaining.explain(field)
    if as_json:
        printed_json(explaining.as_json(explained))
    else:
        explaining.show(explained)


@app.command("explain-plan")
def explain_plan(
    prompt_tokens: Annotated[
        int,
        typer.Argument(
            metavar="PROMPT_TOKENS", min=1, max=100_000_000, help="Length of the prompt."
        ),
    ],
    held: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=TOKENS",
            help="What a tier holds of the prompt; several, in the prompt's order.",
        ),
    ],
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", metavar="POLICY", help="The policy file; - is standard input."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The policy of that name, where the file holds several."),
    ] = None,
    topology: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A topology directory instead of a policy.")
    ] = None,
    speed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MS,GB/S",
            help="Latency in ms and bandwidth in GB/s of a tier; without: not measured.",
        ),
    ] = None,
    queued: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=CHUNKS", help="Chunks that others wait for at a tier."),
    ] = None,
    in_gpu: Annotated[
        int, typer.Option("--in-gpu", metavar="TOKENS", help="Tokens that the GPU still holds.")
    ] = 0,
    bytes_per_token: Annotated[
        int, typer.Option(min=1, help="KV bytes of a token; 131072 for Llama 3 8B.")
    ] = 131_072,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(help="Prefill speed of the engine; without this and --alpha: not measured."),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Seconds per token, instead: computing a to b takes alpha (b-a) + beta (b^2-a^2)."
        ),
    ] = None,
    beta: Annotated[float, typer.Option(help="With --alpha: the share of attention.")] = 0.0,
    selection: Annotated[Selection | None, typer.Option(help="Instead of the policy's.")] = None,
    as_json: Json = False,
) -> None:
    """Explain which part of a prompt would be loaded, from which tiers, and how long it would be waited for."""
    numbers = planning.Numbers(
        prompt_tokens=prompt_tokens,
        held=tuple(held),
        speeds=tuple(speed or ()),
        queued=tuple(queued or ()),
        in_gpu_tokens=in_gpu,
        bytes_per_token=bytes_per_token,
        tokens_per_second=tokens_per_second,
        alpha=alpha,
        beta=beta,
    )
    explained = planning.explain(planning.topology_of(file, policy, topology), numbers, selection)
    if as_json:
        printed_json(planning.as_json(explained))
    else:
        planning.show(explained)


@app.command()
def payload(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Made if needed.")],
    as_json: Json = False,
) -> None:
    """Write the connector into a directory that an engine's PYTHONPATH can name."""
    written = payloads.write(directory)
    if as_json:
        printed_json({"directory": str(written), "version": __version__})
    else:
        printed(str(written))


TierDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The directory of a fileSystem tier.")
]


@app.command()
def inspect(directory: TierDirectory, as_json: Json = False) -> None:
    """Show what a file tier's directory holds: namespaces, bytes, ages, who writes there, who keeps its limits."""
    found, now = directories.inspect(directory)
    if as_json:
        printed_json(directories.inspect_json(found, now))
    else:
        directories.show_inspect(found, now)


@app.command()
def verify(
    directory: TierDirectory,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove the objects that are corrupt.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read and verify every object of a file tier's directory, beside running engines or without.

    Exit status 0: all are what they say; 1: something is corrupt or cannot be read.
    """
    done = directories.verify(directory, delete=delete)
    if as_json:
        printed_json(directories.verify_json(done))
    else:
        directories.show_verify(done)
    raise typer.Exit(1 if done.bad else 0)


@app.command()
def gc(
    directory: TierDirectory,
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="What may be there afterwards, such as 500Gi.")
    ],
    retention: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="Remove namespaces that were not used for so long."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Enforce limits on a file tier's directory by hand; safe beside running engines."""
    done = directories.gc(directory, capacity, retention, dry_run=dry_run)
    if as_json:
        printed_json(directories.gc_json(done))
    else:
        directories.show_gc(done)


@app.command()
def faults(
    path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where to work: your storage. Only a new directory in it is used, and removed.",
        ),
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one; may be repeated.")
    ] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Also under a real vLLM; tokens are compared.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Also on the file tiers of vLLM and LMCache, where those can run."
        ),
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="How long a fault lasts.")] = 6.0,
    hang_seconds: Annotated[
        float, typer.Option(min=1, help="How long the hang lasts that ends.")
    ] = 60.0,
    objects: Annotated[
        int, typer.Option(min=100, help="What the writers store together.")
    ] = 10_000,
    names: Annotated[bool, typer.Option("--list", help="Print the names of the faults.")] = False,
    as_json: Json = False,
) -> None:
    """Play every fault against a real tier daemon and say whether one of KVTier's promises was broken.

    Exit status 0: all pass; 1: something fails; 3: nothing fails, but something could not be played here, with the reason.
    """
    from kvtier.cli import faults as scorecard

    if names:
        from kvtier.scorecard.runner import names as known

        printed("\n".join(known()))
        raise typer.Exit(0)
    chosen = scorecard.options(path, fault or (), seconds, hang_seconds, objects)
    rows = scorecard.run(chosen, with_engine=engine)
    others = scorecard.compare(chosen) if compare else []
    if as_json:
        printed_json(scorecard.as_json(rows, others))
    else:
        scorecard.show(rows, others)
    raise typer.Exit(scorecard.status(rows))


@app.command()
def demo() -> None:
    """Run the demo: a real engine, stopped hard and started again, reloads what it had computed."""
    from kvtier.cli.demo import main as run_demo

    raise typer.Exit(run_demo())
