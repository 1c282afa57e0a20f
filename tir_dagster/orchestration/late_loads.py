"""Loads that are in the table and that nobody has reported: their process died between its commit and its report."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from tir_dagster.spec.load import LoadSpec

if TYPE_CHECKING:
    from tir_dagster.loading.ledger import Changed, Committed
    from tir_dagster.loading.load import Loader

LOAD_ID, LOAD_IDS, HINT = "tir/load_id", "tir/load_ids", "tir/hint"
# How many of the newest loads are looked at; each run looks, so an unreported one is among them.
LOOK_BACK = 50
# More of them are told as one change of anything.
_MOST_LATE = 20
# People may report events by hand; those of the newest loads are among the newest ones.
_PAGES = 20


def hint_metadata(spec: LoadSpec, changed: "Changed | None") -> dict[str, Any]:
    """What changed, as every extract on the table understands it; nothing if nothing did."""
    from tir_dagster.changes.hints import ChangeType, Hint, KeyList, Unknown, hint_to_json  # noqa: PLC0415
    from tir_dagster.snowflake.names import TableName  # noqa: PLC0415

    if changed is None:
        return {}
    scope = Unknown() if changed.keys is None else KeyList(changed.columns, changed.keys)
    hint = Hint(TableName.parse(spec.table), ChangeType[changed.kind], scope)
    return {HINT: dg.MetadataValue.json(hint_to_json(hint))}


def recent_loads(loader: "Loader") -> list[str]:
    from tir_dagster.loading.ledger import recent  # noqa: PLC0415

    return recent(loader.access, loader.books, most=LOOK_BACK)


def late_reports(
    instance: dg.DagsterInstance, loader: "Loader", source_table: dg.AssetKey, ids: Sequence[str]
) -> Iterator[dg.AssetMaterialization]:
    """What is to be reported of these loads, in the order of their commits. Whoever asks holds the lease, or saw it free."""
    from tir_dagster.loading.ledger import Changed, committed  # noqa: PLC0415

    late = committed(loader.access, loader.books, unreported(instance, source_table, ids))
    if len(late) > _MOST_LATE:
        settled = {LOAD_IDS: [one.load_id for one in late]}
        yield _event(loader.spec, source_table, late[-1], Changed("MIXED_CHANGES"), settled)
        return
    for one in late:
        yield _event(loader.spec, source_table, one, one.changed, {})


def unreported(instance: dg.DagsterInstance, source_table: dg.AssetKey, ids: Sequence[str]) -> list[str]:
    """Those of the loads that no event of the table tells of. By their ids: a load that began first may end last."""
    missing, cursor = dict.fromkeys(ids), None
    for _ in range(_PAGES):
        if not missing:
            break
        found = instance.fetch_materializations(source_table, limit=LOOK_BACK, cursor=cursor)
        for record in found.records:
            for one in _told(record.asset_materialization):
                missing.pop(one, None)
        if not found.has_more:
            break
        cursor = found.cursor
    return list(missing)


def _told(event: dg.AssetMaterialization | None) -> list[str]:
    values = [event.metadata[name].value for name in (LOAD_ID, LOAD_IDS) if name in event.metadata] if event else []
    return [str(one) for value in values for one in (value if isinstance(value, list) else [value])]


def _event(
    spec: LoadSpec, source_table: dg.AssetKey, one: "Committed", changed: "Changed | None", more: dict[str, Any]
) -> dg.AssetMaterialization:
    shown = {"tir/rows_read": one.rows, "tir/rows_inserted": one.inserted, "tir/rows_updated": one.updated}
    told: dict[str, Any] = {LOAD_ID: one.load_id, "tir/late": True, **shown, "tir/rows_deleted": one.deleted, **more}
    return dg.AssetMaterialization(source_table, metadata={**told, **hint_metadata(spec, changed)})
