"""What the events of the four assets show: plans, rows, keys by slice, versions, stage times, columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from tir_dagster.changes.state import ChangeSet, Confirmation, slice_label
from tir_dagster.extract.versions import Version
from tir_dagster.orchestration.confirmations import CONFIRMATION
from tir_dagster.orchestration.names import ExtractKeys
from tir_dagster.spec import ExtractSpec

if TYPE_CHECKING:
    from tir_dagster.extract.purge import Applied
    from tir_dagster.source.columns import Column

PLAN, TOUCHED, SOURCE_VERSION = "tir/plan", "tir/touched", "tir/source_version"


def source_metadata(token: str, columns: Sequence[Column], *, rows: int | None = None) -> dict[str, Any]:
    """An observation of the source table."""
    counted = {} if rows is None else {"dagster/row_count": rows}
    return {"tir/token": token, "dagster/column_schema": table_schema(columns), **counted}


def change_set_metadata(
    change_set: ChangeSet, columns: Sequence[Column], stages: Mapping[str, float]
) -> dict[str, Any]:
    by_slice = {
        slice_label(name): f"{change_set.purged.get(name, 0):,} purged, {change_set.appended.get(name, 0):,} appended"
        for name in sorted({**change_set.purged, **change_set.appended})
    }
    return {
        **_plan_of(change_set),
        "tir/keys": change_set.keys,
        "tir/rows": change_set.rows,
        "dagster/partition_row_count": change_set.rows,
        "tir/slices": by_slice,
        TOUCHED: [name for name in change_set.touched if name is not None],
        "tir/settles": list(change_set.settles),
        "tir/warnings": list(change_set.warnings),
        "tir/stages": dict(stages),
        "dagster/column_schema": table_schema(columns),
    }


def version_metadata(
    version: Version, change_set: ChangeSet, applied: Applied, stages: Mapping[str, float]
) -> dict[str, Any]:
    """The extract after a change set was applied."""
    return {
        **_plan_of(change_set),
        **_content_of(version),
        "tir/change_set": change_set.id,
        "tir/base": change_set.base or "",
        "tir/rows_purged": applied.purged,
        "tir/rows_appended": applied.appended,
        "tir/stages": dict(stages),
    }


def unchanged_metadata(version: Version, sentence: str, stages: Mapping[str, float]) -> dict[str, Any]:
    """The extract when there was nothing to apply: the version that is there."""
    return {
        PLAN: sentence,
        "tir/decision": "none",
        **_content_of(version),
        "tir/rows_purged": 0,
        "tir/rows_appended": 0,
        "tir/stages": dict(stages),
    }


def slice_metadata(version: Version, change_set: ChangeSet | None, name: str) -> dict[str, Any]:
    """What one slice lost, gained and holds now."""
    held = version.manifest["ledger_stats"].get(name, (0, "0"))[0]
    return {
        "tir/slice_purged": change_set.purged.get(name, 0) if change_set else 0,
        "tir/slice_appended": change_set.appended.get(name, 0) if change_set else 0,
        "dagster/partition_row_count": int(held),
    }


def confirmation_metadata(
    confirmation: Confirmation,
    *,
    version: Version | None = None,
    stages: Mapping[str, float] | None = None,
    sent_bytes: int = 0,
    uri: str = "",
    reason: str | None = None,
) -> dict[str, Any]:
    """The confirmation itself, and what people want to know of it."""
    return {
        CONFIRMATION: confirmation.to_json(),
        SOURCE_VERSION: confirmation.source_version,
        "tir/server_version": confirmation.server_version,
        "tir/datasource_id": confirmation.datasource_id,
        "tir/change_sets": list(confirmation.change_sets),
        "tir/stages": dict(stages or {}),
        **({"tir/bytes_sent": sent_bytes} if sent_bytes else {}),
        **(_content_of(version) if version else {}),
        "tir/version": confirmation.version,
        "dagster/row_count": confirmation.rows,
        **({"dagster/uri": dg.MetadataValue.url(uri)} if uri else {}),
        # Where the server itself had to load everything.
        **({"tir/reason": reason} if reason else {}),
    }


def late_events(late: Confirmation | None, keys: ExtractKeys) -> Iterator[dg.AssetMaterialization]:
    """A publish that landed before its run died is confirmed by whoever notices."""
    if late is not None:
        yield dg.AssetMaterialization(
            keys.published_datasource,
            description="Confirmed late: the run that published it ended before it could say so.",
            metadata=confirmation_metadata(late),
        )


def table_name(spec: ExtractSpec) -> dict[str, Any]:
    return {"dagster/table_name": spec.source}


def table_schema(columns: Sequence[Column]) -> dg.TableSchema:
    """The columns as an extract holds them; one that people built keeps its own types where they are as good."""
    return dg.TableSchema(
        [
            dg.TableColumn(column.name, column.hyper, constraints=dg.TableColumnConstraints(nullable=column.nullable))
            for column in columns
        ]
    )


def _plan_of(change_set: ChangeSet) -> dict[str, Any]:
    return {
        PLAN: change_set.sentence,
        "tir/mode": change_set.mode,
        "tir/decision": change_set.decision,
        "tir/reason": change_set.reason or "",
        SOURCE_VERSION: change_set.source_version,
    }


def _content_of(version: Version) -> dict[str, Any]:
    from tir_dagster.source.columns import Column, Kind  # noqa: PLC0415

    columns = [Column(name, Kind(kind), *rest) for name, kind, *rest in version.manifest["shape"]["columns"]]
    return {
        "tir/version": version.id,
        "dagster/row_count": version.manifest["rows"],
        "dagster/column_schema": table_schema(columns),
    }
