"""Whether each reading of a query shows the same rows: no rows tie in the orders that decide what it shows."""

from __future__ import annotations

from tir_dagster.changes.relation import Relation
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.query import pinned_text
from tir_dagster.snowflake.versions import SourceVersion


def open_order(relation: Relation, access: SnowflakeAccess, *versions: SourceVersion) -> str | None:
    """Return an order in which rows tie, or may tie, at one of the versions; None if there is none."""
    for order in relation.orders:
        if not order.probe:
            return f"rows may tie in {order.written}"
        if any(access.query(pinned_text(order.probe, version)) for version in versions):
            return f"rows tie in {order.written}"
    return None
