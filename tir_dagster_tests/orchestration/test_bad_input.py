"""What a user reads when `tir plan` or `tir refresh` cannot do it; most of it is in tir_dagster_tests/bad_inputs, the rest needs a story."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tableauhyperapi import Connection, HyperProcess, Telemetry

from tir_dagster_tests.orchestration.conftest import Place
from tir_dagster_tests.orchestration.shell import FAILED, WRONG, Built, CommandResult, Shell, published, sample_columns
from tir_dagster_tests.sandbox.tableau.helpers import Admin, rewritten

CREDENTIALS = "      credentials: {username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}\n"
WRONG_USAGE = 2
SPARSE_BYTES = 4 * 2**40


@pytest.fixture
def shell(place: Place) -> Iterator[Shell]:
    admin = Admin(place.sandbox.tableau_url)
    yield Shell(place)
    admin.clear_faults()


@pytest.fixture
def admin(place: Place) -> Admin:
    return Admin(place.sandbox.tableau_url)


# Tableau: the project and the datasource


def test_two_projects_of_one_name_need_a_path(shell, built):
    for top in ("north", "south"):
        built.project(top, "twins")
        built.publish("dx", built.base, project="twins", parent=top)
    error = shell.refused(edit=(("myproject", "twins"), ("mydatasource", "dx")))
    assert "2 projects" in error
    assert "'north/twins', 'south/twins'. Write the full path" in error
    planned = shell.tir("plan", "orders", edit=(("myproject", "south/twins"), ("mydatasource", "dx")))
    assert planned.code == 0, planned


@pytest.fixture(scope="module")
def built(place: Place) -> Built:
    datasources = Built(place, place.folder / "built", {})
    datasources.build("base.tdsx", sample_columns(), table="MYTABLE")
    return datasources


def two_tables(built: Built) -> Path:
    """The same package, with one table more in its extract."""
    file = built.folder / "two.hyper"
    with zipfile.ZipFile(built.base) as package:
        (member,) = [name for name in package.namelist() if name.endswith(".hyper")]
        file.write_bytes(package.read(member))
    with (
        HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process,
        Connection(process.endpoint, file) as connection,
    ):
        connection.execute_command('CREATE TABLE "Extract"."Customers_2" ("ID" INT)')
    return rewritten(built.base, built.folder / "two.tdsx", drop=".hyper", add=[(member, file.read_bytes())])


def test_an_extract_of_two_tables_is_refused(shell, built):
    built.publish("dx", two_tables(built))
    assert "holds 2 tables" in shell.refused(edit=(("name: mydatasource", "name: dx"),))


def test_columns_of_the_datasource_that_the_spec_leaves_out_are_refused(shell, built):
    built.publish("dx", built.base)
    columns = ("row_key:", "columns: [ORDER_ID, ORDER_DATE, UPDATED_AT]\n    row_key:")
    error = shell.refused(edit=(("name: mydatasource", "name: dx"), columns))
    assert "it also has the columns CATEGORY, CUSTOMER," in error


def test_a_password_that_publishing_would_lose_is_asked_for_before_anything_is_downloaded(shell, admin):
    assert "would lose the password embedded" in shell.refused(edit=((CREDENTIALS, ""),))
    admin.forget_calls()
    assert shell.tir("refresh", "orders", edit=((CREDENTIALS, ""),)).code == FAILED
    assert {"list_connections"} <= (routes := {call["route"] for call in admin.calls()})
    assert not routes & {"download", "download_revision", "publish", "start_upload"}


# The servers and who signs in


@pytest.mark.parametrize(
    "name", ["SNOWFLAKE_ACCOUNT", "SNOWFLAKE_USER", "TABLEAU_SERVER_URL", "TABLEAU_TOKEN_NAME", "TABLEAU_TOKEN_SECRET"]
)
def test_a_missing_variable_is_named(shell, name):
    shell.env[name] = None
    assert name in shell.refused()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("SNOWFLAKE_PASSWORD", WRONG, "Check user and credential"),
        ("SNOWFLAKE_PORT", "9", "127.0.0.1:9: Could not connect"),
    ],
)
def test_a_server_that_is_not_there_or_says_no_is_told_with_what_to_check(shell, name, value, sentence):
    shell.env[name] = value
    assert sentence in shell.refused()


def test_a_tableau_server_that_cannot_be_reached_is_told_with_its_address(shell):
    # Without https on the other side the first try is the last: what may pass is tried for longer.
    url = shell.place.sandbox.tableau_url.replace("http:", "https:")
    shell.env["TABLEAU_SERVER_URL"] = url
    error = shell.refused()
    assert f"{url} (site 'sandbox') cannot be reached" in error
    assert "Check TABLEAU_SERVER_URL" in error


def test_a_session_ended_by_another_sign_in_is_opened_again_and_one_that_always_ends_is_told(shell, admin):
    admin.fault("expire_session", path="/datasources$")
    assert shell.tir("plan", "orders").code == 0
    assert admin.faults() == [], "the session did end"
    admin.fault("expire_session", path="/projects$", times=1000)
    error = shell.refused()
    assert "A token carries one session, so another process uses the same one" in error


def test_without_java_one_sentence_says_what_to_install(shell, tmp_path):
    before = published(shell.place)
    done = subprocess.run(
        [sys.executable, "-m", "tir_dagster.cli.main", "refresh", "orders", "--full", "--json"],
        env={**os.environ, "TIR_SPECS": str(shell.specs()), "JAVA_HOME": str(tmp_path), "TIR_SPARK_ROWS": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    result = shell.harmless(CommandResult(done.returncode, done.stdout, done.stderr))
    assert (result.code, result.stdout) == (FAILED, "")
    assert result.error.startswith(
        f"Error: Spark needs Java 17 or 21, and JAVA_HOME is {tmp_path}, which has no bin/java."
    )
    assert "openjdk-17-jre-headless" in result.error
    lines = result.stderr.strip().splitlines()
    assert all(line.startswith(("[", "Error: ")) for line in lines), "only progress and the error"
    assert published(shell.place) == before


def test_a_refresh_that_reads_everything_tells_its_steps(shell, monkeypatch):
    monkeypatch.setenv("TIR_SPARK_ROWS", "0")
    result = shell.tir("refresh", "orders", "--full", "--json")
    assert result.code == 0, result
    assert json.loads(result.stdout)["published"]
    steps = [line.split("] ", 1)[1] for line in result.stderr.splitlines()]
    assert "starting Spark" in steps
    assert any(
        re.fullmatch("[0-9,]+ rows purged, 3,000 appended: verifying against the source", step) for step in steps
    )


# The guards, on a loaded extract


@pytest.fixture
def guarded(restored: Place) -> Shell:
    """A shell on the loaded extract, whose source has the rows of before after the test."""
    return Shell(restored)


def stopped(shell: Shell, *arguments: str) -> str:
    before = published(shell.place)
    result = shell.tir("refresh", "orders", "--json", *arguments)
    assert (result.code, result.stdout) == (FAILED, "")
    assert published(shell.place) == before
    return result.error


def test_a_disk_too_full_is_told_before_spark_starts(guarded):
    extract = max(guarded.place.folder.glob("state/extracts/orders/versions/v*/extract.hyper"))
    size = extract.stat().st_size
    guarded.place.sql("UPDATE MYTABLE SET NOTE = 'disk' WHERE ORDER_ID % 500 = 0")
    try:
        # Sparse: it takes no room, but its copy would.
        os.truncate(extract, SPARSE_BYTES)
        error = guarded.refused()
    finally:
        os.truncate(extract, size)
    assert f"{guarded.place.folder}/state/extracts/orders needs 8,388,608 MB of free disk space and has " in error


def test_more_deletes_than_allowed_stop_a_refresh(guarded):
    guarded.place.sql("DELETE FROM MYTABLE WHERE ORDER_ID % 2 = 0")
    error = stopped(guarded)
    assert "of 3,000 rows would vanish, more than the 30% that thresholds.delete_share in the spec allows" in error
    assert "Nothing was touched" in error
    assert error.endswith("tir refresh orders --allow-empty.")


def test_an_empty_source_is_no_first_load(guarded):
    guarded.place.sql("TRUNCATE TABLE MYTABLE")
    error = guarded.tir("refresh", "others", edit=(("name: orders", "name: others"), ("mydatasource", "others"))).error
    assert error.startswith("Error: others: MYDB.MYSCHEMA.MYTABLE is empty. Nothing was touched. Load it first;")
    assert "others" not in {name for name, *_ in published(guarded.place).values()}


def test_an_empty_source_stops_a_refresh_unless_it_is_allowed(guarded):
    guarded.place.sql("TRUNCATE TABLE MYTABLE")
    error = stopped(guarded, "--full")
    assert "orders: the source is empty, the extract has 3,000 rows" in error
    assert error.endswith("tir refresh orders --allow-empty.")
    month = guarded.place.spec.slices.start or ""
    result = guarded.tir("refresh", "orders", "--json", "--slices", month, "--allow-empty")
    assert result.code == 0, result
    assert json.loads(result.stdout)["published"]
    assert not guarded.place.published_rows()


def in_words(query: str) -> tuple[tuple[str, str], ...]:
    return (
        ("source: MYDB.MYSCHEMA.MYTABLE", f"query: {query}"),
        ("name: mydatasource", "name: by_query\n      create: true"),
    )


def test_the_plan_of_a_query_is_explained(shell):
    query = "SELECT ORDER_ID, ORDER_DATE, CUSTOMER FROM MYDB.MYSCHEMA.MYTABLE WHERE QUANTITY > 1"
    result = shell.tir("plan", "orders", "--explain", edit=in_words(query))
    assert result.code == 0, result.stderr
    assert "A copy of MYDB.MYSCHEMA.MYTABLE." in result.stdout
    assert "not used: " in result.stdout
    assert "Refreshed by key:" in result.stdout
