"""What commands share: the Dagster jobs of an extract or load, run in the command's own process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import click
import dagster as dg
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

from tir_dagster.orchestration.names import LAUNCHED_BY, TOLD_BY_COMMAND
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec

# The console shows the command's progress instead of Dagster's log, which is in the history.
_CONSOLE = "console"
# As `dagster dev -m tir_dagster.definitions` calls them.
_LOCATION, _REPOSITORY = "tir_dagster.definitions", "__repository__"


def command_tags(run_id: str) -> dict[str, str]:
    """Return the tags of a run that a command launches and reports itself."""
    context = click.get_current_context(silent=True)
    return {TOLD_BY_COMMAND: run_id, **({LAUNCHED_BY: f"tir {context.info_name}"} if context else {})}


class JobRunner:
    """Runs the jobs of extracts and loads in this process: their log lines become progress, each once, and warnings."""

    def __init__(
        self,
        instance: dg.DagsterInstance,
        progress: Callable[[str], None],
        *,
        extracts: Sequence[ExtractSpec] = (),
        loads: Sequence[LoadSpec] = (),
    ) -> None:
        self.instance, self._extracts, self._loads = instance, extracts, loads
        self._handler = _LineHandler(progress)

    @cached_property
    def definitions(self) -> dg.Definitions:
        """The definitions of the extracts and loads, built once for all runs."""
        # Imported here: a plan needs no job.
        from tir_dagster.orchestration.build import build_defs

        @dg.logger
        def command_logger(_: dg.InitLoggerContext) -> logging.Logger:
            logger = logging.Logger("tir", logging.INFO)  # noqa: LOG001 - one for each run, in nobody else's tree
            logger.addHandler(self._handler)
            return logger

        return build_defs(specs=self._extracts, loads=self._loads, loggers={_CONSOLE: command_logger})

    def run(self, job: str, *, config: Any = None, **options: Any) -> dg.ExecuteInProcessResult:
        """Run the job; raise its error if it fails. The options are those of `execute_in_process`."""
        definition = self.definitions.resolve_job_def(job)
        with _listed_in_ui(self.instance, job):
            return definition.execute_in_process(
                run_config={**(config or {}), "loggers": {_CONSOLE: {}}}, instance=self.instance, **options
            )

    def take_warnings(self) -> list[str]:
        """Return the warnings since the last call, each sentence once."""
        warnings, self._handler.warnings = list(dict.fromkeys(self._handler.warnings)), []
        return warnings


@contextmanager
def _listed_in_ui(instance: dg.DagsterInstance, job: str) -> Iterator[None]:
    """Name the code location of `tir dev` on the run: else Dagster's timeline and the job's page would leave it out."""
    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin(_LOCATION), _REPOSITORY)
    create = instance.create_run_for_job
    instance.create_run_for_job = partial(create, remote_job_origin=RemoteJobOrigin(repository, job))  # type: ignore[method-assign]
    try:
        yield
    finally:
        del instance.create_run_for_job  # the class has it


class _LineHandler(logging.Handler):
    """Passes the log lines of a run's steps on. Dagster's own events are in its history."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        super().__init__()
        self._progress = progress
        self._lines: set[str] = set()
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        meta = getattr(record, "dagster_meta", {})
        line = meta.get("orig_message")
        if meta.get("dagster_event") is not None or not line:
            return
        if record.levelno >= logging.WARNING:
            self.warnings.append(line)
        elif line not in self._lines:
            self._lines.add(line)
            self._progress(line)


def asset_events(result: dg.ExecuteInProcessResult, asset: dg.AssetKey) -> Iterator[dict[str, Any]]:
    """Yield the metadata of the run's materializations and observations of the asset, in their order."""
    for entry in result.all_events:
        data = entry.event_specific_data
        event = getattr(data, "materialization", None) or getattr(data, "asset_observation", None)
        if event is not None and event.asset_key == asset:
            yield {name: getattr(value, "value", None) for name, value in event.metadata.items()}


def first_event(result: dg.ExecuteInProcessResult, asset: dg.AssetKey) -> dict[str, Any]:
    return next(asset_events(result, asset), {})
