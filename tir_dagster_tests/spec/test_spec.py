"""Extract specs: what a file declares, and what a user reads when it cannot work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tir_dagster.errors import SpecError
from tir_dagster.refresh.survey import definition_of
from tir_dagster.spec.extract import Changes, ExtractSpec, Keep, check_columns
from tir_dagster.spec.reading import load_specs, parse_specs, spec_from_mapping
from tir_dagster_tests.spec.sample import ALERTS, GOOD


def complaint(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_specs(text, "tir.yaml")
    return str(caught.value)


def test_a_file_becomes_specs():
    (spec,) = parse_specs(GOOD, "tir.yaml")
    assert (spec.name, spec.row_key, spec.slices.start, spec.slices.zone) == ("orders", ("ORDER_ID",), "2024-12", "UTC")
    assert spec.changes == Changes(watermark="UPDATED_AT", look_back=600.0, deletes=True)
    assert spec.thresholds.quiet_period == 60.0
    assert spec.datasource.project == "sales/europe"
    assert (spec.delivery, spec.policy) == ("republish", "auto")


def test_how_much_is_kept_is_a_number_of_versions_and_a_size():
    (spec,) = parse_specs(GOOD + "    keep: {versions: 7, size: 1.5 gb}\n", "tir.yaml")
    assert spec.keep == Keep(versions=7, size=1_500_000_000)
    assert parse_specs(GOOD, "tir.yaml")[0].keep == Keep(versions=3, size=None)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("name: orders", "name: Orders!"), "tir.yaml:2: extracts[0].name: use lower-case"),
        (("row_key:", "row_keys:"), "tir.yaml:4: extracts[0].row_keys: unknown field; did you mean `row_key`"),
        (
            ("by: month", "by: year"),
            "tir.yaml:5: extracts[0].slices.by: 'year' is not one of month, week, day, value, none",
        ),
        (("by: month", "by: value"), "extracts[0].slices.start: slices by value have no first one; leave it out"),
        (("start: 2024-12", "start: December"), "extracts[0].slices.start: give the first month as YYYY-MM"),
        (("10 minutes", "soon"), "tir.yaml:6: extracts[0].changes.look_back: 'soon' is no duration"),
        (
            ("delete_share: 0.5", "delete_share: 50"),
            "extracts[0].thresholds.delete_share: give a share between 0 and 1",
        ),
        (("      name: Orders\n", ""), "extracts[0].datasource.name: missing"),
        (("source: MYDB.MYSCHEMA.MYTABLE", "source: MYTABLE"), "tir.yaml:3: extracts[0].source: give the table as"),
        (("password_env: SNOWFLAKE_PASSWORD", "password: secret"), "credentials.password: unknown field"),
        (
            ("username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD", "username_env: SNOWFLAKE_USER"),
            "credentials.password_env: name the environment variable that holds the password, or sign in by `method: key_pair`",
        ),
        (
            ("password_env: SNOWFLAKE_PASSWORD", "password_env: SNOWFLAKE_PASSWORD, method: key_pair"),
            "credentials.password_env: leave it out: with `method: key_pair` the secret is saved in Tableau",
        ),
        (
            ("username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD", "method: oauth"),
            "credentials.username: give either username or username_env",
        ),
        (
            ("password_env: SNOWFLAKE_PASSWORD", "method: keypair"),
            "credentials.method: 'keypair' is not one of key_pair, password, oauth",
        ),
        (("0.5}", "0.5}\n    delivery: mail"), "tir.yaml:12: extracts[0].delivery: 'mail' is not one of republish"),
        (("start: 2024-12", "start: 2024-12, zone: Mars/North"), "is no time zone"),
        (("start: 2024-12", "start: 2024-13"), "tir.yaml:5: extracts[0].slices.start: give the first month as YYYY-MM"),
        (("start: 2024-12", "start: 2999-01"), "extracts[0].slices.start: 2999-01 lies in the future"),
        (("MYDB.MYSCHEMA.MYTABLE", "MYDB.MY SCHEMA.MYTABLE"), 'in double quotes: DATABASE.SCHEMA."My Table"'),
        (("MYDB.MYSCHEMA.MYTABLE", "'A.\"B'"), "extracts[0].source: give the table as"),
        (("row_key: ORDER_ID", "row_key: A\n    row_key: B"), "tir.yaml:5: extracts[0].row_key: given twice; keep one"),
        (
            ("0.5}", "0.5}\n    keep: {size: much}"),
            "extracts[0].keep.size: 'much' is no size; write one such as `500 MB`",
        ),
        (("0.5}", "0.5}\n    keep: {size: 20}"), "extracts[0].keep.size: 20 is no size"),
        (("0.5}", "0.5}\n    keep: {versions: 0}"), "extracts[0].keep.versions: give a number of at least 1"),
        (("0.5}", "0.5}\n    keep: {versions: 2.5}"), "extracts[0].keep.versions: 2.5 is not a whole number"),
        (("0.5}", "0.5}\n    keep: {versions: true}"), "extracts[0].keep.versions: True is not a whole number"),
        (("row_key: ORDER_ID", "row_key: 5"), "tir.yaml:4: extracts[0].row_key: give a name or a list of names"),
    ],
)
def test_a_mistake_is_named_with_file_line_field_and_fix(change, expected):
    assert GOOD.replace(*change) != GOOD
    assert expected in complaint(GOOD.replace(*change))


def test_all_mistakes_are_named_at_once():
    text = complaint(GOOD.replace("by: month", "by: year").replace("10 minutes", "soon"))
    assert len(text.splitlines()) == 2


def test_two_extracts_of_one_name_are_refused():
    assert "a second extract is named 'orders'" in complaint(GOOD + GOOD.split("\n", 1)[1])


def test_two_extracts_of_one_datasource_are_refused():
    second = GOOD.split("\n", 1)[1].replace("name: orders", "name: orders_again", 1)
    text = complaint(GOOD + second)
    assert "orders and orders_again have the same datasource" in text
    assert "give each extract its own" in text


@pytest.mark.parametrize("text", ["", "- a", "extracts: 5", "extracts: [5]", "a: {b", "extracts:\n\t- x"])
def test_files_of_another_shape_are_one_clear_error(text):
    assert "tir.yaml" in complaint(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("extracts:\n\t- x", "tir.yaml:2: not YAML: found character '\\t'"),
        ("a: {b", "tir.yaml:1: not YAML: expected ',' or '}'"),
        ("extracts: !!int abc", "tir.yaml: not YAML: "),
        ("\x00", "tir.yaml: not YAML: "),
        ("extracts: &a [*a]", "tir.yaml: an anchor contains itself"),
    ],
)
def test_what_is_not_yaml_is_one_line_with_its_place(text, told):
    assert complaint(text).startswith(told)
    assert len(complaint(text).splitlines()) == 1


def test_a_file_that_is_not_text_is_told(tmp_path):
    (tmp_path / "tir.yaml").write_bytes(b"extracts: \xff\xfe")
    with pytest.raises(SpecError, match=r"tir\.yaml: not text in UTF-8\. Save the spec file as UTF-8"):
        load_specs(tmp_path / "tir.yaml")


@pytest.mark.parametrize("source", ["db.schema.orders", 'DB.SCHEMA."My Table"', '"a.b"."c""d".E', " A . B . C "])
def test_full_table_names_are_taken_as_written(source):
    (spec,) = parse_specs(GOOD.replace("MYDB.MYSCHEMA.MYTABLE", f"'{source}'"), "tir.yaml")
    assert spec.source == source


def test_columns_are_found_as_written_or_in_upper_case():
    (spec,) = parse_specs(GOOD.replace("ORDER_ID", "order_id"), "tir.yaml")
    check_columns(spec, ["ORDER_ID", "ORDER_DATE", "UPDATED_AT"])
    check_columns(spec, ["order_id", "ORDER_DATE", "UPDATED_AT"])
    with pytest.raises(SpecError) as caught:
        check_columns(spec, ["ORDERID", "ORDER_DATE"])
    message = str(caught.value)
    assert (
        "orders: row_key names order_id, which MYDB.MYSCHEMA.MYTABLE does not have (did you mean ORDERID?)" in message
    )
    assert "changes.watermark names UPDATED_AT" in message, "all at once"
    assert "The source has ORDERID, ORDER_DATE" in message


def test_columns_that_a_refresh_works_with_must_be_among_those_of_the_extract():
    (spec,) = parse_specs(GOOD.replace("row_key:", "columns: [ORDER_ID, updated_at]\n    row_key:"), "tir.yaml")
    with pytest.raises(SpecError, match=r"`columns` leaves out what a refresh works with: slices\.column ORDER_DATE\."):
        check_columns(spec, ["ORDER_ID", "ORDER_DATE", "UPDATED_AT"])


def test_an_extract_without_key_and_slices_is_refused():
    text = complaint("extracts: [{name: a, source: A.B.C, datasource: {name: n, project: p}}]")
    assert "extracts[0].row_key: give a row key, or slices" in text


def test_no_file_named_means_no_extracts(monkeypatch):
    monkeypatch.delenv("TIR_SPECS", raising=False)
    assert load_specs() == ()


def test_a_missing_file_says_how_to_name_one(tmp_path):
    with pytest.raises(SpecError, match="Name the spec file with --specs or TIR_SPECS"):
        load_specs(tmp_path / "none.yaml")


def test_attributes_from_elsewhere_make_the_same_spec():
    (from_file,) = parse_specs(GOOD, "tir.yaml")
    value = {
        "name": "orders",
        "source": "MYDB.MYSCHEMA.MYTABLE",
        "row_key": ["ORDER_ID"],
        "slices": {"column": "ORDER_DATE", "by": "month", "start": "2024-12"},
        "changes": {"watermark": "UPDATED_AT", "look_back": "10 minutes"},
        "datasource": {
            "project": "sales/europe",
            "name": "Orders",
            "credentials": {"username_env": "SNOWFLAKE_USER", "password_env": "SNOWFLAKE_PASSWORD"},
        },
        "thresholds": {"quiet_period": "1 minute", "delete_share": 0.5},
    }
    assert spec_from_mapping(value, "component") == from_file
    assert isinstance(from_file, ExtractSpec)


def test_a_servers_jobs_are_waited_for_as_long_as_the_spec_says():
    text = GOOD.replace("name: Orders", "name: Orders\n      job_timeout: 90 minutes")
    (spec,) = parse_specs(text, "tir.yaml")
    assert spec.datasource.job_timeout == 5400
    with pytest.raises(SpecError, match=r"job_timeout: give at least a minute"):
        parse_specs(text.replace("90 minutes", "5 seconds"), "tir.yaml")


def test_who_is_told_is_declared_with_the_extract():
    (spec,) = parse_specs(GOOD + ALERTS, "tir.yaml")
    assert spec.alerts is not None
    assert (spec.alerts.slack.channel, spec.alerts.slack.on_success) == ("#mychannel", "daily")
    assert spec.alerts.servicenow.severity("server_down").urgency == "high"
    assert spec.alerts.servicenow.severity("guard").urgency == "low"
    assert (spec.alerts.timeout, spec.alerts.show_values) == (5.0, False)


def test_who_is_told_is_no_part_of_what_the_extract_shows():
    (with_alerts,), (without_alerts,) = parse_specs(GOOD + ALERTS, "tir.yaml"), parse_specs(GOOD, "tir.yaml")
    assert definition_of(with_alerts) == definition_of(without_alerts), "to add alerts must not cost a full refresh"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("#mychannel", "# my channel"), "extracts[0].alerts.slack.channel: '# my channel' is no channel"),
        (("on_success: daily", "daily_at: noon"), "alerts.slack.daily_at: 'noon' is no time of day"),
        (("daily", "sometimes"), "'sometimes' is not one of always, changed, daily, never"),
        (("group: mygroup, ", ""), "alerts.servicenow.group: name the assignment group"),
        (("server_down", "weather"), "alerts.servicenow.by_cause.weather: unknown cause; known are step_failed"),
        (("{extract}", "{secret}"), "alerts.servicenow.fields.u_name: {secret} is not known"),
        (("u_name", "state"), "alerts.servicenow.fields.state: an incident says this itself"),
        (("5 seconds", "5 minutes"), "alerts.timeout: give from 1 to 40 seconds"),
        (("timeout: 5 seconds", "attempts: 1.5"), "alerts.attempts: give a whole number"),
        (("timeout: 5 seconds", "channels: [Mail]"), "alerts.channels: 'Mail' names no class; write module:name"),
    ],
)
def test_alerts_that_cannot_work_are_told_with_their_place(change, expected):
    assert expected in complaint(GOOD + ALERTS.replace(*change))


def test_alerts_that_reach_nobody_are_refused():
    assert "alerts.slack: name somebody to tell" in complaint(GOOD + "    alerts: {timeout: 5 seconds}\n")


def test_what_may_be_created_or_replaced_is_said_in_the_spec_and_shows_no_other_rows():
    (spec,) = parse_specs(GOOD, "tir.yaml")
    (agreed,) = parse_specs(
        GOOD.replace("name: Orders", "name: Orders\n      create: true\n      replace: true"), "t.yaml"
    )
    assert (spec.datasource.create, spec.datasource.replace) == (False, False)
    assert (agreed.datasource.create, agreed.datasource.replace) == (True, True)
    # Of a triggered refresh the datasource is part of the definition; this is what the release before made of it.
    triggered = [definition_of(replace(spec, delivery="trigger")) for spec in (spec, agreed)]
    assert triggered == ["92fa6c8fbd28a5b2", "92fa6c8fbd28a5b2"]
