"""Extract specs: what a file declares, and what a user reads when it cannot work."""

from __future__ import annotations

import pytest

from tir_dagster.errors import SpecError
from tir_dagster.spec import Changes, ExtractSpec, load_specs, parse_specs, spec_from_mapping

GOOD = """\
extracts:
  - name: orders
    source: MYDB.MYSCHEMA.MYTABLE
    row_key: ORDER_ID
    slices: {column: ORDER_DATE, by: month, start: 2024-12}
    changes: {watermark: UPDATED_AT, look_back: 10 minutes}
    datasource:
      project: sales/europe
      name: Orders
      credentials: {username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}
    thresholds: {quiet_period: 1 minute, delete_share: 0.5}
"""


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


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("name: orders", "name: Orders!"), "tir.yaml:2: extracts[0].name: use lower-case"),
        (("row_key:", "row_keys:"), "tir.yaml:4: extracts[0].row_keys: unknown field; did you mean `row_key`"),
        (("by: month", "by: year"), "tir.yaml:5: extracts[0].slices.by: 'year' is not one of month, week, day, none"),
        (("start: 2024-12", "start: December"), "extracts[0].slices.start: give the first month as YYYY-MM"),
        (("10 minutes", "soon"), "tir.yaml:6: extracts[0].changes.look_back: 'soon' is no duration"),
        (
            ("delete_share: 0.5", "delete_share: 50"),
            "extracts[0].thresholds.delete_share: give a share between 0 and 1",
        ),
        (("      name: Orders\n", ""), "extracts[0].datasource.name: missing"),
        (("source: MYDB.MYSCHEMA.MYTABLE", "source: MYTABLE"), "tir.yaml:3: extracts[0].source: give the table as"),
        (("password_env: SNOWFLAKE_PASSWORD", "password: secret"), "credentials.password: unknown field"),
        (("0.5}", "0.5}\n    delivery: mail"), "tir.yaml:12: extracts[0].delivery: 'mail' is not one of republish"),
        (("start: 2024-12", "start: 2024-12, zone: Mars/North"), "is no time zone"),
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


@pytest.mark.parametrize("text", ["", "- a", "extracts: 5", "extracts: [5]", "a: {b", "extracts:\n\t- x"])
def test_files_of_another_shape_are_one_clear_error(text):
    assert "tir.yaml" in complaint(text)


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
