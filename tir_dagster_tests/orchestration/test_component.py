"""An extract declared in a defs.yaml, loaded by Dagster's own component loading, beside its twin in a spec file."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import dagster as dg
import pytest
from dagster.components.core.package_entry import discover_package_objects
from dagster.components.testing import create_defs_folder_sandbox

import tir_dagster
from tir_dagster import FileLoadComponent, SpecError, TableauExtractComponent, build_extract_defs, environment_resources
from tir_dagster.orchestration.component import RESOURCES_FILE
from tir_dagster.spec.reading import load_declared, parse_specs
from tir_dagster_tests.orchestration.component import ATTRIBUTES


def twin():
    listed = textwrap.indent(ATTRIBUTES.replace("\"{{ 'tagged' }}\"", "tagged"), "    ")
    (spec,) = parse_specs("extracts:\n  -\n" + listed, "twin.yaml")
    return spec


@pytest.fixture
def project():
    with create_defs_folder_sandbox() as sandbox:
        (sandbox.defs_folder_path / "orders").mkdir()
        yield sandbox


def write(project, attributes: str) -> Path:
    file = project.defs_folder_path / "orders" / "defs.yaml"
    text = "type: tir_dagster.TableauExtractComponent\nattributes:\n" + textwrap.indent(attributes, "  ")
    file.write_text(text if attributes else "type: tir_dagster.TableauExtractComponent\n", encoding="utf-8")
    return file


def complaint(project, attributes: str) -> str:
    write(project, attributes)
    with pytest.raises(Exception) as failure, project.build_all_defs():
        pass
    messages, error = [], failure.value
    while error is not None:
        messages.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return "\n".join(messages)


def overview(defs: dg.Definitions):
    repository = defs.get_repository_def()
    graph = defs.resolve_asset_graph()
    return (
        {key: repr(graph.get(key).partitions_def) for key in graph.get_all_asset_keys()},
        sorted(job.name for job in repository.get_all_jobs() if not job.name.startswith("__")),
        sorted(sensor.name for sensor in repository.sensor_defs),
    )


def test_a_component_gives_the_definitions_of_its_twin_in_a_spec_file(project):
    write(project, ATTRIBUTES)
    resources = dg.Definitions(resources=environment_resources())
    with project.load_component_and_build_defs(project.defs_folder_path / "orders") as (component, defs):
        assert component.spec == twin()
        component_overview = overview(dg.Definitions.merge(defs, resources))
    assert component_overview == overview(dg.Definitions.merge(build_extract_defs(twin()), resources))
    assert len(component_overview[0]) == 4
    assert component_overview[1:] == (
        ["orders_detect", "orders_refresh", "orders_refresh_now", "orders_rollback", "orders_verify"],
        ["orders_refresh", "orders_source"],
    )


def test_a_wrong_field_gives_the_same_sentence_as_a_spec_file_and_names_file_and_line(project):
    message = complaint(project, ATTRIBUTES.replace("row_key: ORDER_ID", "row_keys: ORDER_ID"))
    assert "orders/defs.yaml:5: row_keys: unknown field; did you mean `row_key`?" in message


def test_all_problems_are_told_at_once(project):
    message = complaint(project, ATTRIBUTES.replace("by: day", "by: year").replace("10 minutes", "soon"))
    assert "slices.by: 'year' is not one of month, week, day, value, none." in message
    assert "changes.look_back: 'soon' is no duration" in message


def test_a_component_without_attributes_says_which_ones_are_missing(project):
    message = complaint(project, "")
    for field in ("name", "source", "datasource"):
        assert f"{field}: missing" in message


def test_the_schema_that_editors_see_has_every_field_of_the_spec():
    schema = TableauExtractComponent.get_model_cls().model_json_schema()
    assert set(schema["properties"]) == set(tir_dagster.ExtractSpec.__dataclass_fields__)
    assert schema["required"] == ["name", "datasource"], "source or query: the reader asks for one of them"
    assert schema["properties"]["policy"]["enum"] == ["auto", "incremental_only", "full"]
    assert {choice["type"] for choice in schema["$defs"]["Changes"]["properties"]["look_back"]["anyOf"]} == {
        "number",
        "string",
    }


@pytest.mark.parametrize("component_class", [TableauExtractComponent, FileLoadComponent])
def test_a_scaffolded_component_loads_as_it_is_under_the_name_of_its_folder(project, component_class):
    path = project.scaffold_component(component_cls=component_class, defs_path="Orders-2")
    with project.load_component_and_build_defs(path) as (component, _):
        assert component.spec.name == "orders_2"


def test_the_first_scaffold_adds_the_resources_without_which_definitions_do_not_load(project):
    project.scaffold_component(component_cls=TableauExtractComponent, defs_path="orders")
    project.scaffold_component(component_cls=FileLoadComponent, defs_path="sales/order_files")
    with project.build_all_defs() as defs:
        dg.Definitions.validate_loadable(defs)
    assert [file.name for file in project.defs_folder_path.rglob("*.py")] == [RESOURCES_FILE]


def test_a_scaffold_leaves_a_project_alone_that_has_its_resources(project):
    own = project.defs_folder_path / "ours.py"
    own.write_text("import tir_dagster\n\nours = tir_dagster.environment_resources()\n", encoding="utf-8")
    project.scaffold_component(component_cls=TableauExtractComponent, defs_path="orders")
    assert list(project.defs_folder_path.rglob("*.py")) == [own]


def test_the_command_line_reads_the_components_of_a_project(project):
    file = write(project, ATTRIBUTES.replace("\"{{ 'tagged' }}\"", "tagged"))
    load = project.scaffold_component(component_cls=FileLoadComponent, defs_path="order_files") / "defs.yaml"
    other = project.defs_folder_path / "other" / "defs.yaml"
    other.parent.mkdir()
    other.write_text("type: dagster.DefsFolderComponent\n---\ntype: x.Y\nattributes: [1]\n", encoding="utf-8")
    declared = load_declared(project.defs_folder_path)
    assert declared.extracts == (twin(),)
    assert [spec.name for spec in declared.loads] == ["order_files"]
    assert load_declared(file).extracts == (twin(),)
    load.write_text(file.read_text("utf-8"), encoding="utf-8")
    with pytest.raises(SpecError, match="a second extract is named 'orders'"):
        load_declared(project.defs_folder_path)


def test_the_command_line_says_what_it_cannot_read_in_a_project(project):
    file = write(project, ATTRIBUTES)
    with pytest.raises(SpecError, match=r"defs\.yaml: only dg fills in `\{\{ … \}\}`"):
        load_declared(project.defs_folder_path)
    write(project, ATTRIBUTES.replace("\"{{ 'tagged' }}\"", "tagged").replace("row_key:", "row_keys:"))
    with pytest.raises(SpecError, match=r"defs\.yaml:5: row_keys: unknown field; did you mean `row_key`\?"):
        load_declared(file)
    file.unlink()
    with pytest.raises(SpecError, match=r"no defs\.yaml there declares an extract or a load"):
        load_declared(project.defs_folder_path)


def test_dagster_finds_the_component_in_the_registered_module():
    root = Path(__file__).parents[2]
    listed = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    modules = list(listed["dagster_dg_cli.registry_modules"].values())
    assert TableauExtractComponent in discover_package_objects(modules).values()


def test_every_public_name_exists():
    assert [name for name in tir_dagster.__all__ if getattr(tir_dagster, name, None) is None] == []


def test_importing_the_package_is_cheap():
    script = "import sys, tir_dagster; print([one for one in ('dagster', 'pydantic', 'pyspark') if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
