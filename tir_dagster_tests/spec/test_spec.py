"""Extract specs: what a file declares. What a user reads when it cannot work is in tir_dagster_tests/bad_inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tir_dagster.errors import SpecError
from tir_dagster.refresh.survey import definition_of
from tir_dagster.spec.extract import ExtractSpec, Keep, check_columns
from tir_dagster.spec.reading import load_specs, parse_specs, spec_from_mapping
from tir_dagster.spec.tables import Changes
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
    ],
)
def test_a_mistake_in_the_credentials_is_named_with_its_fix(change, expected):
    assert GOOD.replace(*change) != GOOD
    assert expected in complaint(GOOD.replace(*change))


def test_all_mistakes_are_named_at_once():
    text = complaint(GOOD.replace("by: month", "by: year").replace("10 minutes", "soon"))
    assert len(text.splitlines()) == 2


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


def test_no_file_named_means_no_extracts(monkeypatch):
    monkeypatch.delenv("TIR_SPECS", raising=False)
    assert load_specs() == ()


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
