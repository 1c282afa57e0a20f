"""The input of a source sensor's tick: the tables' state by one cheap query, shared by sensors, and other news. No Spark."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import dagster as dg

from tir_dagster.orchestration.checks import verified_drift
from tir_dagster.orchestration.metadata import snowflake_url, source_metadata
from tir_dagster.orchestration.names import ExtractKeys
from tir_dagster.orchestration.resources import SnowflakeParam, probing_access
from tir_dagster.orchestration.sensing.upstream import newest_materialization
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.spec.extract import ExtractSpec

if TYPE_CHECKING:
    from tir_dagster.snowflake.connection import SnowflakeAccess
    from tir_dagster.snowflake.names import TableName
    from tir_dagster.snowflake.versions import Probe


# Half of the sensors' interval: an older answer of another sensor is not used.
FRESH_SECONDS = 15.0
# Dagster ends a tick after 60 seconds without any message; a tick reads twice.
READ_SECONDS = 25.0

T = TypeVar("T")


def in_time(action: Callable[[], T], seconds: float = READ_SECONDS) -> T:
    """Run the action; raise SnowflakeDownError if it takes longer, so that the tick can still send alerts."""
    from tir_dagster.snowflake.connection import SnowflakeDownError

    results: list[tuple[bool, Any]] = []

    def act() -> None:
        try:
            results.append((True, action()))
        except Exception as error:
            results.append((False, error))

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise SnowflakeDownError(
            f"Snowflake did not answer within {seconds:g} seconds. Check Snowflake's status and the network."
        )
    succeeded, value = results[0]
    if not succeeded:
        raise value
    result: T = value
    return result


@dataclass
class _Answer:
    """The result of one query, and the sensors that have used it."""

    probes: dict[TableName, Probe]
    at: float
    heard: set[str] = field(default_factory=set)


class SharedProbes:
    """The last answer for each connection to Snowflake, shared by sensors."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: dict[Hashable, _Answer] = {}

    def probe(self, access: SnowflakeAccess, tables: Sequence[TableName], *, asker: str) -> dict[TableName, Probe]:
        """Probe the tables; use the recent answer of another sensor if it has all tables and this sensor has not used it."""
        from tir_dagster.snowflake.versions import probe

        # Another role may see other tables.
        way = (access.account, access.host, access.port, access.user, access.role)
        with self._lock:
            answer = self._answers.get(way)
            if answer is None or not self._is_news(answer, tables, asker):
                answer = _Answer(probe(access, tables), self._clock())
                self._answers[way] = answer
            answer.heard.add(asker)
            return {table: answer.probes[table] for table in tables}

    def _is_news(self, answer: _Answer, tables: Sequence[TableName], asker: str) -> bool:
        fresh = self._clock() - answer.at < FRESH_SECONDS
        return fresh and asker not in answer.heard and set(tables) <= answer.probes.keys()


SHARED = SharedProbes()


def news(instance: dg.DagsterInstance, spec: ExtractSpec, keys: ExtractKeys, confirmed: Confirmation | None) -> str:
    """Return a text that changes with each event after the extract's version that needs a detection, even without a table change.

    These events are: a hint, an upstream materialization, drift that a verification found, a refresh by Tableau that a
    webhook reported, or a rollback.
    """
    if confirmed is None:
        return ""
    from tir_dagster.changes.relation import watched_tables
    from tir_dagster.orchestration.sensing.reported import newest_report
    from tir_dagster.orchestration.sensing.webhooks import refreshed_elsewhere
    from tir_dagster.snowflake.versions import SourceVersion

    since = SourceVersion.parse(confirmed.source_version).moment
    causes = (
        newest_report(instance, watched_tables(spec), since=since, used=confirmed.reports),
        refreshed_elsewhere(instance, spec, keys.published_datasource, since=since),
        newest_materialization(instance, spec, since=since, used=confirmed.reports),
        verified_drift(instance, keys, confirmed),
        # Its change was requested and refreshed before, so the token alone would start nothing.
        f"rollback@{confirmed.version}" if confirmed.rolled_back else None,
    )
    return "".join(f"/{cause}" for cause in causes if cause)


def confirmed_state(confirmed: Confirmation | None) -> str | None:
    return f"{confirmed.known.token}/{confirmed.known.definition}{_role(confirmed.known.role)}" if confirmed else None


def _role(role: str | None) -> str:
    return f"/{role}" if role else ""


class WatchedSource:
    """The source table and the other watched tables at this tick; raises SourceError if they cannot be read. No Spark."""

    def __init__(self, spec: ExtractSpec, snowflake: SnowflakeParam) -> None:
        from tir_dagster.changes.relation import watched_tables
        from tir_dagster.refresh.survey import definition_of, role_of
        from tir_dagster.snowflake.versions import combined_token

        self._spec = spec
        self._access = probing_access(snowflake, spec)
        self._table, *further = watched_tables(spec)
        probes = SHARED.probe(self._access, [self._table, *further], asker=spec.name)
        self.token = combined_token(probes.items())
        # A changed spec is a change, too.
        role = "" if spec.delivery == "trigger" else role_of(spec)
        self.state = f"{self.token}/{definition_of(spec)}{_role(role)}"

    def metadata(self) -> dict[str, Any]:
        from tir_dagster.snowflake.versions import describe, describe_held, table_facts

        named = self._spec.columns
        columns = describe(self._access, self._table, named) if named else describe_held(self._access, self._table)
        url = snowflake_url(self._access.account, self._access.host, self._table)
        return source_metadata(self.token, columns, rows=table_facts(self._access, self._table).rows, url=url)
