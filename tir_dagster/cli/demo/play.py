"""`tir demo`: load a file, change the sample twice, refresh, and compare; succeeds only if every slice is equal."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tir_dagster.cli.demo.comparison import SliceComparison, compare_slices, published_extract, snowflake_of
from tir_dagster.cli.demo.files import LOADS, Say, last_metadata, play_files
from tir_dagster.cli.demo.people import is_resolved, last_incident, last_message, open_incident, refusing_publishes
from tir_dagster.cli.refresh import Command, RefreshOutcome
from tir_dagster.errors import TirError
from tir_dagster.hyper.engine import connect
from tir_dagster.orchestration.alerts.runs import URL_VARIABLE
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.refresh.datasource import look_at_server
from tir_dagster.sandbox import processes, sample
from tir_dagster.sandbox.home import SandboxHome
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import load_declared, parse_specs
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.jobs import wait_for_job
from tir_dagster.tableau.refreshes import start_refresh

# Where `make dev` opens Dagster's UI, for the links in messages.
DEV_URL = "http://127.0.0.1:3000"
TWIN = "mydatasource_by_tableau"
SERVED = "mydatasource_by_server"
# Stages whose time depends on how many rows move.
_MOVING = {"detect", "apply", "verify", "publish"}
# The typical case for the delivery `server`: a change in the newest months, where every row has a date.
RECENT, RECENT_MIX = 2, sample.Mix(inserts=40, updates=30, moves=10, deletes=20)
_SPEC = """\
# The sample's extract. Try: tir --specs {file} plan orders
extracts:
  - name: orders
    source: MYDB.MYSCHEMA.MYTABLE
    row_key: ORDER_ID
    slices: {{column: ORDER_DATE, by: month, start: {start}}}
    changes: {{watermark: UPDATED_AT, look_back: 10 minutes}}
    datasource:
      project: myproject
      name: mydatasource
      credentials: {{username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}}
    alerts:
      slack: {{channel: "#mychannel"}}
      servicenow: {{group: mygroup}}
"""
_SERVED = """\
  - name: orders_by_server
    source: MYDB.MYSCHEMA.MYTABLE
    row_key: ORDER_ID
    slices: {{column: ORDER_DATE, by: month, start: {start}}}
    changes: {{watermark: UPDATED_AT, look_back: 10 minutes}}
    delivery: server
    datasource:
      project: myproject
      name: {served}
      credentials: {{username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}}
"""


def start_sandbox() -> tuple[Path, dict[str, str]]:
    """Start the sandbox and set this process's environment; return the path of the sample's spec file, and the variables."""
    home = SandboxHome.from_environment()
    processes.start(home)
    env = processes.environment(home)
    os.environ.update(env)
    return home.root.parent / "demo.yaml", env


def _set_up(*, rows: int, seed: int, datasources: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """Start and seed the sandbox; return the path of the spec file, and the variables."""
    file, env = start_sandbox()
    os.environ.setdefault(URL_VARIABLE, DEV_URL)
    sample.seed_table(env, rows=rows, seed=seed, until=sample.parse_month(None))
    for name in datasources:
        sample.seed_datasource(env, timeout=900, name=name)
    return file, env


def run_demo(*, rows: int, seed: int, say: Say, progress: Say) -> bool:
    """Play the demo; True if both refreshed datasources equal the source in every slice."""
    begun = time.monotonic()
    say("1. The sandbox: an embedded Snowflake, and stand-ins for Tableau Server, S3, Slack and ServiceNow")
    file, env = _set_up(rows=rows, seed=seed, datasources=(sample.DATASOURCE, SERVED, TWIN))
    say(f"   {rows:,} orders in {sample.TABLE}; {sample.DATASOURCE}, {SERVED} and {TWIN} show them")
    spec, served = _declare(env, file, _SPEC + _SERVED + LOADS)

    say(f"2. Full load: {sample.DATASOURCE} is taken over; Spark starts")
    # An earlier demo may have left a larger table; a smaller one is intended here.
    first = _refresh(spec, "changes", progress, allow_empty=True)
    say(f"   {first.outcome.rows_appended:,} rows in {first.outcome.seconds:.1f} s ({first.outcome.reason})")

    say("3. A file lands in the bucket; sensors load it and refresh the datasource")
    (load,) = load_declared().loads
    play_files(spec, load, SnowflakeAccess.from_environment(env), env, say=say, progress=progress)

    say("4. A day of business, in one transaction")
    account = sample.change_table(env, seed=seed + 1, mix=sample.Mix())
    say(_indented(account.as_text()))

    say("5. Refresh by key: only what changed moves")
    by_key = _refresh(spec, "changes", progress)
    say(_indented(_slices_text(by_key)))
    say(f"   {by_key.outcome.seconds:.1f} s, of which {_stages(by_key.outcome)}")
    say(f"   {TWIN} gets Tableau's own incremental refresh instead: {_tableau_increment(spec):.1f} s")

    say("6. What do people see? Every slice of the published extracts, downloaded, beside the source")
    refreshed = _compare(spec, env)
    twin = _compare(replace(spec, datasource=replace(spec.datasource, name=TWIN)), env)
    for name, comparison in ((sample.DATASOURCE, refreshed), (TWIN, twin)):
        say(_verdict(name, *comparison))

    say("7. Beside a full refresh of the same data by the same pipeline")
    say(_indented(_beside(by_key, _refresh(spec, "full", progress))))
    both_equal = _by_server(spec, served, env, seed=seed, say=say, progress=progress)
    say(f"9. And people were told: the last message in #mychannel ({env['SERVICENOW_URL']} shows them all)")
    say(_indented(last_message(env)))
    say(f"Done in {time.monotonic() - begun:.0f} s. Where to look next:")
    shown_file = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    for line in (
        "make dev                          the runs of this demo in Dagster's UI",
        'eval "$(tir sandbox env)"         point this shell at the sandbox, then',
        "tir sandbox change --seed 7       change the table again",
        f"tir --specs {shown_file} refresh orders",
        "tir demo --fail                   a refresh that fails: who hears of it, and how it ends",
        "tir sandbox down                  stop the servers",
    ):
        say(f"   {line}")
    slices, wrong_rows = refreshed
    return slices.equal and wrong_rows == 0 and both_equal


def run_failing_demo(*, rows: int, seed: int, say: Say, progress: Say) -> bool:
    """Play a refresh that fails and one that repairs it; True if the incident opened and was resolved."""
    say("1. The sandbox, and a refresh that works")
    file, env = _set_up(rows=rows, seed=seed, datasources=(sample.DATASOURCE,))
    (spec,) = _declare(env, file, _SPEC)
    # An earlier demo may have left a larger table; a smaller one is intended here.
    _refresh(spec, "changes", progress, allow_empty=True)
    say(_indented(last_message(env)))
    sample.change_table(env, seed=seed + 1, mix=sample.Mix())

    say("2. Tableau Server takes no publishes any more; the next refresh fails")
    with refusing_publishes(env):
        try:
            _refresh(spec, "changes", progress)
        except TirError as error:
            say(f"   tir refresh: {error}")
    say(_indented(last_message(env)))
    say(_indented(last_incident(env)))
    opened = open_incident(env)

    say("3. It takes them again; the same refresh once more")
    _refresh(spec, "changes", progress)
    say(_indented(last_message(env)))
    say(_indented(last_incident(env)))
    say(f"   All of it: {env['SERVICENOW_URL']}")
    return is_resolved(env, opened)


def _by_server(
    spec: ExtractSpec, served: ExtractSpec, env: Mapping[str, str], *, seed: int, say: Say, progress: Say
) -> bool:
    """Compare the deliveries `server` and `republish` on a change in the newest months; True if both equal the source."""
    say(f"8. Let Tableau do the loading: {SERVED} is delivered by `server`, {sample.DATASOURCE} by `republish`")
    first = _refresh(served, "changes", progress)
    say(f"   {SERVED} is taken over: loaded by Tableau in {first.outcome.seconds:.1f} s ({first.outcome.reason})")
    account = sample.change_table(env, seed=seed + 2, mix=RECENT_MIX, recent=RECENT)
    say(f"   A change of the newest {RECENT} months: {account.as_text().splitlines()[-1]}")
    hole_lines: list[str] = []

    def listen(line: str) -> None:
        progress(line)
        hole_lines.extend([line] if line.startswith("publishing without") else [])

    republished, loaded = _refresh(spec, "changes", progress), _refresh(served, "changes", listen)
    say(f"   republish  {republished.outcome.seconds:5.1f} s   {_moved(republished.outcome)}; nobody sees rows missing")
    hole = loaded.outcome.stages.get("publish", 0.0)
    server_text = (
        f"{hole_lines[0].removeprefix('publishing ')}, which takes {hole:.1f} s"
        if hole_lines
        else _moved(loaded.outcome)
    )
    say(f"   server     {loaded.outcome.seconds:5.1f} s   published {server_text}")
    comparisons = {extract.datasource.name: _compare(extract, env) for extract in (spec, served)}
    for name, verdict in comparisons.items():
        say(_verdict(name, *verdict))
    return all(comparison.equal and wrong == 0 for comparison, wrong in comparisons.values())


def _moved(outcome: RefreshOutcome) -> str:
    return f"{outcome.rows_purged:,} rows purged, {outcome.rows_appended:,} appended by key"


def _verdict(name: str, comparison: SliceComparison, wrong_rows: int) -> str:
    verdict = (
        "equal in every slice" if comparison.equal else f"wrong in {comparison.different} of {comparison.slices} slices"
    )
    return f"   {name:<26} {comparison.rows:>9,} rows, {wrong_rows:>6,} of them wrong or missing: {verdict}"


def declare_orders(env: Mapping[str, str], file: Path) -> ExtractSpec:
    """Declare the sample's extract in this file, and make it the spec file of this process."""
    return _declare(env, file, _SPEC)[0]


def _declare(env: Mapping[str, str], file: Path, text: str) -> list[ExtractSpec]:
    access = SnowflakeAccess.from_environment(env)
    first = access.query(f"SELECT MIN(ORDER_DATE) FROM {sample.TABLE}")[0][0]
    text = text.format(file=file, start=f"{first:%Y-%m}", served=SERVED)
    file.write_text(text, encoding="utf-8")
    os.environ["TIR_SPECS"] = str(file)
    return list(parse_specs(text, str(file)))


@dataclass(frozen=True)
class _Refreshed:
    """A refresh and its numbers from Dagster's history."""

    outcome: RefreshOutcome
    slices: Mapping[str, str]
    staged_bytes: int
    extract_bytes: int


def _refresh(spec: ExtractSpec, mode: Any, progress: Say, *, allow_empty: bool = False) -> _Refreshed:
    with dagster_instance() as instance:
        outcome = Command(spec, instance, progress).refresh(mode, (), allow_empty=allow_empty)
        keys = extract_keys(spec)
        staged, extract = (last_metadata(instance, key) for key in (keys.changed_keys, keys.purged_extract))
    return _Refreshed(outcome, staged["tir/slices"], staged["tir/bytes"], extract["tir/bytes"])


def _slices_text(refreshed: _Refreshed) -> str:
    outcome = refreshed.outcome
    lines = [f"{name:<12}{text}" for name, text in refreshed.slices.items()]
    total = f"{outcome.rows_purged:,} purged, {outcome.rows_appended:,} appended"
    return "\n".join([*lines, f"{'together':<12}{total} ({outcome.decision})"])


def _beside(by_key: _Refreshed, full: _Refreshed) -> str:
    def line(what: str, by_key_value: float, full_value: float, form: str) -> str:
        return f"{what:<28}{by_key_value:>12{form}}{full_value:>12{form}}{by_key_value / max(full_value, 0.001):>9.2f}x"

    return "\n".join(
        [
            f"{'':<28}{'by key':>12}{'full':>12}{'ratio':>10}",
            line("seconds", _working_seconds(by_key.outcome), _working_seconds(full.outcome), ".1f"),
            line("  growing with the rows", _growing_seconds(by_key.outcome), _growing_seconds(full.outcome), ".1f"),
            line("  fixed costs", _fixed_seconds(by_key.outcome), _fixed_seconds(full.outcome), ".1f"),
            line("rows appended", by_key.outcome.rows_appended, full.outcome.rows_appended, ","),
            line("bytes staged by Spark", by_key.staged_bytes, full.staged_bytes, ","),
            line("bytes of the extract", by_key.extract_bytes, full.extract_bytes, ","),
            f"(Fixed costs are signing in, looking at both servers and Dagster's bookkeeping, without the {_quiet_seconds(by_key.outcome):.1f} s",
            "until the changed source had been quiet. With more rows only what grows takes longer, and by key it hardly does: make bench)",
        ]
    )


def _tableau_increment(spec: ExtractSpec) -> float:
    begun = time.monotonic()
    with TableauClient(TableauAccess.from_environment(os.environ)) as client:
        datasource = look_at_server(client, replace(spec, datasource=replace(spec.datasource, name=TWIN))).datasource
        assert datasource is not None, "the demo published it"
        started = start_refresh(client, datasource, incremental=True)
        wait_for_job(client, started.job_id, what="Tableau's own incremental refresh")
    return time.monotonic() - begun


def _compare(spec: ExtractSpec, env: Mapping[str, str]) -> tuple[SliceComparison, int]:
    """Compare the published extract with its source; return the slices, and the number of wrong or missing rows."""
    with published_extract(spec, env) as hyper:
        return compare_slices(hyper, spec, env), _wrong_rows(hyper, spec, env)


def _wrong_rows(hyper: Path, spec: ExtractSpec, env: Mapping[str, str]) -> int:
    with connect(hyper) as connection:
        rows = connection.execute_list_query('SELECT "ORDER_ID", "UPDATED_AT" FROM "Extract"."Extract"')
    extract_rows = Counter((order_id, updated_at.to_datetime()) for order_id, updated_at in rows)
    rows = snowflake_of(spec, env).query(f"SELECT ORDER_ID, UPDATED_AT FROM {TableName.parse(spec.source).sql}")
    source_rows = Counter((order_id, updated_at) for order_id, updated_at in rows)
    return len({order_id for order_id, _ in (extract_rows - source_rows) + (source_rows - extract_rows)})


def _quiet_seconds(outcome: RefreshOutcome) -> float:
    """The seconds spent waiting until the source had been quiet."""
    return sum(stage.waited_for.get("quiet period", 0.0) for stage in outcome.profile)


def _working_seconds(outcome: RefreshOutcome) -> float:
    return outcome.seconds - _quiet_seconds(outcome)


def _fixed_seconds(outcome: RefreshOutcome) -> float:
    """The seconds that a refresh of any size takes."""
    return _working_seconds(outcome) - _growing_seconds(outcome)


def _growing_seconds(outcome: RefreshOutcome) -> float:
    """The seconds of the stages that read, replace, compare and send rows."""
    return sum(stage.seconds for stage in outcome.profile if stage.stage in _MOVING)


def _stages(outcome: RefreshOutcome) -> str:
    quiet = _quiet_seconds(outcome)
    stages = {
        **outcome.stages,
        "survey": outcome.stages.get("survey", 0.0) - quiet,
        "waiting for a quiet source": quiet,
    }
    named = sorted(
        ((name, seconds) for name, seconds in stages.items() if name != "publish_server"), key=lambda item: -item[1]
    )
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in named[:3])


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.splitlines())
