"""`tir dev`: Dagster's UI and daemon on the sandbox, with the history that the command line writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from tir_dagster.cli.demo.play import declare_orders, start_sandbox
from tir_dagster.orchestration.home import dagster_home
from tir_dagster.sandbox import sample
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.versions import probe
from tir_dagster.spec.reading import SPECS_VARIABLE

ROWS = 20_000


def prepare_sandbox(say: Callable[[str], None]) -> None:
    """Start the sandbox, seed its sample and set the environment; leave what already exists unchanged."""
    file, env = start_sandbox()
    table = TableName.parse(sample.TABLE)
    if probe(SnowflakeAccess.from_environment(env), [table])[table].token is None:
        file.unlink(missing_ok=True)
        say(f"seeding {ROWS:,} orders in {sample.TABLE}, and the datasource {sample.DATASOURCE!r}")
        sample.seed_table(env, rows=ROWS, seed=1, until=sample.parse_month(None))
        sample.seed_datasource(env, timeout=900)
    if os.environ.get(SPECS_VARIABLE):
        return
    if file.is_file():
        os.environ[SPECS_VARIABLE] = str(file)
    else:
        declare_orders(env, file)


def run_dagster(port: int, host: str) -> None:
    """Replace this process by `dagster dev`, so that Ctrl-C and signals reach it."""
    dagster_home()
    command = [str(Path(sys.executable).with_name("dagster")), "dev", "-m", "tir_dagster.definitions"]
    os.execv(command[0], [*command, "--port", str(port), "--host", host])  # noqa: S606 - no shell is wanted
