"""`tir demo`: the sandbox, a change, and three refreshes side by side; ends well only if every slice is equal."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tir_dagster.comparison import Comparison, compare_slices, published_extract, snowflake_of
from tir_dagster.datasource.access import TableauAccess
from tir_dagster.datasource.client import TableauClient
from tir_dagster.datasource.jobs import start_refresh, wait_for_job
from tir_dagster.datasource.republish import look_at_server
from tir_dagster.extract.engine import connect
from tir_dagster.orchestration.commands import Outcome, command
from tir_dagster.sandbox import processes, sample
from tir_dagster.sandbox.home import SandboxHome
from tir_dagster.source.connection import SnowflakeAccess
from tir_dagster.source.names import TableName
from tir_dagster.spec import ExtractSpec, parse_specs

TWIN = "mydatasource_by_tableau"
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
"""

Say = Callable[[str], None]


def run_demo(*, rows: int, seed: int, say: Say, progress: Say) -> bool:
    """Play the demo; True if the refreshed datasource equals the source in every slice."""
    home = SandboxHome.from_environment()
    say("1. The sandbox: an embedded Snowflake and a Tableau Server stand-in")
    processes.start(home)
    env = processes.environment(home)
    os.environ.update(env)
    until = sample.parse_month(None)
    sample.seed_table(env, rows=rows, seed=seed, until=until)
    for name in (sample.DATASOURCE, TWIN):
        sample.seed_datasource(env, timeout=900, name=name)
    say(f"   {rows:,} orders in {sample.TABLE}; two datasources show them: mydatasource and {TWIN}")
    spec = declare_orders(env, home.root.parent / "demo.yaml")

    say("2. First load: mydatasource is taken over")
    first = _refresh(spec, "full", progress)
    say(f"   {first.rows_appended:,} rows in {first.seconds:.1f} s ({first.reason})")

    say("3. A day of business: inserts, late arrivals, updates of old months, moves, deletes")
    account = sample.change_table(env, seed=seed + 1, mix=sample.Mix())
    say(_indented(account.as_text()))

    say("4. Refresh by key: only what changed moves")
    second = _refresh(spec, "changes", progress)
    share = 100 * second.rows_appended / max(account.rows_after, 1)
    say(
        f"   {second.decision}: {second.rows_purged:,} rows purged, {second.rows_appended:,} appended ({share:.1f} % of the table)"
    )
    say(f"   in {len(second.slices)} slices, {second.seconds:.1f} s, of which {_stages(second)}")
    say(f"   the same by Tableau's own incremental refresh, on {TWIN}: {_tableau_increment(spec):.1f} s")

    say("5. What do people see? Every slice of the published extracts beside the source")
    ours = _compare(spec, env)
    twin = _compare(replace(spec, datasource=replace(spec.datasource, name=TWIN)), env)
    for name, (found, wrong) in ((sample.DATASOURCE, ours), (TWIN, twin)):
        verdict = "equal in every slice" if found.equal else f"wrong in {found.different} of {found.slices} slices"
        say(f"   {name:<26} {found.rows:>9,} rows, {wrong:>6,} of them wrong or missing: {verdict}")

    say("6. Beside a full refresh of the same data by the same pipeline")
    full = _refresh(spec, "full", progress)
    say(
        f"   full {full.seconds:.1f} s and {full.rows_appended:,} rows read; by key {second.seconds:.1f} s and {second.rows_appended:,}"
    )
    say(f"Where to look next: the spec {home.root.parent / 'demo.yaml'}; tir sandbox change; tir refresh orders.")
    found, wrong = ours
    return found.equal and wrong == 0


def declare_orders(env: Mapping[str, str], file: Path) -> ExtractSpec:
    """Declare the sample's extract in this file, and make it the spec file of this process."""
    access = SnowflakeAccess.from_environment(env)
    first = access.query(f"SELECT MIN(ORDER_DATE) FROM {sample.TABLE}")[0][0]
    text = _SPEC.format(file=file, start=f"{first:%Y-%m}")
    file.write_text(text, encoding="utf-8")
    os.environ["TIR_SPECS"] = str(file)
    return parse_specs(text, str(file))[0]


def _refresh(spec: ExtractSpec, mode: Any, progress: Say) -> Outcome:
    with command(spec, progress) as running:
        return running.refresh(mode, (), allow_empty=False)


def _tableau_increment(spec: ExtractSpec) -> float:
    begun = time.monotonic()
    with TableauClient(TableauAccess.from_environment(os.environ)) as client:
        found = look_at_server(client, replace(spec, datasource=replace(spec.datasource, name=TWIN))).found
        assert found is not None, "the demo published it"
        started = start_refresh(client, found, incremental=True)
        wait_for_job(client, started.job_id, what="Tableau's own incremental refresh")
    return time.monotonic() - begun


def _compare(spec: ExtractSpec, env: Mapping[str, str]) -> tuple[Comparison, int]:
    """What is published beside the source: slice by slice, and how many rows are wrong or missing."""
    with published_extract(spec, env) as hyper:
        return compare_slices(hyper, spec, env), _wrong_rows(hyper, spec, env)


def _wrong_rows(hyper: Path, spec: ExtractSpec, env: Mapping[str, str]) -> int:
    with connect(hyper) as connection:
        listed = 'SELECT "ORDER_ID", CAST("UPDATED_AT" AS TEXT) FROM "Extract"."Extract"'
        shown = Counter((row[0], _moment(row[1])) for row in connection.execute_list_query(listed))
    listed = f"SELECT ORDER_ID, UPDATED_AT FROM {TableName.parse(spec.source).sql}"
    source = Counter((row[0], _moment(str(row[1]))) for row in snowflake_of(spec, env).query(listed))
    return len(({key for key, _ in (shown - source)}) | ({key for key, _ in (source - shown)}))


def _moment(text: str) -> str:
    """A timestamp without the zeros that one side writes and the other does not."""
    return text.rstrip("0").rstrip(".") if "." in text else text


def _stages(outcome: Outcome) -> str:
    named = sorted(outcome.stages.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in named)


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.splitlines())
