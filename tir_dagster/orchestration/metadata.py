"""Metadata of the four assets' events, and the confirmations that are read back from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dagster as dg

from tir_dagster.changes.change_set import NO_SLICE_KEY, ChangeSet, place_label
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.names import ExtractKeys
from tir_dagster.orchestration.partitions import HELD, REST, fits, held
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.state.versions import Version
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.names import TableName
from tir_dagster.spec.extract import ExtractSpec

if TYPE_CHECKING:
    from tir_dagster.changes.relation import Relation
    from tir_dagster.hyper.purge import Applied
    from tir_dagster.refresh.profile import Profile


CONFIRMATION = "tir/confirmation"
# People may report events by hand; the confirmation is among the newest events.
_LOOK_BACK = 200


def last_confirmation(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> Confirmation | None:
    """Return the confirmation of the newest event with complete metadata, whatever its run's status; None without one."""
    return next(confirmations(instance, asset_key), None)


def confirmations(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> Iterator[Confirmation]:
    """Yield the recent confirmations, newest first."""
    return (event.confirmation for event in confirmed_events(instance, asset_key))


@dataclass(frozen=True)
class ConfirmedEvent:
    """A confirmation with the event that holds it."""

    confirmation: Confirmation
    timestamp: float
    run_id: str
    metadata: Mapping[str, Any]


def confirmed_events(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> Iterator[ConfirmedEvent]:
    """Yield the recent confirmations with their events, newest first."""
    for record in instance.fetch_materializations(asset_key, limit=_LOOK_BACK).records:
        materialization = record.asset_materialization
        entries = materialization.metadata if materialization else {}
        values = {name: getattr(entry, "value", None) for name, entry in entries.items()}
        text = values.get(CONFIRMATION)
        if isinstance(text, str):
            with suppress(ValueError, TypeError):
                yield ConfirmedEvent(Confirmation.from_json(text), record.timestamp, record.run_id, values)


PLAN, TOUCHED, SOURCE_VERSION, EXTRACT = "tir/plan", "tir/touched", "tir/source_version", "tir/extract"
PROFILE, REPORT, KEYS_BY_TABLE = "tir/profile", "tir/report", "tir/keys_by_table"


def source_metadata(
    token: str, columns: Sequence[Column], *, rows: int | None = None, url: str | None = None
) -> dict[str, Any]:
    """Return the metadata of an observation of the source table."""
    counted = {} if rows is None else {"dagster/row_count": rows}
    linked = {} if url is None else {"dagster/uri": dg.MetadataValue.url(url)}
    return {"tir/token": token, "dagster/column_schema": table_schema(columns), **counted, **linked}


def lineage_from_source(relations: Mapping[str, Relation], source_table: dg.AssetKey) -> dict[str, Any]:
    """Return the column lineage from the source's tables; other tables than the first have their Snowflake names as keys."""
    first = next(iter(relations.values())).table

    def key_of(table: TableName) -> dg.AssetKey:
        return source_table if table == first else dg.AssetKey([table.database, table.schema, table.name])

    reads: dict[str, list[tuple[dg.AssetKey, str]]] = {}
    for name, relation in relations.items():
        view = relation.view
        if view is None:
            reads |= {named(name, column.name): [(key_of(relation.table), column.name)] for column in relation.columns}
            continue
        tables = {joined.alias: key_of(joined.table) for joined in view.tables}
        reads |= {
            named(name, column.name): [(tables[alias], other) for alias, other in column.reads]
            for column in view.columns
        }
    return _lineage(reads)


def named(table: str, column: str) -> str:
    """A column's name in Dagster: with its table, where there are several."""
    return f"{table}.{column}" if table else column


def columns_of(relations: Mapping[str, Relation]) -> list[Column]:
    """Return the columns of all tables as Dagster names them."""
    return [
        replace(column, name=named(table, column.name))
        for table, relation in relations.items()
        for column in relation.columns
    ]


def same_columns(metadata: Mapping[str, Any], upstream: dg.AssetKey) -> dict[str, Any]:
    """Return the lineage of an asset with the same columns as its upstream asset."""
    schema = metadata.get("dagster/column_schema")
    return _lineage({column.name: [(upstream, column.name)] for column in schema.columns}) if schema else {}


def _lineage(reads: Mapping[str, Sequence[tuple[dg.AssetKey, str]]]) -> dict[str, Any]:
    deps = {name: [dg.TableColumnDep(key, column) for key, column in sources] for name, sources in reads.items()}
    return {"dagster/column_lineage": dg.TableColumnLineage(deps)}


def change_set_metadata(
    change_set: ChangeSet, columns: Sequence[Column], stages: Mapping[str, float]
) -> dict[str, Any]:
    stages = dict(stages)
    by_slice = {
        place: f"{purged:,} purged, {appended:,} appended" for place, (purged, appended) in _moved(change_set).items()
    }
    by_table = {table: part.keys for table, part in change_set.parts.items()}
    return {
        PLAN: change_set.sentence,
        "tir/changes": dg.MetadataValue.md(plan_markdown(change_set)),
        "tir/keys": change_set.keys,
        "tir/rows": change_set.rows,
        **({KEYS_BY_TABLE: by_table} if by_table else {}),
        **({"tir/warnings": list(change_set.warnings)} if change_set.warnings else {}),
        **_moment_of(change_set.source_version),
        **stage_seconds(stages),
        "dagster/partition_row_count": change_set.rows,
        "dagster/column_schema": table_schema(columns),
        **_plan_of(change_set),
        "tir/slices": by_slice,
        TOUCHED: [REST if name is None else name for name in change_set.touched],
        "tir/settles": list(change_set.settles),
        "tir/stages": stages,
    }


def version_metadata(
    version: Version, change_set: ChangeSet, applied: Applied, stages: Mapping[str, float]
) -> dict[str, Any]:
    """Return the metadata of a version to which a change set was applied."""
    return {
        PLAN: change_set.sentence,
        "tir/changes": dg.MetadataValue.md(plan_markdown(change_set)),
        "tir/rows_purged": applied.purged,
        "tir/rows_appended": applied.appended,
        **_keys_by_table(version.manifest),
        **_file_of(version),
        **stage_seconds(stages),
        **_content_of(version),
        **_plan_of(change_set),
        "tir/change_set": change_set.id,
        "tir/base": change_set.base or "",
        "tir/stages": dict(stages),
    }


def unchanged_metadata(version: Version, sentence: str, stages: Mapping[str, float]) -> dict[str, Any]:
    """Return the metadata of the existing version when there was nothing to apply."""
    return {
        PLAN: sentence,
        "tir/decision": "none",
        **_content_of(version),
        "tir/rows_purged": 0,
        "tir/rows_appended": 0,
        "tir/stages": dict(stages),
    }


def slice_metadata(version: Version, change_set: ChangeSet | None, name: str) -> dict[str, Any]:
    """Return the metadata of one slice: rows purged, appended and held now."""
    slice_rows = version.manifest["slice_rows"]
    purged, appended = (change_set.purged, change_set.appended) if change_set else ({}, {})
    names = (
        [slice_name for slice_name in {**slice_rows, **purged, **appended} if not fits(slice_name)]
        if name == REST
        else []
    )
    return {
        "tir/slice_purged": sum(purged.get(slice_name, 0) for slice_name in (name, *names)),
        "tir/slice_appended": sum(appended.get(slice_name, 0) for slice_name in (name, *names)),
        "dagster/partition_row_count": sum(slice_rows.get(slice_name, 0) for slice_name in (name, *names)),
        "tir/slice_fingerprint": version.manifest.get("slice_digests", {}).get(names[0] if names else name, ""),
    }


def confirmation_metadata(
    confirmation: Confirmation,
    *,
    version: Version | None = None,
    stages: Mapping[str, float] | None = None,
    sent_bytes: int = 0,
    uri: str = "",
    reason: str | None = None,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the metadata of a confirmation: first what people look for, at the end what machines read."""
    manifest: Mapping[str, Any] = version.manifest if version else {}
    spent = {**(manifest.get("seconds") or {}), **(stages or {})}
    counts = {"tir/keys": "keys", "tir/rows_purged": "rows_purged", "tir/rows_appended": "rows_appended"}
    if manifest.get("decision") == "rollback":
        # No rows were read: those of an earlier version are shown again.
        counts = {}
    return {
        **({PLAN: manifest["sentence"]} if manifest.get("sentence") else {}),
        **_moment_of(confirmation.source_version),
        **({"dagster/uri": dg.MetadataValue.url(uri)} if uri else {}),
        **({"tir/datasource": confirmation.datasource} if confirmation.datasource else {}),
        "dagster/row_count": confirmation.rows,
        **{name: manifest[field] for name, field in counts.items() if manifest.get(field) is not None},
        **_keys_by_table(manifest),
        **({"tir/warnings": list(warnings)} if warnings else {}),
        **(_file_of(version) if version else {}),
        **({"tir/megabytes_sent": round(sent_bytes / 1e6, 3)} if sent_bytes else {}),
        **stage_seconds(spent),
        **({**_content_of(version), "dagster/row_count": confirmation.rows} if version else {}),
        **({"tir/decision": manifest["decision"]} if manifest.get("decision") else {}),
        # Set if the server had to load everything.
        **({"tir/reason": reason} if reason else {}),
        SOURCE_VERSION: confirmation.source_version,
        "tir/server_version": confirmation.server_version,
        "tir/datasource_id": confirmation.datasource_id,
        "tir/change_sets": list(confirmation.change_sets),
        "tir/stages": dict(stages or {}),
        **({"tir/bytes_sent": sent_bytes} if sent_bytes else {}),
        **(_held_by(version) if version else {}),
        "tir/version": confirmation.version,
        CONFIRMATION: confirmation.to_json(),
    }


def stage_seconds(stages: Mapping[str, float]) -> dict[str, Any]:
    """Return the seconds of each stage as numbers that Dagster plots."""
    return {f"tir/seconds_{stage}": float(seconds) for stage, seconds in stages.items()}


def _moment_of(source_version: str) -> dict[str, Any]:
    """Return when the source was as people see it now."""
    return {"tir/data_as_of": dg.MetadataValue.timestamp(datetime.fromisoformat(source_version))}


def _file_of(version: Version) -> dict[str, Any]:
    """Return the size of the extract's file, and the size past which it is built anew: purged rows leave room in it."""
    if not version.extract.is_file():
        return {}
    size, manifest = version.extract.stat().st_size, version.manifest
    limit = manifest.get("rebuild_above")
    return {
        "tir/extract_megabytes": round(size / 1e6, 3),
        **({"tir/rebuilt_above_megabytes": round(limit / 1e6, 3)} if limit else {}),
    }


def _held_by(version: Version) -> dict[str, Any]:
    """Return the slices with rows if slices are values: other partitions may be removed."""
    by_value = version.manifest["shape"]["slices"][1] == "value"
    return {HELD: held(version.manifest["slice_rows"])} if by_value else {}


def late_events(late: Confirmation | None, keys: ExtractKeys) -> Iterator[dg.AssetMaterialization]:
    """Yield the event of a publish that succeeded although its run died or was deleted."""
    if late is not None:
        yield dg.AssetMaterialization(
            keys.published_datasource,
            description="Confirmed late: the run that published it ended before it was recorded, or was deleted.",
            metadata=confirmation_metadata(late),
        )


def profile_metadata(profile: Profile) -> dict[str, Any]:
    """Return the profile of an asset's stages: seconds, rows, bytes and waits."""
    return {PROFILE: dg.MetadataValue.json([stage.as_dict() for stage in profile.stages])}


def definition_metadata(spec: ExtractSpec, part: str) -> dict[str, Any]:
    """Return the metadata of an asset's definition; IO managers read the extract's name from it."""
    tables = {
        "source_table": spec.main_table,
        "published_datasource": f"{spec.datasource.project}/{spec.datasource.name}",
    }
    named = {"dagster/table_name": tables[part]} if part in tables else {}
    report = {REPORT: dg.MetadataValue.path(str(report_file(spec)))} if part == "published_datasource" else {}
    return {**named, **report, EXTRACT: spec.name}


def report_file(spec: ExtractSpec) -> Path:
    """Return where `tir report` writes the page of the extract."""
    return tir_home() / "extracts" / spec.name / "report.html"


def table_schema(columns: Sequence[Column]) -> dg.TableSchema:
    """Return the columns with the types of the extract; an extract that people built may keep other compatible types."""
    return dg.TableSchema(
        [
            dg.TableColumn(
                column.name,
                column.hyper,
                description=column.comment or None,
                constraints=dg.TableColumnConstraints(nullable=column.nullable),
            )
            for column in columns
        ]
    )


def _plan_of(change_set: ChangeSet) -> dict[str, Any]:
    return {
        "tir/mode": change_set.mode,
        "tir/decision": change_set.decision,
        "tir/reason": change_set.reason or "",
        SOURCE_VERSION: change_set.source_version,
    }


def _content_of(version: Version) -> dict[str, Any]:
    columns = [
        replace(column, name=named(table, column.name))
        for table in version.tables
        for column in _columns_of(version.of(table))
    ]
    return {
        "tir/version": version.id,
        "dagster/row_count": version.manifest["rows"],
        "dagster/column_schema": table_schema(columns),
    }


def _columns_of(version: Version) -> list[Column]:
    comments = version.manifest.get("comments") or {}
    return [
        replace(Column(name, Kind(kind), *rest), comment=comments.get(name, ""))
        for name, kind, *rest in version.manifest["shape"]["columns"]
    ]


def _keys_by_table(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many keys of each table were replaced; nothing for an extract of one table."""
    tables = manifest.get("tables") or {}
    counted = {table: part["keys"] for table, part in tables.items() if part.get("keys") is not None}
    return {KEYS_BY_TABLE: counted} if counted else {}


_WIDTH = 20
# Show only the slices with most rows: a table of hundreds of lines is hard to read.
_LINES = 36


def _moved(change_set: ChangeSet) -> dict[str, tuple[int, int]]:
    """Return rows removed and added by slice, of all tables."""
    return {
        place_label(table, None if name == NO_SLICE_KEY else name): (
            part.purged.get(name, 0),
            part.appended.get(name, 0),
        )
        for table in change_set.tables
        for part in [change_set.of(table)]
        for name in sorted({**part.purged, **part.appended})
    }


def plan_markdown(change_set: ChangeSet) -> str:
    """Return the plan as Markdown: its sentence, its warnings, and rows purged and appended by slice with a bar."""
    counts = _moved(change_set)
    moved = {name: max(rows) for name, rows in counts.items()}
    most = max(moved.values(), default=0)
    busiest = set(sorted(counts, key=lambda name: -moved[name])[:_LINES])
    lines = [
        f"| {name} | {purged:,} | {appended:,} | {_bar(moved[name], most)} |"
        for name, (purged, appended) in counts.items()
        if name in busiest
    ]
    left = [f"*and {len(counts) - len(busiest)} slices with fewer rows*"] if len(counts) > len(busiest) else []
    table = ["| slice | purged | appended | |", "|---|---:|---:|---|", *lines] if lines else []
    return "\n\n".join([f"**{change_set.sentence}**", *_listed(change_set.warnings), "\n".join(table), *left]).strip()


def _listed(warnings: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {warning}" for warning in warnings)] if warnings else []


def _bar(count: int, most: int) -> str:
    """Return a bar relative to the largest slice, at least one character wide unless the count is zero."""
    return "█" * max(round(_WIDTH * count / most), 1) if count else ""


def snowflake_url(account: str, host: str | None, table: TableName) -> str | None:
    """Return the URL of the table in Snowsight; None if the account's name does not contain the organisation."""
    organisation, dash, name = account.partition("-")
    if host or not dash:
        return None
    parts = [quote(part, safe="") for part in (organisation.lower(), name.lower())]
    place = [quote(part, safe="") for part in (table.database, table.schema, table.name)]
    return (
        f"https://app.snowflake.com/{'/'.join(parts)}/#/data/databases/{place[0]}/schemas/{place[1]}/table/{place[2]}"
    )
