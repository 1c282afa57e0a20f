"""What people look at: plans with bars, links, and where columns come from."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest

from tir_dagster.changes.change_set import NO_SLICE_KEY, ChangeSet
from tir_dagster.changes.plan import SourceState
from tir_dagster.orchestration.metadata import plan_markdown, same_columns, snowflake_url, table_schema
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.versions import describe


def a_change_set(purged: dict[str, int], appended: dict[str, int], *warnings: str) -> ChangeSet:
    return ChangeSet(
        id="cs1",
        extract="orders",
        base="v1",
        source_version="2025-01-01T00:00:00+00:00",
        known=SourceState("d", "s", "i", "t"),
        mode="changes",
        decision="incremental",
        reason=None,
        keys=1,
        rows=1,
        purged=purged,
        appended=appended,
        watermark=None,
        warnings=warnings,
        sentence="orders: incremental refresh of 31 keys.",
    )


def test_a_plan_is_a_sentence_its_warnings_and_a_bar_for_each_slice():
    change_set = a_change_set({"2025-01": 10, NO_SLICE_KEY: 1}, {"2025-01": 20, "2025-02": 0, "2025-03": 5}, "odd keys")
    assert plan_markdown(change_set).splitlines() == [
        "**orders: incremental refresh of 31 keys.**",
        "",
        "- odd keys",
        "",
        "| slice | purged | appended | |",
        "|---|---:|---:|---|",
        "| (no date) | 1 | 0 | █ |",
        f"| 2025-01 | 10 | 20 | {'█' * 20} |",
        "| 2025-02 | 0 | 0 |  |",
        f"| 2025-03 | 0 | 5 | {'█' * 5} |",
    ]


def test_of_very_many_slices_the_busiest_are_shown_in_their_order_and_the_others_counted():
    markdown = plan_markdown(a_change_set({}, {f"20{at:02d}-01": at for at in range(1, 60)}))
    assert "2060" not in markdown
    assert "2023-01" not in markdown
    assert markdown.index("2024-01") < markdown.index("2059-01")
    assert markdown.endswith("*and 23 slices with fewer rows*")


def test_a_plan_that_moves_nothing_has_no_table():
    assert plan_markdown(a_change_set({}, {})) == "**orders: incremental refresh of 31 keys.**"


@pytest.mark.parametrize(
    ("account", "host", "expected"),
    [
        ("ACME-SALES", None, "https://app.snowflake.com/acme/sales/#/data/databases/DB/schemas/S/table/My%20Table"),
        ("xy12345", None, None),
        ("ACME-SALES", "127.0.0.1", None),
    ],
)
def test_a_table_is_linked_where_the_account_tells_its_page(account, host, expected):
    assert snowflake_url(account, host, TableName.parse('DB.S."My Table"')) == expected


def test_columns_that_are_handed_on_come_from_the_same_columns_before():
    schema = dg.TableSchema([dg.TableColumn("A"), dg.TableColumn("B")])
    metadata = same_columns({"dagster/column_schema": schema}, dg.AssetKey("before"))
    deps = metadata["dagster/column_lineage"].deps_by_column
    assert deps == {name: [dg.TableColumnDep(dg.AssetKey("before"), name)] for name in ("A", "B")}
    assert same_columns({}, dg.AssetKey("before")) == {}


class Described:
    """A warehouse that answers DESCRIBE TABLE as Snowflake documents it: the comment is the tenth of twelve columns."""

    def query(self, sql: str) -> list[tuple[str | None, ...]]:
        assert sql.startswith("DESCRIBE TABLE ")
        rest = (None, "N", "N", None, None)
        return [
            ("ID", "NUMBER(38,0)", "COLUMN", "N", *rest, "The order's number", None, None),
            ("NOTE", "VARCHAR(10)", "COLUMN", "Y", *rest, None, None, None),
        ]


def test_columns_have_the_comments_that_snowflake_has():
    columns = describe(Described(), TableName.parse("DB.S.T"))  # type: ignore[arg-type]
    assert {column.name: column.description for column in table_schema(columns).columns} == {
        "ID": "The order's number",
        "NOTE": None,
    }
    assert columns[0] == replace(columns[0], comment="another"), "a comment makes no other column"
