"""The JSON schema of spec files: what README and docs show passes it, wrong forms do not, and every field is described."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from tir_dagster import ExtractSpec, TableauExtractComponent
from tir_dagster.cli.main import tir
from tir_dagster.spec.reading import _plain, json_schema, parse_declared
from tir_dagster_tests.spec.sample import ALERTS, GOOD

ROOT = Path(__file__).parents[2]
# What an example leaves out with "…".
LEFT_OUT = {
    "name": "orders",
    "source": "MYDB.MYSCHEMA.MYTABLE",
    "row_key": "ORDER_ID",
    "slices": {"column": "ORDER_DATE", "by": "month", "start": "2024-12"},
    "datasource": {"project": "myproject", "name": "mydatasource"},
}


def read(text: str) -> Any:
    return _plain(yaml.compose(text, Loader=yaml.SafeLoader), "", {}, [])


def document(value: Any) -> dict[str, Any]:
    """The spec file that an example means: whole, one extract of a component, or some fields of an extract."""
    if set(value) <= {"extracts", "loads"}:
        extracts = [
            extract if {"query", "tables"} & extract.keys() else LEFT_OUT | extract
            for extract in value.get("extracts", [])
        ]
        return value | ({"extracts": extracts} if extracts else {})
    fields = value.get("attributes", value)
    # Several tables have their own sources.
    left_out = {name: LEFT_OUT[name] for name in ("name", "datasource")} if "tables" in fields else LEFT_OUT
    return {"extracts": [left_out | fields]}


def examples() -> list[Any]:
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"(?:^    .*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
            text = re.sub(r"^ *…\n", "", dedent(block), flags=re.MULTILINE)
            known = r"(#.*\n)*(extracts|loads|type|" + "|".join(ExtractSpec.__dataclass_fields__) + r"):[ \n]"
            if re.match(known, text):
                found += [pytest.param(example, id=f"{page.name} {len(found)}") for example in one_by_one(text)]
    return found


def one_by_one(text: str) -> list[str]:
    """The lines of a block that shows a field several times, or the block."""
    lines = text.splitlines()
    names = [line.split(":")[0] for line in lines]
    return lines if len(set(names)) < len(names) and not any(line.startswith((" ", "-")) for line in lines) else [text]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    answer = CliRunner().invoke(tir, ["schema"])
    assert answer.exit_code == 0, answer.output
    value: dict[str, Any] = json.loads(answer.stdout)
    Draft202012Validator.check_schema(value)
    return value


def errors(schema: dict[str, Any], value: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(value)]


def test_the_pages_have_examples():
    pages = {str(example.id).split()[0] for example in examples()}
    assert {"README.md", "refresh.md", "loading.md", "alerts.md", "dagster.md", "deliveries.md", "queries.md"} <= pages


@pytest.mark.parametrize("text", examples())
def test_every_example_of_the_pages_passes_the_schema_and_is_read(schema, text):
    value = document(read(text))
    assert errors(schema, value) == []
    parse_declared(json.dumps(value), "example")


def test_everything_that_a_spec_may_have_passes(schema):
    assert errors(schema, read(GOOD + ALERTS)) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("row_key: ORDER_ID", "row_keys: ORDER_ID"),
        ("row_key: ORDER_ID", "row_key: 5"),
        ("by: month", "by: year"),
        ("delete_share: 0.5", "delete_share: half"),
        ("look_back: 10 minutes", "look_back: [10]"),
        ("      name: Orders\n", ""),
        ("    source: MYDB.MYSCHEMA.MYTABLE\n", ""),
        ("extracts:", "extract:"),
    ],
)
def test_wrong_forms_do_not_pass(schema, right, wrong):
    assert GOOD.replace(right, wrong) != GOOD
    assert errors(schema, read(GOOD.replace(right, wrong)))


def test_the_texts_below_the_fields_are_their_descriptions(schema):
    parts = schema["$defs"]
    assert parts["Changes"]["properties"]["look_back"]["description"].startswith("How long before the last watermark")
    assert parts["JoinedChanges"]["properties"]["watermark"]["description"] == "The column that every change raises."
    assert parts["LoadSpec"]["properties"]["alerts"]["description"].startswith("Who gets messages")


def test_the_component_has_the_schema_of_an_extract(schema):
    component = TableauExtractComponent.get_model_cls().model_json_schema()
    extract = {name: value for name, value in component.items() if name != "$defs"}
    assert extract == json_schema()["$defs"]["ExtractSpec"]
    assert extract["anyOf"] == [{"required": [name]} for name in ("source", "query", "tables")]
