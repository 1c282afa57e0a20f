from __future__ import annotations

import os
import re
import tomllib
from itertools import chain

from tir_dagster_tests.project import ROOT, normal, project_files

PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!]*")
# Written in two parts, so that this file does not find itself.
REGISTRY_WORDS = [
    "files." + "pythonhosted",
    "index" + "-url",
    "trusted" + "-host",
    "pypi.org/" + "simple",
    "registry." + "npmjs",
    "art" + "ifactory",
    "nexus" + "/repository",
]


def test_constraints_hold_pins_and_nothing_else():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.strip() and not PIN.fullmatch(line)] == []


def test_constraints_pin_every_direct_dependency_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    names = {normal(re.split(r"[\s\[<>=!~;]", need)[0]) for need in wanted} - {"setuptools"}
    pins = [normal(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split()]
    assert sorted(pins) == sorted(set(pins)), "a package is pinned twice"
    assert {name for name in names if name not in pins and not name.startswith("types-")} == set()


def test_continuous_integration_runs_the_tests_of_the_makefile():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK), ".ci/run is not executable"
    assert "make test" in script.read_text(encoding="utf-8").splitlines()
    assert re.search(
        r"^test:.*\n\t.* lint .*\n\t.*pytest", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )


def test_no_file_names_a_package_registry():
    """Where packages come from is each machine's own configuration."""
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in project_files()
        for word in REGISTRY_WORDS
        if word in path.read_text(encoding="utf-8", errors="replace").lower()
    ]
    assert found == []
