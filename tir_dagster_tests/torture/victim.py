"""The process that is tortured: it plays one refresh, rollback or load, and stops at a crash point until it is told to go on.

It is forked from a server that has everything imported and nothing open, so that a kill costs no start of Python.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import boto3  # noqa: F401 - imported once, not in every victim
import pandas as pd  # noqa: F401
import pyspark.sql  # noqa: F401
import snowflake.connector  # noqa: F401
import tableauhyperapi  # noqa: F401

from tir_dagster import crash_points
from tir_dagster.errors import TirError
from tir_dagster.files import replaced_file
from tir_dagster.hyper.engine import close_shared_engine
from tir_dagster.loading.load import Loader
from tir_dagster.loading.staging import right_here
from tir_dagster.refresh import rollback
from tir_dagster.refresh.state.change_sets import new_id
from tir_dagster.refresh.state.mirror import mount
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spark.session import jvm_output, spark_session
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec
from tir_dagster.tableau.access import TableauAccess
from tir_dagster_tests.orchestration.pace import quickly
from tir_dagster_tests.stages import Refresher

# By this variable the torturer knows the victim's own processes, such as hyperd, also when the victim is gone.
MARK_VARIABLE = "TIR_TORTURE"
LEASE_SECONDS = 120.0


@dataclass(frozen=True)
class Task:
    """What a victim does, and where it stops."""

    kind: str
    spec: ExtractSpec | LoadSpec
    env: Mapping[str, str]
    home: Path
    mark: str
    # Stop when this point is reached for the nth time.
    point: str = ""
    nth: int = 1
    # Of a rollback: where to, and whether to hold.
    to: str = ""
    hold: bool = False
    # Rows go through Spark, however few they are.
    spark: bool = False
    # How far this machine's clock is from the server's.
    hours_ahead: float = 0.0
    # How many times to do it; all but the first are to find nothing to do.
    times: int = 1
    # Where several workers share the state: the folder of the file that stands for Dagster's log, and the address of the state.
    log: Path | None = None
    state: str = ""


@dataclass(frozen=True)
class Outcome:
    """How one refresh, rollback or load ended."""

    decision: str
    reason: str | None = None
    published: bool = False


def confirmation_file(home: Path) -> Path:
    """The file that stands for Dagster's log: it holds the last confirmation."""
    return home / "confirmed.json"


def read_confirmation(home: Path) -> Confirmation | None:
    file = confirmation_file(home)
    return Confirmation.from_json(file.read_text(encoding="utf-8")) if file.is_file() else None


def record(home: Path, confirmation: Confirmation) -> None:
    with replaced_file(confirmation_file(home)) as beside:
        beside.write_text(confirmation.to_json(), encoding="utf-8")


def run(task: Task, channel: Connection) -> None:
    """Do the task; tell through the channel when the point is reached and how it ended."""
    os.environ.update(task.env)
    os.environ[MARK_VARIABLE] = task.mark
    os.environ["TMPDIR"] = str(task.home / "tmp")
    tempfile.tempdir = None
    # Also small packages are uploaded in parts.
    os.environ["TSC_FILESIZE_LIMIT_MB"] = "0"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if task.spark:
        os.environ["TIR_SPARK_ROWS"] = "0"
    if task.state:
        mount(task.home, task.state)
    if task.point:
        _stop_at(task, channel)
    try:
        play = {"refresh": _refresh, "rollback": _roll_back, "load": _load}[task.kind]
        channel.send(("done", [play(task) for _ in range(task.times)]))
    except Exception as error:
        # The commands explain these two; others would be a traceback.
        kind = "failed" if isinstance(error, (TirError, OSError)) else "failed unexpectedly"
        channel.send((kind, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))[-4000:]))
    finally:
        close_shared_engine()
        sys.stdout.flush()


def _stop_at(task: Task, channel: Connection) -> None:
    left = task.nth

    def stop() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            channel.send(("at", task.point))
            channel.recv()

    os.environ[crash_points.CRASH_VARIABLE] = task.point
    crash_points.end_process = stop


def _no_spark() -> Any:
    raise AssertionError("so few rows need no Spark")


def _refresher(task: Task) -> Refresher:
    assert isinstance(task.spec, ExtractSpec)
    start_spark: Callable[[], Any] = _no_spark
    if task.spark:

        def start_spark() -> Any:
            with jvm_output(task.home):
                return spark_session("torture", home=task.home)

    return Refresher(
        task.spec,
        snowflake=SnowflakeAccess.from_environment(task.env),
        tableau=TableauAccess.from_environment(task.env),
        spark=start_spark,
        home=task.home,
        env=task.env,
        now=lambda: datetime.now(UTC) + timedelta(hours=task.hours_ahead),
    )


def _confirm(task: Task, refresher: Refresher, confirmation: Confirmation) -> None:
    record(task.log or task.home, confirmation)
    refresher.settle(confirmation)


def _refresh(task: Task) -> Outcome:
    refresher = _refresher(task)
    with (
        quickly(task.env["TABLEAU_SERVER_URL"]),
        refresher.leased("torture", wait_seconds=LEASE_SECONDS),
    ):
        looked = refresher.look(read_confirmation(task.log or task.home))
        if looked.late is not None:
            _confirm(task, refresher, looked.late)
            looked = replace(looked, late=None)
        surveyed = refresher.survey(looked)
        plan = refresher.plan(looked, surveyed, "changes")
        if plan.decision == "none":
            return Outcome("none")
        plan, change_set = refresher.detect(looked, surveyed, plan, ident=new_id(), allow_empty=True)
        if change_set is None:
            return Outcome("none")
        published = refresher.publish(looked, refresher.apply(looked, change_set))
        _confirm(task, refresher, published.confirmation)
        return Outcome(change_set.decision, refresher.full_reason or change_set.reason, published=True)


def _roll_back(task: Task) -> Outcome:
    refresher = _refresher(task)
    with (
        quickly(task.env["TABLEAU_SERVER_URL"]),
        refresher.leased("torture", wait_seconds=LEASE_SECONDS),
    ):
        looked = refresher.look(read_confirmation(task.log or task.home))
        if looked.late is not None:
            _confirm(task, refresher, looked.late)
        context = refresher.context
        planned = rollback.plan_rollback(context, looked, task.to)
        with rollback.held(context, by="the torturer", reason="a test" if task.hold else ""):
            version = rollback.make_version(context, looked, planned)
            published = rollback.publish_again(context, looked, version)
        _confirm(task, refresher, published.confirmation)
        return Outcome("rollback", published=True)


def _load(task: Task) -> Outcome:
    assert isinstance(task.spec, LoadSpec)
    access = SnowflakeAccess.from_environment(task.env)
    loaded = Loader(task.spec, access=access, stager=right_here, after=crash_points.crash_after).run()
    return Outcome("loaded" if loaded.load_id else "none")
