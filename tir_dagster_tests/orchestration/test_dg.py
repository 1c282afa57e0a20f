"""A dg project with an extract in it, as dg's and Dagster's own commands see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tir_dagster_tests.orchestration.component import ATTRIBUTES

FILES = {
    "pyproject.toml": """\
        [project]
        name = "sales"
        version = "0.1.0"
        requires-python = ">=3.11"
        dependencies = ["dagster", "tir_dagster"]

        [tool.dg]
        directory_type = "project"

        [tool.dg.project]
        root_module = "sales"
        """,
    "src/sales/__init__.py": "",
    "src/sales/defs/__init__.py": "",
    "src/sales/definitions.py": """\
        from pathlib import Path
        import dagster as dg

        @dg.definitions
        def defs():
            return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
        """,
    "src/sales/defs/resources.py": """\
        import dagster as dg, tir_dagster

        defs = dg.Definitions(resources=tir_dagster.environment_resources())
        """,
}
COMMANDS = {
    "list": ("dg", "list", "components", "--json"),
    "yaml": ("dg", "check", "yaml"),
    "defs": ("dg", "check", "defs"),
    "validate": ("dagster", "definitions", "validate", "-m", "sales.definitions"),
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """All commands side by side, each in a process of its own: the exit code and what it said."""
    folder = tmp_path_factory.mktemp("project") / "sales"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    extract = "type: tir_dagster.TableauExtractComponent\nattributes:\n" + textwrap.indent(ATTRIBUTES, "  ")
    (folder / "src/sales/defs/orders").mkdir()
    (folder / "src/sales/defs/orders/defs.yaml").write_text(extract, encoding="utf-8")
    return run_all(folder, COMMANDS)


def run_all(folder: Path, commands: dict[str, tuple[str, ...]]) -> dict[str, tuple[int, str]]:
    bin_folder = Path(sys.executable).parent
    home = folder / "dagster_home"
    home.mkdir(exist_ok=True)
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n", encoding="utf-8")
    env = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(bin_folder.parent),
        "PYTHONPATH": os.pathsep.join([str(folder / "src"), *sys.path]),
    }
    started = {
        name: subprocess.Popen(
            [str(bin_folder / program), *rest],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, (program, *rest) in commands.items()
    }
    return {name: (process.communicate()[0], process.returncode)[::-1] for name, process in started.items()}


def test_dg_lists_the_component_with_its_summary(outputs):
    code, text = outputs["list"]
    assert code == 0, text
    (line,) = [line for line in text.splitlines() if line.startswith('{"items"')]
    listed = {item["key"]: item["summary"] for item in json.loads(line)["items"]}
    assert "stays equal to its Snowflake table" in listed["tir_dagster.TableauExtractComponent"]


def test_dg_checks_the_yaml_and_the_definitions(outputs):
    for name in ("yaml", "defs"):
        code, text = outputs[name]
        assert code == 0, text
        assert "All component YAML validated successfully." in text
    assert "All definitions loaded successfully." in outputs["defs"][1]


def test_dagster_validates_the_definitions(outputs):
    code, text = outputs["validate"]
    assert code == 0, text
    assert "All code locations passed validation." in text
