"""The stage `survey`: the source's columns, identity and change token, and a quiet moment to pin, before any row is read."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tir_dagster.changes.plan import SourceState
from tir_dagster.changes.relation import Relation, relation_of, watched_tables
from tir_dagster.errors import GuardError
from tir_dagster.hyper.casts import check_key
from tir_dagster.hyper.hyperfile import describe
from tir_dagster.hyper.package.package import Package, read_package
from tir_dagster.hyper.replace import ExtractShape
from tir_dagster.measuring import waiting_for
from tir_dagster.refresh.context import Log, Looked, RefreshContext, explaining_lost_lease
from tir_dagster.refresh.datasource import server_package
from tir_dagster.refresh.deliveries.agreement import (
    check_agreement,
    check_query_agreement,
    check_replaceable,
    needed_increment,
    refuse_document,
)
from tir_dagster.refresh.state.shared import SharedSource
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.pinned import PinnedSource
from tir_dagster.snowflake.query.views import view_definition
from tir_dagster.snowflake.versions import (
    SourceVersion,
    column_names,
    combined_token,
    is_kept,
    probe,
    table_facts,
)
from tir_dagster.spec.extract import ExtractSpec, check_columns, needed_columns

# A version is this long before the last look: transactions that were open then have ended.
MARGIN_SECONDS = 1.0


# And at least this long after the token was read: the warehouse's machines do not share one clock.
AFTER_TOKEN_SECONDS = 0.25


QUIET_TRIES = 30


@dataclass(frozen=True)
class Settled:
    """The source as the extract shows it: the token of its tables, and a version at which they were quiet."""

    token: str
    version: SourceVersion


@dataclass(frozen=True)
class Survey:
    """What the source looks like now, found without Spark and without reading a row."""

    spec: ExtractSpec
    relation: Relation
    known: SourceState
    version: SourceVersion
    # What happens to the tables behind a view does not show in the view's own facts.
    views: frozenset[TableName] = frozenset()

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.relation.columns

    @property
    def source(self) -> PinnedSource:
        return self.relation.base(self.version)

    def changed(self, since: SourceState) -> set[TableName]:
        """Return the tables whose token changed since then."""
        before, now = since.token.split(","), self.known.token.split(",")
        tables = self.relation.tables
        return {table for table, old, new in zip(tables, before, now, strict=False) if old != new}


def survey_source(
    spec: ExtractSpec,
    access: SnowflakeAccess,
    *,
    columns: Sequence[str] = (),
    settled: Settled | None = None,
    shared: SharedSource | None = None,
    log: Log,
    sleep: Callable[[float], None] = time.sleep,
) -> Survey:
    """Look at the source: its columns, its identity, its change token, and a quiet moment to pin.

    Extracts that share their versions pin the same one while their tables stay as they are.
    """
    relation = relation_of(spec, access, columns=columns)
    # Before anything is read: DDL that comes later is seen next time.
    facts = {table: table_facts(access, table) for table in relation.tables}
    views = {table: view_definition(access, table) for table, fact in facts.items() if fact.is_view}
    quiet, after = spec.thresholds.quiet_period, settled.version if settled else None

    def states(token: str) -> dict[str, str]:
        """A text for each table that changes with its rows and with its definition."""
        tokens = zip(facts.items(), token.split(","), strict=True)
        return {
            str(table): _digest([fact.identity, fact.ddl, str(views.get(table)), part])
            for (table, fact), part in tokens
        }

    token, version = quiet_moment(
        spec,
        access,
        relation.tables,
        settled=settled,
        pinned=lambda token: shared.pinned(states(token), quiet, after=after) if shared else None,
        log=log,
        sleep=sleep,
    )
    if shared:
        version = shared.agree(states(token), quiet, version, after=after)
    known = SourceState(
        definition=definition_of(spec),
        schema=_digest(
            [
                (column.name, column.kind.value, column.precision, column.scale)
                for column in (*relation.columns, *relation.base_columns)
            ]
        ),
        identity=",".join(fact.identity for fact in facts.values()),
        token=token,
        ddl=",".join(fact.ddl for fact in facts.values()),
        role=role_of(spec),
        views=",".join(str(views.get(table, "")) for table in facts),
    )
    kept = all(is_kept(access, table, fact, version) for table, fact in facts.items())
    return Survey(spec, relation, known, replace(version, kept=kept), frozenset(views))


def definition_of(spec: ExtractSpec) -> str:
    """A digest of everything in the spec that decides which rows the extract shows and how they are kept."""
    return _digest(definition_fields(spec))


def definition_fields(spec: ExtractSpec) -> dict[str, Any]:
    """Everything in the spec that decides which rows the extract shows and how they are kept."""
    value = asdict(spec) | {"source": spec.main_table, "watermark": spec.changes.watermark}
    # The permissions to create and to replace do not change the rows, nor does the way to publish.
    ignored = ("create", "replace", "publish_job_mb")
    value["datasource"] = {name: setting for name, setting in value["datasource"].items() if name not in ignored}
    # Nor does the way of signing in; releases before had one only, and their digests must stay.
    if (credentials := value["datasource"]["credentials"]) is not None:
        credentials.pop("method")
    # Tableau decides what a triggered refresh shows: only the watched tables and the datasource count here.
    triggered = spec.delivery == "trigger"
    names = ["source", "watch", "datasource"] if triggered else ["source", "columns", "row_key", "slices", "watermark"]
    return {name: value[name] for name in [*names, *(["query"] if spec.query else [])]}


def role_of(spec: ExtractSpec) -> str:
    """The role that the spec reads with, as Snowflake spells it: row access and masking policies may depend on it."""
    role = spec.snowflake.role or ""
    return role if role.startswith('"') else role.upper()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def quiet_moment(
    spec: ExtractSpec,
    access: SnowflakeAccess,
    tables: Sequence[TableName],
    *,
    settled: Settled | None = None,
    pinned: Callable[[str], SourceVersion | None] = lambda _: None,
    log: Log,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str, SourceVersion]:
    """Return one token for all tables, and a version that shows every change that the token stands for.

    The token is read first; the version is between that reading and a second one, a margin before the second. So it
    shows the changes in the token, and transactions that were open then have ended. A later change can be in the version
    but not in the token, which costs a look next time; the other way round it would be lost. Nothing else shows when
    rows changed: LAST_ALTERED of a view does not change with its tables.
    """
    token, seen = read_tokens(access, tables)
    if settled is not None and token == settled.token:
        # Nothing changed since a version that was quiet then.
        return token, max(settled.version, _before(seen, MARGIN_SECONDS))
    if (version := pinned(token)) is not None:
        # Another extract has waited, and nothing changed since.
        return token, version
    quiet = spec.thresholds.quiet_period
    wait = max(quiet, MARGIN_SECONDS) + AFTER_TOKEN_SECONDS
    left = wait
    for _ in range(QUIET_TRIES):
        with waiting_for("quiet period"):
            sleep(left)
        new_token, now = read_tokens(access, tables)
        if new_token != token and quiet > 0:
            log(f"{listed_tables(tables)} changed; waiting until all has been quiet for {quiet:g} s")
            token, seen, left = new_token, now, wait
            continue
        # By the warehouse's clock, because the version is a time of that clock.
        left = wait - (now.moment - seen.moment).total_seconds()
        if left <= 0:
            return token, _before(now, MARGIN_SECONDS)
    raise GuardError(
        f"{spec.name}: {listed_tables(tables)} keeps changing: never quiet for {quiet:g} seconds. Nothing was touched. "
        "Refresh when the load is done, or lower thresholds.quiet_period in the spec."
    )


def read_tokens(access: SnowflakeAccess, tables: Sequence[TableName]) -> tuple[str, SourceVersion]:
    """Return the token of all tables, and the warehouse's time when it was read."""
    versions = probe(access, tables)
    token = combined_token(versions.items())
    seen = next(version.seen for version in versions.values())
    assert seen is not None, "a token has its moment"
    return token, seen


def _before(version: SourceVersion, seconds: float) -> SourceVersion:
    return SourceVersion(version.moment - timedelta(seconds=seconds))


def listed_tables(tables: Sequence[TableName]) -> str:
    return ", ".join(map(str, tables))


def readable_version(
    access: SnowflakeAccess, tables: Sequence[TableName], version: SourceVersion, token: str
) -> SourceVersion | None:
    """Return the version as it can be read: by Time Travel, or as it is now if nothing changed since; else None."""
    if all(is_kept(access, table, table_facts(access, table), version) for table in tables):
        return version
    return replace(version, kept=False) if read_tokens(access, tables)[0] == token else None


@dataclass(frozen=True)
class Watched:
    """All watched tables at a quiet moment: a refresh that starts later shows at least this."""

    known: SourceState
    version: SourceVersion


def watch_tables(
    spec: ExtractSpec, access: SnowflakeAccess, *, log: Log, sleep: Callable[[float], None] = time.sleep
) -> Watched:
    """Wait until all tables are quiet together; what changes after this is seen next time."""
    token, version = quiet_moment(spec, access, watched_tables(spec), log=log, sleep=sleep)
    return Watched(SourceState(definition_of(spec), "", "", token), version)


# The stage


def survey(context: RefreshContext, looked: Looked) -> Survey:
    """Look at the source: what the extract shows, whether it fits the datasource, and a quiet version to pin."""
    confirmed = looked.confirmed
    settled = Settled(confirmed.known.token, SourceVersion.parse(confirmed.source_version)) if confirmed else None
    with explaining_lost_lease(context), context.stages.timed("survey"), context.snowflake.kept_open():
        columns = extract_columns(context, looked)
        surveyed = survey_source(
            context.spec,
            context.snowflake,
            columns=columns,
            settled=settled,
            # A plan changes nothing, not even for other extracts.
            shared=context.shared if context.lease is not None else None,
            log=context.log,
        )
        _check_stored_key(context, looked, surveyed)
        return surveyed


def extract_columns(context: RefreshContext, looked: Looked) -> tuple[str, ...]:
    """Return the columns that the extract has: the datasource's own if people built it, else the spec's, else none: all."""
    spec, access = context.spec, context.snowflake
    if spec.query is not None:
        _check_query(context, looked)
        return ()
    table = TableName.parse(spec.source)
    # Before the package is downloaded: it may be large, and a spec that does not fit the source needs no package.
    known = column_names(access, table)
    check_columns(spec, known)
    shell, hyper = server_package(context, looked)
    refuse_document(spec, shell, looked.server.datasource)
    if shell is None:
        _check_replaceable(context, looked, hyper, spec.columns or known, known)
        return spec.columns
    package = read_package(shell)
    names = package.hyper_names or {record.remote_name: record.remote_name for record in package.columns}
    assert looked.server.datasource is not None, "a shell is downloaded from there"
    check_agreement(
        package,
        datasource=looked.server.datasource.shown,
        table=table,
        source_columns=known,
        needed=[name if name in names else name.upper() for name in needed_columns(spec)],
        only=[name if name in names else name.upper() for name in spec.columns],
    )
    _check_increment(spec, package, hyper)
    return tuple(name for name in known if name in names)


def _check_query(context: RefreshContext, looked: Looked) -> None:
    """Raise unless a datasource that people built shows this very query, with all its columns."""
    spec = context.spec
    shell, hyper = server_package(context, looked)
    refuse_document(spec, shell, looked.server.datasource)
    if shell is not None:
        assert looked.server.datasource is not None, "a shell is downloaded from there"
        relation, package = relation_of(spec, context.snowflake), read_package(shell)
        check_query_agreement(
            package,
            datasource=looked.server.datasource.shown,
            query=spec.query or "",
            columns=[column.name for column in relation.columns],
        )
        _check_increment(spec, package, hyper)
    elif _may_be_anybodys(looked, hyper):
        columns = [column.name for column in relation_of(spec, context.snowflake).columns]
        _check_replaceable(context, looked, hyper, columns, columns)


def _may_be_anybodys(looked: Looked, hyper: Path | None) -> bool:
    """Whether the published file may be somebody else's."""
    return hyper is not None and (looked.confirmed is None or looked.datasource_reason is not None)


def _check_replaceable(
    context: RefreshContext, looked: Looked, hyper: Path | None, columns: Sequence[str], known: Sequence[str]
) -> None:
    """Raise if the published Hyper file has other columns: somebody may need it."""
    if context.spec.datasource.replace or hyper is None or not _may_be_anybodys(looked, hyper):
        return
    assert looked.server.datasource is not None, "the file is downloaded from there"
    check_replaceable(
        context.spec.name,
        looked.server.datasource.shown,
        published_columns=[column.name for column in describe(hyper).columns],
        extract_columns=[name if name in known else name.upper() for name in columns],
    )


def _check_increment(spec: ExtractSpec, package: Package, hyper: Path | None) -> None:
    """Raise if incremental refresh is off, before Spark reads anything."""
    if spec.delivery == "server" and hyper is not None:
        needed_increment(spec.name, package, hyper)


def _check_stored_key(context: RefreshContext, looked: Looked, surveyed: Survey) -> None:
    """Raise ExtractError before the first load into an extract whose own types cannot tell the keys apart."""
    confirmed = looked.confirmed
    if confirmed is not None and confirmed.known.definition == surveyed.known.definition:
        return
    shell, hyper = server_package(context, looked)
    if shell is None or hyper is None:
        return
    stored = {column.name: column for column in describe(hyper).columns}
    names = extract_shape(surveyed.relation, shell).names
    for column in surveyed.relation.key:
        if key := stored.get(names.get(column.name, column.name)):
            check_key(column, key)


def extract_shape(relation: Relation, shell: Path | None) -> ExtractShape:
    """Return how the extract is laid out: by the source's names, or by those of the package that people built."""
    key = tuple(column.name for column in relation.key)
    loose = relation.unrepeatable
    if shell is None:
        return ExtractShape(relation.columns, key, relation.slices, loose=loose)
    package = read_package(shell)
    names = package.hyper_names or {record.remote_name: record.remote_name for record in package.columns}
    return ExtractShape(relation.columns, key, relation.slices, names, loose)
