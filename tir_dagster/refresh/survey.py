"""The stage `survey`: the source's columns, identity and change token, and a quiet moment to pin, before any row is read."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tir_dagster.changes.plan import SourceState
from tir_dagster.changes.relation import Relation, relation_of, watched_tables
from tir_dagster.errors import GuardError
from tir_dagster.hyper.casts import PURGE_KEY, check_key
from tir_dagster.hyper.hyperfile import EXTRACT_SCHEMA, TableId, describe, describe_all
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
from tir_dagster.refresh.deliveries.relationships import (
    check_declarable,
    check_related_columns,
    match_document,
    referred_columns,
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
    # Of an extract of several tables: each of them, the main one first, at the same version. The relation above is the main one's.
    parts: Mapping[str, Survey] = field(default_factory=dict)
    # Where the datasource keeps a table, one of several, in its Hyper file.
    place: TableId | None = None

    def of(self, table: str) -> Survey:
        """Return what is known of this table; an extract of one table is its only part, without a name."""
        return self.parts[table] if self.parts else self

    @property
    def relations(self) -> dict[str, Relation]:
        return {table: self.of(table).relation for table in self.spec.parts}

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
    columns: Mapping[str, Sequence[str]] | None = None,
    settled: Settled | None = None,
    shared: SharedSource | None = None,
    log: Log,
    sleep: Callable[[float], None] = time.sleep,
) -> Survey:
    """Look at the source: its columns, its identity, its change token, and a quiet moment to pin, one for all tables.

    Extracts that share their versions pin the same one while their tables stay as they are. `columns` are those of each
    table of the extract, where they are fewer than the source's.
    """
    relations = {
        name: relation_of(part, access, columns=(columns or {}).get(name, ())) for name, part in spec.parts.items()
    }
    tables = tuple(dict.fromkeys(table for relation in relations.values() for table in relation.tables))
    # Before anything is read: DDL that comes later is seen next time.
    facts = {table: table_facts(access, table) for table in tables}
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
        tables,
        settled=settled,
        pinned=lambda token: shared.pinned(states(token), quiet, after=after) if shared else None,
        log=log,
        sleep=sleep,
    )
    if shared:
        version = shared.agree(states(token), quiet, version, after=after)
    tokens = dict(zip(tables, token.split(","), strict=True))
    kept = {table: is_kept(access, table, fact, version) for table, fact in facts.items()}

    def known(definition: str, relations: Collection[Relation], tables: Sequence[TableName]) -> SourceState:
        columns = [column for relation in relations for column in (*relation.columns, *relation.base_columns)]
        return SourceState(
            definition=definition,
            schema=_digest([(column.name, column.kind.value, column.precision, column.scale) for column in columns]),
            identity=",".join(facts[table].identity for table in tables),
            token=",".join(tokens[table] for table in tables),
            ddl=",".join(facts[table].ddl for table in tables),
            role=role_of(spec),
            views=",".join(str(views.get(table, "")) for table in tables),
        )

    parts = {
        name: Survey(
            spec.parts[name],
            relation,
            known(definition_of(spec.parts[name]), [relation], relation.tables),
            replace(version, kept=all(kept[table] for table in relation.tables)),
            frozenset(views.keys() & set(relation.tables)),
        )
        for name, relation in relations.items()
    }
    main = next(iter(parts.values()))
    if not spec.tables:
        return main
    whole = known(definition_of(spec), list(relations.values()), tables)
    return Survey(spec, main.relation, whole, replace(version, kept=all(kept.values())), frozenset(views), parts)


def definition_of(spec: ExtractSpec) -> str:
    """A digest of everything in the spec that decides which rows the extract shows and how they are kept."""
    return _digest(definition_fields(spec))


def definition_fields(spec: ExtractSpec) -> dict[str, Any]:
    """Everything in the spec that decides which rows the extract shows and how they are kept."""
    if spec.tables and spec.delivery != "trigger":
        parts = {name: definition_fields(part) for name, part in spec.parts.items()}
        relationships, *_ = (part.pop("relationships", ()) for part in list(parts.values()))
        return {"tables": parts, "relationships": relationships}
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
    # How tables refer to each other is declared in the file of all of them.
    more = [*(["query"] if spec.query else []), *(["relationships"] if spec.relationships and not triggered else [])]
    return {name: value[name] for name in [*names, *more]}


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
    but not in the token, which is marked then and costs a look next time; the other way round it would be lost. Nothing else shows
    when rows changed: LAST_ALTERED of a view does not change with its tables.
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
            return _marked(token, new_token), _before(now, MARGIN_SECONDS)
    raise GuardError(
        f"{spec.name}: {listed_tables(tables)} keeps changing: never quiet for {quiet:g} seconds. Nothing was touched. "
        "Refresh when the load is done, or lower thresholds.quiet_period in the spec."
    )


def _marked(token: str, later: str) -> str:
    """Return the first token; that of a table that changed since is like no other, so the table counts as changed now and next time.

    The version may show that change. If the table counted as unchanged now, the next refresh would look only after the version.
    """
    tokens = zip(token.split(","), later.split(","), strict=True)
    return ",".join(old if old == new else f"{old}+" for old, new in tokens)


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


@dataclass(frozen=True)
class Layout:
    """A table of the extract: its source columns, if they are fewer than the source's, and its own names of them."""

    columns: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    # Where it is in the Hyper file; None where that holds only one.
    table: TableId | None = None
    # Columns that the relationships of a file without a document need without NULL.
    not_null: frozenset[str] = frozenset()

    def shape(self, relation: Relation) -> ExtractShape:
        """Return how the rows of the relation are laid out."""
        key, loose = tuple(column.name for column in relation.key), relation.unrepeatable
        # As the relation writes them.
        not_null = frozenset(column.name for column in relation.columns if column.name in self.not_null)
        return ExtractShape(relation.columns, key, relation.slices, self.names, loose, self.table, not_null)


def survey(context: RefreshContext, looked: Looked) -> Survey:
    """Look at the source: what the extract shows, whether it fits the datasource, and a quiet version to pin."""
    confirmed = looked.confirmed
    settled = Settled(confirmed.known.token, SourceVersion.parse(confirmed.source_version)) if confirmed else None
    if not looked.has_tables_of(context.spec):
        settled = None
    with explaining_lost_lease(context), context.stages.timed("survey"), context.snowflake.kept_open():
        layouts = extract_layouts(context, looked)
        surveyed = survey_source(
            context.spec,
            context.snowflake,
            columns={table: layout.columns for table, layout in layouts.items()},
            settled=settled,
            # A plan changes nothing, not even for other extracts.
            shared=context.shared if context.lease is not None else None,
            log=context.log,
        )
        if context.spec.tables:
            columns = {name: relation.columns for name, relation in surveyed.relations.items()}
            check_related_columns(context.spec, columns, declared=any(layout.not_null for layout in layouts.values()))
            parts = {name: replace(part, place=layouts[name].table) for name, part in surveyed.parts.items()}
            surveyed = replace(surveyed, parts=parts)
        _check_stored_key(context, looked, surveyed, layouts)
        return surveyed


def extract_layouts(context: RefreshContext, looked: Looked) -> dict[str, Layout]:
    """Return how the tables of the extract are laid out; raise if the datasource does not fit the spec."""
    if context.spec.tables:
        return _layouts_of_tables(context, looked)
    columns = _extract_columns(context, looked)
    shell, _ = server_package(context, looked)
    if shell is None:
        return {"": Layout(columns)}
    package = read_package(shell)
    names = package.hyper_names or {record.remote_name: record.remote_name for record in package.columns}
    return {"": Layout(columns, names)}


def _layouts_of_tables(context: RefreshContext, looked: Looked) -> dict[str, Layout]:
    """Return how several tables are laid out: as in the datasource that people built, else as the spec names them."""
    spec, access = context.spec, context.snowflake
    known: dict[str, Sequence[str]] = {}
    for name, part in spec.parts.items():
        if part.query is None:
            known[name] = column_names(access, TableName.parse(part.source))
            check_columns(part, known[name])
        else:
            known[name] = [column.name for column in relation_of(part, access).columns]
    shell, hyper = server_package(context, looked)
    refuse_document(spec, shell, looked.server.datasource)
    if shell is None:
        referred = referred_columns(spec)
        layouts = {
            name: Layout(
                part.columns,
                table=(EXTRACT_SCHEMA, name),
                not_null=frozenset(
                    column if column in known[name] else column.upper() for column in referred.get(name, ())
                ),
            )
            for name, part in spec.parts.items()
        }
        check_declarable(spec)
        _check_tables_replaceable(context, looked, hyper, layouts, known)
        return layouts
    assert looked.server.datasource is not None, "a shell is downloaded from there"
    assert hyper is not None, "downloaded with the shell"
    matched = match_document(spec, shell, known, datasource=looked.server.datasource.shown, tables=describe_all(hyper))
    return {
        name: Layout(tuple(column for column in known[name] if column in table.names), table.names, table.id)
        for name, table in matched.items()
    }


def _check_tables_replaceable(
    context: RefreshContext,
    looked: Looked,
    hyper: Path | None,
    layouts: Mapping[str, Layout],
    known: Mapping[str, Sequence[str]],
) -> None:
    """Raise if the published Hyper file has other tables or columns: somebody may need it."""
    if context.spec.datasource.replace or hyper is None or not _may_be_anybodys(looked, hyper):
        return
    assert looked.server.datasource is not None, "the file is downloaded from there"
    published = [
        f"{table.name}.{column.name}"
        for table in describe_all(hyper)
        for column in table.columns
        if column.name != PURGE_KEY
    ]
    own = [
        f"{name}.{column if column in known[name] else column.upper()}"
        for name, layout in layouts.items()
        for column in layout.columns or known[name]
    ]
    check_replaceable(
        context.spec.name, looked.server.datasource.shown, published_columns=published, extract_columns=own
    )


def _extract_columns(context: RefreshContext, looked: Looked) -> tuple[str, ...]:
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


def _check_stored_key(context: RefreshContext, looked: Looked, surveyed: Survey, layouts: Mapping[str, Layout]) -> None:
    """Raise ExtractError before the first load into an extract whose own types cannot tell the keys apart."""
    confirmed = looked.confirmed
    if confirmed is not None and confirmed.known.definition == surveyed.known.definition:
        return
    shell, hyper = server_package(context, looked)
    if shell is None or hyper is None:
        return
    for name, layout in layouts.items():
        stored = {column.name: column for column in describe(hyper, layout.table).columns}
        for column in surveyed.of(name).relation.key:
            if key := stored.get(layout.names.get(column.name, column.name)):
                check_key(column, key)
