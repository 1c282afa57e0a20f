"""After a confirmation: how many versions stay is the spec's to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tir_dagster.changes.plan import SourceState
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster_tests.stages import Refresher


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({}, ["v00000001", "v00000003", "v00000004", "v00000005"]),
        ({"versions": 1}, ["v00000001", "v00000005"]),
        ({"versions": 4, "size": "2 KB"}, ["v00000001", "v00000005"]),
    ],
)
def test_as_many_versions_stay_as_the_spec_says_and_always_the_confirmed_one(
    tmp_path: Path, keep: dict[str, Any], left: list[str]
) -> None:
    refresher = refresher_of(tmp_path, keep)
    for _ in range(5):
        workspace = refresher.versions.begin()
        workspace.extract.write_bytes(bytes(900))
        refresher.versions.commit(workspace, {"change_set": "a"})
    known = SourceState(*("" for _ in SourceState.__dataclass_fields__))
    refresher.settle(Confirmation("orders", "v00000001", "t", known, None, "id", "version", "", 1, ()))
    assert [version.id for version in refresher.versions.versions()] == left


def refresher_of(folder: Path, keep: dict[str, Any]) -> Refresher:
    value = {"name": "orders", "source": "A.B.C", "row_key": "ID", "datasource": {"name": "n", "project": "p"}}
    env = {"SNOWFLAKE_ACCOUNT": "a", "SNOWFLAKE_USER": "u", "SNOWFLAKE_PASSWORD": "p"}
    return Refresher(
        spec_from_mapping({**value, "keep": keep}, "a test"),
        snowflake=SnowflakeAccess.from_environment(env),
        tableau=TableauAccess("https://tableau.example.com", "", TableauToken("t", "s")),
        spark=lambda: pytest.fail("nothing is read here"),
        home=folder,
    )
