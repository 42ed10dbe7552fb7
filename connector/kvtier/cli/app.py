"""The commands of ``kvtier`` and their options. Each calls a module that does the work.

Modules that need packages of tierd are imported by their commands: the operator's image has none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvtier import __version__
from kvtier import payload as payload_writer
from kvtier.cli import explain as explain_command
from kvtier.cli import render as render_command
from kvtier.cli import validate as validate_command
from kvtier.cli.cluster_app import add_commands
from kvtier.cli.console import error_console, print_json, print_text
from kvtier.config.models import Daemon, Selection

SUMMARY = "Tools for KVTier: check, render and explain policies, and maintain file tiers."

app = typer.Typer(
    name="kvtier",
    help=SUMMARY,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PolicyName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of the policy, if the file holds several."),
]
TierDirectories = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR...", help="The directory of a fileSystem tier, or that of each volume."
    ),
]


def _print_version(value: bool) -> None:
    if value:
        print_text(f"kvtier {__version__}")
        raise typer.Exit(0)


@app.callback(help=SUMMARY)
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def validate(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Policy files; - is standard input.")
    ],
    as_json: Json = False,
) -> None:
    """Check policy files in YAML or JSON. A file may hold several KVTierPolicy documents and Lists.

    Exit status: 0 if all policies are valid; 2 if not. Errors name the field and its value.
    """
    reports = [validate_command.validate(name) for name in files]
    if as_json:
        print_json(validate_command.to_json(reports))
    else:
        for report in reports:
            validate_command.show(report)
    raise typer.Exit(0 if all(report.valid for report in reports) else 2)


@app.command()
def render(
    file: Annotated[
        str,
        typer.Option(
            "--file", "-f", metavar="POLICY", help="The policy file; - is standard input."
        ),
    ],
    policy: PolicyName = None,
    topology: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write structural.json and live.json to DIR, for engines on this machine.",
        ),
    ] = None,
    engine_args: Annotated[
        bool,
        typer.Option("--engine-args", help="Print the arguments that attach an engine."),
    ] = False,
    engine_env: Annotated[
        bool,
        typer.Option(
            "--engine-env",
            help="Print the environment that attaches an engine without changing its command.",
        ),
    ] = False,
    payload: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --engine-env: directory written by kvtier payload, for PYTHONPATH.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[=VALUE]",
            help="With --engine-env: a variable that the engine already has (PYTHONPATH, "
            "PYTHONHASHSEED and VLLM_PLUGINS matter). Without VALUE: from this environment.",
        ),
    ] = None,
    tier_path: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="With --topology: directory of a file tier."),
    ] = None,
    run_directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --topology: memory-backed directory for the socket of tierd and the host "
            "pool. Default: below /dev/shm.",
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With --topology: address for the metrics of tierd. Port 0 selects a free port.",
        ),
    ] = None,
    daemon: Annotated[
        Daemon | None,
        typer.Option(
            help="With --topology: how tierd starts. Default: Engine, by the first engine process."
        ),
    ] = None,
    generation: Annotated[int, typer.Option(min=0, help="Generation of the live values.")] = 0,
    as_json: Json = False,
) -> None:
    """Render a policy without a cluster.

    By default, print the Kubernetes documents, for clusters without the operator. With --topology,
    --engine-args or --engine-env, render the configuration of an engine. Without --topology, the
    last two refer to the topology directory of a pod.
    """
    options = render_command.RenderOptions(
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
    result = render_command.render(options)
    for note in result.notes:
        error_console().print(note, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json(result.document)
    else:
        print_text(result.text)


@app.command()
def explain(
    field: Annotated[
        str | None,
        typer.Argument(
            metavar="[FIELD]",
            help="Path of a field, such as spec.tiers.fileSystem.capacity. Default: all fields.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a field of KVTierPolicy: type, default, valid values, and how changes apply."""
    explained = explain_command.explain(field)
    if as_json:
        print_json(explain_command.to_json(explained))
    else:
        explain_command.show(explained)


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
            help="Tokens of the prompt that a tier holds. Repeat in the order of the prompt.",
        ),
    ],
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", metavar="POLICY", help="The policy file; - is standard input."
        ),
    ] = None,
    policy: PolicyName = None,
    topology: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A topology directory instead of --file.")
    ] = None,
    speed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MS,GB/S",
            help="Latency in ms and bandwidth in GB/s of a tier. Default: no measurement.",
        ),
    ] = None,
    queued: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=CHUNKS", help="Chunks in the read queue of a tier."),
    ] = None,
    in_gpu: Annotated[
        int,
        typer.Option(
            "--in-gpu",
            metavar="TOKENS",
            help="Tokens of the prompt that the GPU's prefix cache holds.",
        ),
    ] = 0,
    bytes_per_token: Annotated[
        int, typer.Option(min=1, help="KV bytes per token; 131072 for Llama 3 8B.")
    ] = 131_072,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(help="Prefill speed. Default: no measurement, unless --alpha is set."),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Linear prefill cost in seconds per token: computing tokens a to b takes "
            "alpha (b-a) + beta (b^2-a^2)."
        ),
    ] = None,
    beta: Annotated[
        float, typer.Option(help="With --alpha: quadratic prefill cost, which attention causes.")
    ] = 0.0,
    selection: Annotated[
        Selection | None, typer.Option(help="Selection to use instead of the policy's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain which prefix an engine would load, from which tiers, and how long it would wait."""
    from kvtier.cli import explain_plan as explain_plan_command

    given = explain_plan_command.PlanInput(
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
    loaded = explain_plan_command.load_topology(file, policy, topology)
    explained = explain_plan_command.explain(loaded, given, selection)
    if as_json:
        print_json(explain_plan_command.to_json(explained))
    else:
        explain_plan_command.show(explained)


@app.command()
def payload(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory; created if needed.")],
    as_json: Json = False,
) -> None:
    """Write the connector to a directory, for the PYTHONPATH of an engine."""
    written = payload_writer.write(directory)
    if as_json:
        print_json({"directory": str(written), "version": __version__})
    else:
        print_text(str(written))


@app.command()
def inspect(
    directories: TierDirectories,
    prefixes: Annotated[
        bool,
        typer.Option(
            "--prefixes",
            help="Also read every header: prefixes, ages, and what is evicted next.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the contents of a file tier: namespaces, sizes, ages, writers and the janitor."""
    from kvtier.cli import prefixes as prefixes_command
    from kvtier.cli.volumes import each_directory, show_shares

    found, failed = each_directory(
        directories,
        lambda directory: prefixes_command.inspect_all(directory, prefixes),
        prefixes_command.inspected_json if as_json else None,
        prefixes_command.show_inspected,
    )
    if not as_json:
        show_shares([survey.total_bytes for survey, _, _ in found])
    raise typer.Exit(1 if failed else 0)


@app.command()
def verify(
    directories: TierDirectories,
    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Check tags and decrypt with these keys: a directory with a file for each key, "
            "named by its id, as the Secret of isolation.keySecretRef is mounted.",
        ),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete corrupt objects.")] = False,
    as_json: Json = False,
) -> None:
    """Read and verify every object of a file tier. Engines may be running.

    Exit status: 0 if all objects are intact; 1 if one is corrupt, cannot be read, or is not proven
    by the keys. Without --keys, tags are not checked and encrypted objects are not verified.
    """
    from kvtier.cli import directory as directory_command
    from kvtier.cli.volumes import each_directory

    verified, failed = each_directory(
        directories,
        lambda directory: directory_command.verify(directory, keys, delete=delete),
        directory_command.verify_json if as_json else None,
        directory_command.show_verify,
    )
    raise typer.Exit(1 if failed or any(each.bad for each in verified) else 0)


@app.command()
def gc(
    directories: TierDirectories,
    capacity: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Maximum size of each directory afterwards, such as 500Gi."
        ),
    ],
    retention: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="Delete namespaces that were not used for this time."
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Announce what is deleted with these keys, where objects are sealed: as for "
            "kvtier verify.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Enforce limits on a file tier once. Engines may be running."""
    from kvtier.cli import directory as directory_command
    from kvtier.cli.volumes import each_directory

    _, failed = each_directory(
        directories,
        lambda directory: directory_command.gc(
            directory, capacity, retention, keys, dry_run=dry_run
        ),
        directory_command.gc_json if as_json else None,
        directory_command.show_gc,
    )
    raise typer.Exit(1 if failed else 0)


@app.command()
def faults(
    path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Storage to test. A new directory is created in DIR and removed afterwards.",
        ),
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run this fault only; repeatable.")
    ] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Also run faults under a real vLLM engine.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Also test the file tiers of vLLM and LMCache, if installed."
        ),
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="Duration of each fault.")] = 6.0,
    hang_seconds: Annotated[
        float, typer.Option(min=1, help="Duration of the hang that ends.")
    ] = 60.0,
    objects: Annotated[
        int, typer.Option(min=100, help="Objects stored by the concurrent writers.")
    ] = 10_000,
    file_system: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="Run the faults of file tiers on this: ext4, xfs, tmpfs, nfs or all; repeatable.",
        ),
    ] = None,
    slack_seconds: Annotated[
        float,
        typer.Option(min=0, help="What a slow (emulated) machine may add to every wait."),
    ] = 0.0,
    patience: Annotated[
        float,
        typer.Option(min=1, help="What deadlines are multiplied by, on a slow machine."),
    ] = 1.0,
    fuse: Annotated[
        bool,
        typer.Option(
            "--fuse/--no-fuse",
            help="Inject storage faults by a FUSE mount, if one can be made; else in the daemon.",
        ),
    ] = True,
    names: Annotated[bool, typer.Option("--list", help="List the faults and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Inject storage faults under a real tierd and check that KVTier's guarantees hold.

    Exit status: 0 if all faults pass; 1 if one fails; 3 if none fails but one was skipped.
    """
    from kvtier.cli import faults as faults_command

    if names:
        print_text("\n".join(faults_command.fault_names()))
        raise typer.Exit(0)
    options = replace(
        faults_command.on_file_systems(
            faults_command.scorecard_options(path, fault or (), seconds, hang_seconds, objects),
            file_system or (),
        ),
        slack_seconds=slack_seconds,
        patience=patience,
        fuse=fuse,
    )
    rows = faults_command.run(options, with_engine=engine)
    peer_rows = faults_command.compare(options) if compare else []
    if as_json:
        print_json(faults_command.to_json(rows, peer_rows))
    else:
        faults_command.show(rows, peer_rows)
    raise typer.Exit(faults_command.exit_status(rows))


@app.command()
def demo() -> None:
    """Run the demo: a real engine is killed, restarted, and reloads what it had computed."""
    from kvtier.cli.demo import main as run_demo

    raise typer.Exit(run_demo())


add_commands(app)
