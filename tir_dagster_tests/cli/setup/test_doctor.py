"""`tir doctor` on the sandbox: what is well, what is not and how it is mended; no check stops the others, nothing is written."""

from __future__ import annotations

import ast
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import tir_dagster
from tir_dagster.cli.setup.checks import Check, ok, run_group
from tir_dagster.cli.setup.doctor import clock_result
from tir_dagster.cli.setup.environment import VARIABLES
from tir_dagster.errors import TirError
from tir_dagster.orchestration.alerts.resources import SERVICENOW_VARIABLES, SLACK_VARIABLES
from tir_dagster.orchestration.resources import TABLEAU_VARIABLES
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster_tests.cli.setup.conftest import Site
from tir_dagster_tests.conftest import People

PACKAGE = Path(tir_dagster.__file__).parent


def declare(site: Site, source: str, *more: str, datasource: str = "orders") -> None:
    fields = [
        "name: orders",
        f"source: {source}",
        "row_key: ID",
        f"datasource: {{project: {site.project.name}, name: {datasource}}}",
        *more,
    ]
    Path("extracts.yaml").write_text("extracts:\n  - " + "\n    ".join(fields) + "\n", encoding="utf-8")


def doctor(site: Site, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    result = site.run("--specs", "extracts.yaml", "doctor", "--json", *arguments)
    return result.exit_code, json.loads(result.stdout)


def states(findings: list[dict[str, Any]]) -> set[str]:
    return {one["state"] for one in findings}


def bad(findings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The state and the whole text of every finding that is not ok."""
    return [(one["state"], f"{one['detail']} {one['fix']}".strip()) for one in findings if one["state"] != "ok"]


def test_all_is_well_and_nothing_is_written(site: Site, people: People):
    declare(site, site.orders(), "changes: {detector: feed}")
    before = sorted(site.folder.rglob("*"))
    site.admin.forget_calls()
    code, findings = doctor(site)
    assert (code, bad(findings)) == (0, [])
    assert {one["group"] for one in findings} == {"machine", "snowflake", "tableau", "slack", "servicenow"}
    assert sorted(site.folder.rglob("*")) == before
    calls = [call for call in site.admin.calls() if call["agent"].startswith("tir_dagster")]
    assert {call["route"] for call in calls if call["method"] != "GET"} == {"sign_in", "sign_out"}
    assert (people.messages(), people.incidents()) == ([], [])


@pytest.mark.long
def test_people_read_a_line_each_and_a_summary(site: Site):
    declare(site, site.orders())
    result = site.run("--specs", "extracts.yaml", "doctor", "snowflake")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ok       snowflake  sign-in: Snowflake ")
    assert re.fullmatch(r"All \d checks are well\.", lines[-1])


def test_a_missing_table_is_a_failure_and_the_next_group_is_still_examined(site: Site):
    site.orders()
    declare(site, f"SETUPS.{site.schema}.ORDRES")
    code, findings = doctor(site, "snowflake", "tableau")
    assert code == 1
    ((state, text),) = bad(findings)
    assert (state, f"Did you mean SETUPS.{site.schema}.ORDERS?" in text) == ("failure", True)
    assert any(one["group"] == "tableau" and "The first refresh creates it." in one["detail"] for one in findings)


def test_a_feed_without_change_tracking_and_without_time_travel_is_warned_of(site: Site):
    table = site.orders()
    site.sql(f"ALTER TABLE {table} SET CHANGE_TRACKING = FALSE")
    site.sql(f"ALTER TABLE {table} SET DATA_RETENTION_TIME_IN_DAYS = 0")
    declare(site, table, "changes: {detector: feed}")
    code, findings = doctor(site, "snowflake")
    texts = [text for _, text in bad(findings)]
    assert (code, states(findings)) == (0, {"ok", "warning"})
    assert f"ALTER TABLE {table} SET CHANGE_TRACKING = TRUE" in texts[0]
    assert f"ALTER TABLE {table} SET DATA_RETENTION_TIME_IN_DAYS = 1" in texts[1]


def test_servers_that_are_down_are_failures_of_their_own_groups(site: Site, monkeypatch: pytest.MonkeyPatch):
    declare(site, site.orders())
    monkeypatch.setenv("TABLEAU_SERVER_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("SLACK_BOT_TOKEN", "xoxb-wrong")
    monkeypatch.setenv("SERVICENOW_PASSWORD", "wrong")
    code, findings = doctor(site, "tableau", "snowflake", "slack", "servicenow")
    failed = {one["group"]: one["detail"] for one in findings if one["state"] == "failure"}
    assert (code, set(failed)) == (1, {"tableau", "slack", "servicenow"})
    assert "cannot be reached" in failed["tableau"]
    assert failed["slack"] == "Slack refused: invalid_auth"
    assert "xoxb-wrong" not in json.dumps(findings)


def test_a_user_who_may_not_publish_is_told_before_the_first_refresh(site: Site, monkeypatch: pytest.MonkeyPatch):
    name, secret = site.sandbox.new_token(site.sandbox.identity.reader_user)
    monkeypatch.setenv("TABLEAU_TOKEN_NAME", name)
    monkeypatch.setenv("TABLEAU_TOKEN_SECRET", secret)
    site.orders()
    site.publish_extract("orders", table="ORDERS")
    declare(site, f"SETUPS.{site.schema}.ORDERS")
    code, findings = doctor(site, "tableau")
    texts = {text: state for state, text in bad(findings)}
    assert code == 1
    assert any(f"may not publish in project '{site.project.name}'" in text for text in texts)
    assert any("Publishing over datasource 'orders'" in text and "would lose the password" in text for text in texts)
    assert [state for text, state in texts.items() if "makes this user its owner" in text] == ["warning"]


def test_a_delivery_that_the_datasource_does_not_allow_is_a_failure(site: Site):
    site.orders()
    site.publish_extract("orders", table="ORDERS")
    credentials = "{username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}"
    source = f"SETUPS.{site.schema}.ORDERS"
    declare(site, source, "delivery: server")
    file = Path("extracts.yaml")
    file.write_text(file.read_text().replace("name: orders}", f"name: orders, credentials: {credentials}}}"))
    assert [text.split(" Enable")[0] for _, text in bad(doctor(site, "tableau")[1])] == [
        "incremental refresh is not set up"
    ]
    file.write_text(file.read_text().replace("delivery: server", "delivery: patch"))
    assert "the delivery patch keeps none" in bad(doctor(site, "tableau")[1])[0][1]


def test_a_spec_that_cannot_be_read_is_one_failure_and_the_servers_are_still_examined(site: Site):
    Path("extracts.yaml").write_text("extracts: [", encoding="utf-8")
    code, findings = doctor(site, "machine", "snowflake")
    assert code == 1
    assert [one["name"] for one in findings if one["state"] == "failure"] == ["specs"]
    assert any(one["group"] == "snowflake" for one in findings)


@pytest.mark.long
def test_declared_places_of_files_are_examined(site: Site):
    path = site.folder / "landing"
    load = "{name: files, table: %s, mode: append, files: {path: '%s', format: csv}}"
    place = f"file://{path}"
    Path("extracts.yaml").write_text(f"loads: [{load % (site.orders(), place)}]", encoding="utf-8")
    assert bad(doctor(site, "s3")[1]) == [
        ("warning", "there is nothing yet Check the address in the load's spec; files may land there later.")
    ]
    path.mkdir()
    assert bad(doctor(site, "s3")[1]) == []


# The checks themselves


def broken() -> Any:
    raise ValueError("http://user:secret@host does not answer")


def test_an_error_in_one_check_is_its_finding_and_the_next_one_runs():
    findings = list(run_group("g", lambda: iter([Check("one", broken), Check("two", lambda: ok("well"))]), seconds=60))
    assert [(one.name, one.state) for one in findings] == [("one", "failure"), ("two", "ok")]
    assert "secret" not in findings[0].detail


def test_a_group_that_breaks_between_checks_is_a_finding():
    def checks():
        yield Check("one", lambda: ok("well"))
        raise TirError("the server went away. Start it.")

    assert [(one.name, one.state) for one in run_group("g", checks, seconds=60)] == [("one", "ok"), ("g", "failure")]


def test_a_check_that_does_not_answer_ends_its_group_in_time():
    never = threading.Event()
    checks = [Check("one", lambda: ok("well")), Check("two", lambda: ok(str(never.wait(60)))), Check("three", broken)]
    findings = list(run_group("g", lambda: iter(checks), seconds=0.2))
    never.set()
    assert (findings[-1].name, findings[-1].state) == ("two", "failure")
    assert "no answer within 0.2 s" in findings[-1].detail


@pytest.mark.parametrize(
    ("seconds", "state"), [(2, "ok"), (-29, "ok"), (31, "warning"), (-31, "warning"), (300, "failure")]
)
def test_clocks_that_differ_are_told(seconds: float, state: str):
    assert clock_result(seconds, "Tableau").state == state


# The environment


def test_variables_are_listed_with_whether_they_are_set_and_never_with_their_values(site: Site, monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "very secret")
    credentials = "credentials: {username: TIR, password_env: MY_PASSWORD}"
    declare(site, "A.B.C")
    file = Path("extracts.yaml")
    file.write_text(file.read_text().replace("name: orders}", f"name: orders, {credentials}}}"))
    result = site.run("--specs", "extracts.yaml", "doctor", "--env")
    assert result.exit_code == 0
    assert re.search(r"^  set +MY_PASSWORD +credentials of its datasource$", result.stdout, re.MULTILINE)
    assert re.search(r"^  not set  SNOWFLAKE_PRIVATE_KEY ", result.stdout, re.MULTILINE)
    for name in ("MY_PASSWORD", "SNOWFLAKE_PASSWORD", "TABLEAU_TOKEN_SECRET", "SLACK_BOT_TOKEN"):
        import os

        assert os.environ[name] not in result.stdout
    listed = json.loads(site.run("doctor", "--env", "--json").stdout)
    assert {"name", "is_set", "where", "used_for"} == set(listed[0])


class Asked(dict):
    """An environment that remembers what it was asked for."""

    def get(self, name, default=None):
        self.setdefault("asked", set()).add(name)
        return super().get(name, default)


def read_variables() -> set[str]:
    """Every name of a variable that stands in the source: read from the environment, or with one of the known beginnings."""
    beginning = re.compile(
        r"(TIR|SNOWFLAKE|TABLEAU|SLACK|SERVICENOW|AWS|SPARK|PYSPARK|DAGSTER|JAVA)_[A-Z0-9_]*[A-Z0-9]"
    )
    reading = re.compile(r"(?:environ|getenv|\benv)\b(?:\.get\(|\.setdefault\(|\[|\()\s*[\"']([A-Z][A-Z0-9_]*)[\"']")
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        if "sandbox" in file.relative_to(PACKAGE).parts or file.name == "environment.py":
            continue
        text = file.read_text(encoding="utf-8")
        names |= set(reading.findall(text))
        literals = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        names |= {value for value in literals if isinstance(value, str) and beginning.fullmatch(value)}
    return names


# Names in SQL, a variable that is set for a child process, and one that drafts of specs name.
NOT_READ = {
    *("TIR_OLD", "TIR_NEW", "TIR_STAGE", "TIR_LOADS", "TIR_LOADED_FILES", "TIR_REJECTED_ROWS", "TIR_N", "TIR_SLICE"),
    *("SPARK_HOME", "TABLEAU_SNOWFLAKE_PASSWORD"),
}


def test_every_variable_that_the_product_reads_is_in_the_table():
    asked = Asked(SNOWFLAKE_ACCOUNT="a", SNOWFLAKE_USER="u", SNOWFLAKE_PASSWORD="p")
    SnowflakeAccess.from_environment(asked)
    by_settings = {*TABLEAU_VARIABLES.values(), *SLACK_VARIABLES.values(), *SERVICENOW_VARIABLES.values()}
    known = {variable.name for variable in VARIABLES}
    assert read_variables() | by_settings | asked["asked"] - {"asked"} <= known | NOT_READ


def test_the_table_names_each_variable_once():
    names = [variable.name for variable in VARIABLES]
    assert len(names) == len(set(names))
