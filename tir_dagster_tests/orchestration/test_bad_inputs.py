"""The table of bad inputs: every message is the real one, and what it says is unchanged is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tir_dagster_tests.bad_inputs import table
from tir_dagster_tests.bad_inputs.case import Scene
from tir_dagster_tests.orchestration.conftest import Place
from tir_dagster_tests.orchestration.shell import Built, sample_columns

WRITE = "TIR_WRITE_DOCS"


@pytest.fixture(scope="module")
def built(place: Place) -> Built:
    datasources = Built(place, place.folder / "built", {})
    datasources.build("base.tdsx", sample_columns(), table="MYTABLE")
    place.sql("CREATE OR REPLACE TABLE REFUSED (ID NUMBER(6,0), NAME VARCHAR(5), DAY DATE, PRICE NUMBER(8,2))")
    place.sql("INSERT INTO REFUSED VALUES (1, 'a', NULL, NULL)")
    return datasources


@pytest.mark.parametrize("area", table.AREAS)
def test_what_users_read_is_in_the_docs_and_nothing_changes(
    area: str, loaded: Place, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    # A proxy would answer for hosts that are not there.
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")
    rows = []
    for number, case in enumerate(case for case in table.CASES if case.area == area):
        folder = tmp_path / str(number)
        folder.mkdir()
        rows.append(case.play(Scene(loaded, folder, built)))
    text = table.section(area, rows)
    if WRITE in os.environ:
        table.write(area, text)
    assert table.sections().get(area) == text, "if the new messages are right, run: make docs-tables"


def test_the_docs_have_more_than_a_hundred_bad_inputs_and_nothing_else():
    assert tuple(table.sections()) == table.AREAS
    assert table.DOCS.read_text(encoding="utf-8").startswith(table.HEAD)
    done = [(case.area, case.done) for case in table.CASES]
    assert len(done) == len(set(done)), "a case is there twice"
    assert len(done) > 100
