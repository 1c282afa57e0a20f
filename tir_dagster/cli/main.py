"""The `tir` command. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM.

Heavy imports are inside the commands, so that `tir --help` answers at once.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.shell_completion import get_completion_class

from tir_dagster.background import no_core_files
from tir_dagster.cli.audit.commands import history, release, rollback, verify, why
from tir_dagster.cli.declared import find_declared, nothing_declared
from tir_dagster.cli.output import AS_JSON, FORM_VARIABLE, begin, elapsed, tell, working
from tir_dagster.cli.probe_server import probe_server
from tir_dagster.cli.revisions import revisions
from tir_dagster.cli.sandbox import PORT, SEED, sandbox
from tir_dagster.cli.setup.commands import adopt, doctor, init
from tir_dagster.cli.spark import spark
from tir_dagster.cli.webhooks import webhooks
from tir_dagster.errors import LoadError, SpecError, TirError
from tir_dagster.orchestration.interrupts import StoppedError, is_interrupt, stopped_error, stopping, watch_signals
from tir_dagster.sandbox.home import SandboxError
from tir_dagster.spec.reading import json_schema, load_declared, load_specs

if TYPE_CHECKING:
    from tir_dagster.changes.plan import Mode
    from tir_dagster.cli.refresh import Command, RefreshOutcome
    from tir_dagster.spec.extract import ExtractSpec

Result = TypeVar("Result")
_WATCH_SECONDS = 5.0
# What is true whenever the command is stopped. Those that are not here say so themselves.
_NOTHING = "Nothing was changed."
_LEFT = {
    **dict.fromkeys(("plan", "status", "report", "history", "why", "revisions", "schema", "completion"), _NOTHING),
    "verify": "What is published stays as it is.",
    "sandbox": "tir sandbox status shows which servers run. A sample that is not whole is replaced by the next tir sandbox seed.",
    "spark": "tir spark status shows whether the server runs.",
    "warm-up": "Nothing was stored.",
}
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class ProjectGroup(click.Group):
    """A command group that shows expected errors as one message with exit code 1 or 2, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StoppedError as error:
            return _end(ctx, error)
        except SpecError as error:
            raise click.UsageError(str(error)) from error
        except (TirError, SandboxError) as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:
            raise  # the reader of the output closed it (`| head`): click ends quietly
        except OSError as error:
            raise click.ClickException(_disk_error(error)) from error
        except BaseException as error:
            if not is_interrupt(error):
                raise
            so_far = _LEFT.get(ctx.invoked_subcommand or "", "")
            return _end(ctx, stopped_error(f"tir {ctx.invoked_subcommand or ''}".strip(), so_far))


def _end(ctx: click.Context, error: StoppedError) -> NoReturn:
    """Print one line and exit with the code that shells give to a process ended by the signal."""
    click.echo(str(error), err=True)
    ctx.exit(error.exit_code)


def _disk_error(error: OSError) -> str:
    # An error about two files: the second one is written.
    file = error.filename2 or error.filename
    where = f"{file}: " if file else ""
    problem = f"{where}{error.strerror or error}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"{problem}. Check TIR_HOME and the disk."
    home = Path(os.environ.get("TIR_HOME") or ".tir").expanduser().absolute()
    folder = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(folder).free // 2**20
    return (
        f"{problem}. {folder} has {free:,} MB free: make room there, or set TIR_HOME to a larger disk, then run again."
    )


def _hints(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Return each hint as JSON text; read @FILE from the file."""
    texts = []
    for text in values:
        try:
            texts.append(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise click.BadParameter(
                f"{text[1:]} cannot be read: {reason}. Name a file with a hint in JSON, or write the JSON itself."
            ) from error
    return tuple(texts)


def _span(_: click.Context, __: click.Parameter, text: str | None) -> str | None:
    """Refuse an empty range: an unset variable in a script must not turn a re-sync into another refresh."""
    if text is not None and not text.strip():
        raise click.BadParameter(f"{text!r} is not a range. Write FROM..TO, such as 2025-03..2025-05, or one slice.")
    return text


@click.group(cls=ProjectGroup, context_settings=CONTEXT)
@click.version_option(package_name="tir_dagster", prog_name="tir")
@click.option(
    "--specs",
    type=click.Path(),
    help="YAML file with extracts and loads, or a dg project's defs folder.  [default: TIR_SPECS]",
)
@click.option(
    "--progress",
    type=click.Choice(["auto", "lines", "json"]),
    help="How progress is shown on standard error: on a terminal a line that lives, else lines; or JSON lines.  [default: auto]",
)
def tir(specs: str | None, progress: str | None) -> None:
    """Tableau incremental refresh on Dagster."""
    begin()
    if specs:
        os.environ["TIR_SPECS"] = specs
    if progress:
        os.environ[FORM_VARIABLE] = progress


MODE_SLICES = click.option(
    "--slices",
    "span",
    metavar="FROM..TO",
    callback=_span,
    help="Re-sync these slices, regardless of the watermark.",
)
MODE_FULL = click.option("--full", is_flag=True, help="Read everything and rebuild the extract.")
HINTS = click.option(
    "--hint",
    "hints",
    multiple=True,
    metavar="JSON|@FILE",
    callback=_hints,
    help="A description of what changed; repeatable.",
)


@tir.command(short_help="Show what a refresh would do, and why.")
@click.argument("extract", required=False)
@MODE_SLICES
@MODE_FULL
@click.option(
    "--explain",
    is_flag=True,
    help="Show how the query is understood: tables, joins, and which changes are refreshed by key.",
)
@AS_JSON
def plan(extract: str | None, span: str | None, *, full: bool, explain: bool, as_json: bool) -> None:
    """Show what a refresh of EXTRACT would move, what it would take, and why. Without EXTRACT: a line for each extract.

    Nothing is changed and Spark is not started. The warehouse counts, for at most a minute.
    """
    mode, specs = _mode(span, full=full), load_specs()
    if extract is None:
        if span or full or explain:
            raise click.UsageError("Name the extract: --slices, --full and --explain are about one.")
        _plan_all(specs, as_json=as_json)
        return
    spec = find_declared(specs, extract, "extract")
    with working(f"tir plan {extract}"):
        from tir_dagster.cli.refresh import chosen_slices, command

        slices = chosen_slices(spec, span)
        with command(spec, tell) as running:
            outlook = running.outlook(mode, slices, explain=explain)
    click.echo(json.dumps(outlook.as_dict(slices)) if as_json else "\n".join(outlook.lines()))


def _plan_all(specs: Sequence[ExtractSpec], *, as_json: bool) -> None:
    """Print the plan of each extract."""
    if not specs and not as_json:
        click.echo(nothing_declared())
        return
    plans: list[dict[str, Any]] = []
    failed = 0
    from tir_dagster.cli.overview.planning import one_line

    for spec, outlook in _each(specs, "plan", lambda running: running.outlook("changes", ())):
        if isinstance(outlook, TirError):
            failed += 1
            plans.append({"extract": spec.name, "error": str(outlook)})
            line = f"{spec.name}: {click.style('there is no plan', fg='red')}: {outlook}"
        else:
            plans.append(outlook.as_dict(()))
            line = one_line(outlook)
        if not as_json:
            click.echo(line)
    if as_json:
        click.echo(json.dumps({"extracts": plans}))
    if failed:
        raise click.exceptions.Exit(1)


def _each(
    specs: Sequence[ExtractSpec], verb: str, work: Callable[[Command], Result]
) -> Iterator[tuple[ExtractSpec, Result | TirError]]:
    """Yield each extract with the result of the work, or with its error: what is wrong with one of them does not hide the others."""
    from tir_dagster.cli.refresh import command

    for number, spec in enumerate(specs, start=1):
        result: Result | TirError
        try:
            with working(f"tir {verb} {spec.name}"):
                if len(specs) > 1:
                    tell(f"{spec.name}, {number} of {len(specs)}")
                with command(spec, tell) as running:
                    result = work(running)
        except StoppedError:
            raise
        except TirError as error:
            result = error
        yield spec, result


@tir.command(short_help="Show the state of all extracts and loads.")
@click.option("--watch", is_flag=True, help="Show it again every five seconds, until Ctrl-C.")
@AS_JSON
def status(*, watch: bool, as_json: bool) -> None:
    """Show all extracts and loads: last refresh, data as of, pending changes, holds, open problems, and whether sensors watch them.

    Reads Dagster's log and the state folder only. Exit code 1 if one of them needs attention.
    """
    declared = load_declared()
    if not (declared.extracts or declared.loads or as_json):
        click.echo(nothing_declared())
        return
    while True:
        with working("tir status", doing="reading Dagster's log and the state folder"):
            from tir_dagster.cli.overview.status import read_status, status_lines
            from tir_dagster.orchestration.home import dagster_instance

            with dagster_instance() as instance:
                shown = read_status(declared, instance)
        if watch and not as_json:
            click.clear()
        click.echo(json.dumps(shown.as_dict()) if as_json else "\n".join(status_lines(shown, datetime.now(UTC))))
        if not watch:
            break
        time.sleep(_WATCH_SECONDS)
    if shown.attention:
        raise click.exceptions.Exit(1)


@tir.command(short_help="Write a page about the refreshes of an extract.")
@click.argument("extract")
@click.option(
    "--to",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file.  [default: report.html beside the state]",
)
@click.option("--open", "is_opened", is_flag=True, help="Also open it in a browser.")
@AS_JSON
def report(extract: str, *, target: Path | None, is_opened: bool, as_json: bool) -> None:
    """Write one HTML page about EXTRACT: what each refresh moved and how long it took, freshness, verification, problems.

    It reads Dagster's log and the state folder only. The page needs no network. It shows no rows, but
    names of slices, and warnings that may name keys.
    """
    spec = find_declared(load_specs(), extract, "extract")
    with working(f"tir report {extract}", doing="reading the history of its refreshes"):
        from tir_dagster.cli.overview.report import write_report
        from tir_dagster.orchestration.home import dagster_instance

        with dagster_instance() as instance:
            file = write_report(spec, instance, target)
    click.echo(json.dumps({"extract": extract, "file": str(file)}) if as_json else str(file))
    if is_opened:
        click.launch(str(file))


@tir.command(short_help="Find what changed, replace it, publish.")
@click.argument("extract", required=False)
@click.option("--all", "is_all", is_flag=True, help="Refresh every extract of the spec file, one after another.")
@MODE_SLICES
@MODE_FULL
@click.option("--allow-empty", is_flag=True, help="Continue even if the source is empty or lost many rows.")
@HINTS
@click.option("--profile", is_flag=True, help="Also show each stage: seconds, rows, bytes, and what it waited for.")
@AS_JSON
def refresh(
    extract: str | None,
    span: str | None,
    *,
    is_all: bool,
    full: bool,
    allow_empty: bool,
    hints: tuple[str, ...],
    profile: bool,
    as_json: bool,
) -> None:
    """Refresh EXTRACT: find what changed, replace those keys, publish. Exit code 1 if it fails.

    With --all, one that fails does not keep the others from their refresh; exit code 1 if any failed.
    """
    mode, specs = _mode(span, full=full), load_specs()
    if is_all:
        if extract or span or hints:
            raise click.UsageError("--all refreshes every extract: leave the name, --slices and --hint out.")
        _refresh_all(specs, mode, allow_empty=allow_empty, profile=profile, as_json=as_json)
        return
    if extract is None:
        names = ", ".join(spec.name for spec in specs)
        which = f"The spec file declares {names}." if names else nothing_declared()
        raise click.UsageError(
            f"Name the extract to refresh, or --all. {which} tir plan shows what each of them would move."
        )
    spec = find_declared(specs, extract, "extract")
    with working(f"tir refresh {extract}", of="--full" if full else ""):
        from tir_dagster.cli.refresh import chosen_slices, command

        slices = chosen_slices(spec, span)
        with command(spec, tell) as running:
            outcome = running.refresh(mode, slices, allow_empty=allow_empty, hints=hints)
    click.echo(json.dumps(outcome.as_dict()) if as_json else _outcome_text(spec, outcome, elapsed()))
    if profile:
        _print_profile(outcome)


def _refresh_all(specs: Sequence[ExtractSpec], mode: Mode, *, allow_empty: bool, profile: bool, as_json: bool) -> None:
    """Refresh each extract and print what became of it, then a summary."""
    if not specs:
        raise click.UsageError(nothing_declared())
    outcomes: list[dict[str, Any]] = []
    counts = {"refreshed": 0, "with nothing to do": 0, "failed": 0}
    for spec, outcome in _each(specs, "refresh", lambda running: running.refresh(mode, (), allow_empty=allow_empty)):
        if isinstance(outcome, TirError):
            counts["failed"] += 1
            outcomes.append({"extract": spec.name, "error": str(outcome)})
            text = f"{spec.name}: {click.style('failed', fg='red')}: {outcome}"
        else:
            counts["with nothing to do" if outcome.decision == "none" else "refreshed"] += 1
            outcomes.append(outcome.as_dict())
            text = _outcome_text(spec, outcome, outcome.seconds)
        if not as_json:
            click.echo(text)
        if profile and not isinstance(outcome, TirError):
            _print_profile(outcome)
    if as_json:
        click.echo(json.dumps({"extracts": outcomes}))
    else:
        summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        extracts = "1 extract" if len(specs) == 1 else f"{len(specs)} extracts"
        click.echo(f"{extracts}: {summary} ({elapsed():.1f} s).")
    if counts["failed"]:
        raise click.exceptions.Exit(1)


def _print_profile(outcome: RefreshOutcome) -> None:
    from tir_dagster.refresh.profile import profile_table

    click.echo(profile_table(outcome.profile), err=True)


def _outcome_text(spec: ExtractSpec, outcome: RefreshOutcome, seconds: float) -> str:
    reason = f" ({outcome.reason})" if outcome.reason else ""
    begin, end = f"{spec.name}: {outcome.decision} refresh{reason}", f"({seconds:.1f} s)."
    if outcome.decision == "none":
        sentence = f"{spec.name}: nothing to do {end}"
    elif spec.delivery == "trigger":
        rows = f", {outcome.rows_appended:,} rows" if outcome.rows_appended else ""
        sentence = f"{begin} by Tableau itself{rows} {end}"
    else:
        rows = (
            f"{outcome.rows_purged:,} rows purged, {outcome.rows_appended:,} appended in {len(outcome.slices)} slices"
        )
        sentence = f"{begin}: {rows}, published {end}"
    return "\n".join([*(f"warning: {warning}" for warning in outcome.warnings), sentence])


@tir.command(short_help="Load new files into a table.")
@click.argument("name")
@click.option(
    "--dry-run", is_flag=True, help="Only read the new files and show what the load would do; nothing is changed."
)
@AS_JSON
def load(name: str, *, dry_run: bool, as_json: bool) -> None:
    """Load the new files of the load NAME into its table.

    Exit code 1 if it fails, or with --dry-run would fail; the table is then unchanged.
    """
    declared = load_declared()
    with working(f"tir load {name}"):
        from tir_dagster.cli import load as command

        spec = command.find_load(declared, name)
        preview = command.preview_load(spec, tell) if dry_run else None
        outcome = None if dry_run else command.run_load(spec, tell)
    if preview is not None:
        fields, lines = command.preview_fields(spec, preview), command.preview_lines(spec, preview)
        click.echo(json.dumps(fields) if as_json else "\n".join(lines))
        if preview.problem:
            raise LoadError(preview.problem)
    if outcome is not None:
        click.echo(json.dumps(asdict(outcome)) if as_json else command.outcome_text(outcome))


@tir.command(short_help="Print the JSON schema of spec files.")
def schema() -> None:
    """Print the JSON schema of spec files, by which editors check and complete them."""
    click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@tir.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script by which SHELL completes commands and options.

    For bash: eval "$(tir completion bash)" in ~/.bashrc; zsh likewise; for fish: tir completion fish | source.
    """
    completing = get_completion_class(shell)
    assert completing is not None, "click knows the shells of the choice"
    click.echo(completing(tir, {}, "tir", "_TIR_COMPLETE").source())


@tir.command(short_help="Play a change and its refresh on the sandbox.")
@click.option("--rows", type=click.IntRange(min=1000), default=600_000, show_default=True, help="Orders in the sample.")
@click.option("--seed", type=SEED, default=1, show_default=True, help="Another seed gives other orders and changes.")
@click.option("--verbose", is_flag=True, help="Also show the progress of each refresh.")
@click.option("--fail", "failing", is_flag=True, help="Play a refresh that fails, and show the messages about it.")
def demo(rows: int, seed: int, *, verbose: bool, failing: bool) -> None:
    """Play a change and its refresh on the sandbox. Exit code 0 only if every slice equals the source."""
    from tir_dagster.cli.demo.play import run_demo, run_failing_demo

    play = run_failing_demo if failing else run_demo
    with stopping("tir demo", _sandbox_left), working("tir demo", of=f"{rows} rows{' --fail' if failing else ''}"):
        succeeded = play(rows=rows, seed=seed, say=click.echo, progress=tell if verbose else lambda _: None)
    if not succeeded:
        problem = "The incident was not resolved" if failing else "The refreshed datasource differs from the source"
        raise click.ClickException(f"{problem}. Run the demo again with --verbose to see the refreshes.")


def _sandbox_left() -> str:
    return "The sandbox servers keep running; tir sandbox down stops them."


@tir.command(short_help="Open Dagster's UI on the sandbox.")
@click.option("--port", type=PORT, default=3000, show_default=True, help="Port of the page.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address the page is served on.")
def dev(port: int, host: str) -> None:
    """Open Dagster's UI and daemon on the sandbox, with the history of the commands run here. Ctrl-C ends both.

    Starts and seeds the sandbox if needed. Shows the extracts of TIR_SPECS if it is set, otherwise the sample's.
    """
    from tir_dagster.cli.dev import prepare_sandbox, run_dagster

    with stopping("tir dev", _sandbox_left), working("tir dev"):
        prepare_sandbox(click.echo)
    os.environ.setdefault("TIR_DAGSTER_URL", f"http://{host}:{port}")
    click.echo(f"Slack and ServiceNow: {os.environ['SERVICENOW_URL']} (messages and incidents)")
    click.echo(f"Dagster's UI: http://{host}:{port} (turn the sensors on under Automation)")
    click.echo(f"Ctrl-C ends Dagster. {_sandbox_left()}")
    run_dagster(port, host)


for command in (
    init,
    adopt,
    doctor,
    verify,
    history,
    why,
    rollback,
    release,
    revisions,
    sandbox,
    spark,
    webhooks,
    probe_server,
):
    tir.add_command(command)


@tir.command("warm-up", short_help="Make Spark start faster.")
def warm_up() -> None:
    """Make Spark start faster: store the Java classes that it loads, about 180 MB under TIR_HOME.

    Takes a minute, once for each version of Spark. Useful where every run starts its own process.
    """
    from tir_dagster.orchestration.home import tir_home
    from tir_dagster.spark.java import require_java
    from tir_dagster.spark.session import build_class_archive

    require_java(os.environ)
    with working("tir warm-up"):
        archive = build_class_archive(home=tir_home())
    click.echo(f"{archive}: {archive.stat().st_size / 1e6:,.0f} MB. Spark uses it from the next start.")


def _mode(span: str | None, *, full: bool) -> Any:
    if span and full:
        raise click.UsageError("--slices and --full exclude each other. Use only one of them.")
    return "full" if full else "slices" if span else "changes"


def _forget_failed_cancellations(failure: threading.ExceptHookArgs) -> None:
    # When the warehouse is unreachable, the connector's own thread also fails to cancel the query. The command has
    # already reported that in one line; this would add a page of traceback.
    if not failure.exc_type.__module__.startswith("snowflake."):
        threading.__excepthook__(failure)


def main() -> None:
    """The entry point of the `tir` command."""
    threading.excepthook = _forget_failed_cancellations
    no_core_files()
    watch_signals()
    tir(prog_name="tir")


if __name__ == "__main__":
    main()
