"""What people look at in the UI: a plan as Markdown with a bar for each slice, and links to where the data lives."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from tir_dagster.changes.change_set import ChangeSet, slice_label
from tir_dagster.snowflake.names import TableName

_WIDTH = 20
# The busiest ones: a table of hundreds of lines says less than its top.
_LINES = 36


def plan_markdown(change_set: ChangeSet) -> str:
    """The plan's sentence, its warnings, and how many rows go and come in each slice, with a bar beside."""
    named = sorted({**change_set.purged, **change_set.appended})
    moved = {name: max(change_set.purged.get(name, 0), change_set.appended.get(name, 0)) for name in named}
    most = max(moved.values(), default=0)
    busiest = set(sorted(named, key=lambda name: -moved[name])[:_LINES])
    lines = [
        f"| {slice_label(name)} | {change_set.purged.get(name, 0):,} | {change_set.appended.get(name, 0):,} "
        f"| {_bar(moved[name], most)} |"
        for name in named
        if name in busiest
    ]
    left = [f"*and {len(named) - len(busiest)} slices with fewer rows*"] if len(named) > len(busiest) else []
    table = ["| slice | purged | appended | |", "|---|---:|---:|---|", *lines] if lines else []
    return "\n\n".join([f"**{change_set.sentence}**", *_listed(change_set.warnings), "\n".join(table), *left]).strip()


def _listed(warnings: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {warning}" for warning in warnings)] if warnings else []


def _bar(count: int, most: int) -> str:
    """A bar as wide as its share of the busiest slice; whatever is not nothing is seen."""
    return "█" * max(round(_WIDTH * count / most), 1) if count else ""


def snowflake_url(account: str, host: str | None, table: TableName) -> str | None:
    """The table's page in Snowsight; only where the account's name tells its organisation."""
    organisation, dash, name = account.partition("-")
    if host or not dash:
        return None
    parts = [quote(part, safe="") for part in (organisation.lower(), name.lower())]
    place = [quote(part, safe="") for part in (table.database, table.schema, table.name)]
    return (
        f"https://app.snowflake.com/{'/'.join(parts)}/#/data/databases/{place[0]}/schemas/{place[1]}/table/{place[2]}"
    )
