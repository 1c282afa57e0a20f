"""The input of a source sensor's tick: the tables' state by one cheap query, shared by sensors, and other news. No Spark."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
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
class _Way:
    """One way to Snowflake: the tables that its sensors need, the last answer about them, and who has used it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    # Those that had a token when they were last probed; the others are probed for their own sensors only.
    tables: set[TableName] = field(default_factory=set)
    missing: set[TableName] = field(default_factory=set)
    probes: dict[TableName, Probe] = field(default_factory=dict)
    at: float = 0.0
    heard: set[str] = field(default_factory=set)

    def probe(self, access: SnowflakeAccess, needed: Sequence[TableName]) -> dict[TableName, Probe]:
        """Probe all tables by one query; only the needed ones where a table of another extract makes it fail."""
        from tir_dagster.snowflake.connection import SnowflakeDownError, SnowflakeError
        from tir_dagster.snowflake.versions import probe

        apart = [table for table in needed if table in self.missing]
        together = sorted({*self.tables, *needed} - {*apart}, key=str)
        try:
            probes = probe(access, together)
        except SnowflakeDownError:
            raise
        except SnowflakeError:
            probes = probe(access, [table for table in needed if table not in self.missing])
        for table in apart:
            probes |= probe(access, [table])
        with_token = {table for table, table_probe in probes.items() if table_probe.token is not None}
        self.missing = (self.missing | probes.keys()) - with_token
        self.tables = (self.tables | with_token) - self.missing
        return probes


class SharedProbes:
    """The last answer for each way to Snowflake: one query about the tables of all its sensors, shared by them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ways: defaultdict[Hashable, _Way] = defaultdict(_Way)

    def probe(self, access: SnowflakeAccess, tables: Sequence[TableName], *, asker: str) -> dict[TableName, Probe]:
        """Probe the tables; use the recent answer to another sensor if it has them and this sensor has not used it."""
        # Another role may see other tables.
        way = self._ways[access.account, access.host, access.port, access.user, access.role]
        # While one account or role does not answer, the sensors of the others go on.
        with way.lock:
            fresh = self._clock() - way.at < FRESH_SECONDS and asker not in way.heard
            if not (fresh and way.probes.keys() >= set(tables)):
                way.probes, way.at, way.heard = way.probe(access, tables), self._clock(), set()
            way.heard.add(asker)
            return {table: way.probes[table] for table in tables}


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

        named = self._spec.main.columns
        columns = describe(self._access, self._table, named) if named else describe_held(self._access, self._table)
        url = snowflake_url(self._access.account, self._access.host, self._table)
        return source_metadata(self.token, columns, rows=table_facts(self._access, self._table).rows, url=url)
