"""Packages that no refresh may trust, on the server itself: the delivery `server` names what is wrong and changes nothing."""

from __future__ import annotations

import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path

import pytest

from tir_dagster_tests.orchestration.conftest import Place
from tir_dagster_tests.orchestration.shell import Built, Shell, sample_columns
from tir_dagster_tests.sandbox.tableau.helpers import rewritten

SERVED = (("name: mydatasource", "name: dx"), ("    thresholds:", "    delivery: server\n    thresholds:"))
BOMB = "<!DOCTYPE d [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;&a;&a;&a;&a;'>]><datasource version='18.1'>&b;</datasource>"


@pytest.fixture
def shell(place: Place) -> Shell:
    return Shell(place)


@pytest.fixture(scope="module")
def built(place: Place) -> Built:
    datasources = Built(place, place.folder / "built", {})
    datasources.build("base.tdsx", sample_columns(), table="MYTABLE", increment_key="ORDER_DATE")
    return datasources


def hostile(built: Built, kind: str) -> Path:
    base, target = built.base, built.folder / "hostile.tdsx"
    match kind:
        case "no zip":
            target.write_bytes(b"<html>Please sign in</html>")
            return target
        case "no document":
            return rewritten(base, target, drop=".tds")
        case "two documents":
            return rewritten(base, target, add=[("second.tds", b"<datasource version='18.1'/>")])
        case "escape":
            return rewritten(base, target, add=[("../../evil.txt", b"out")])
        case "bomb":
            return rewritten(base, target, edit=lambda _: BOMB)
        case "no Hyper file":
            with zipfile.ZipFile(base) as package:
                (member,) = [name for name in package.namelist() if name.endswith(".hyper")]
            return rewritten(base, target, drop=".hyper", add=[(member, b"no Hyper file at all" * 100)])
        case _:
            return rewritten(base, target, edit=lambda text: text.replace('class="hyper"', 'class="dataengine"'))


def smuggle(built: Built, package: Path) -> None:
    """Into the server's own storage: the stand-in takes no such package from a client, but servers are not all alike."""
    root = built.place.sandbox.home.data("tableau")
    before = set((root / "packages").iterdir())
    built.publish("dx", built.base)
    (stored,) = set((root / "packages").iterdir()) - before
    size = stored.write_bytes(package.read_bytes())
    with closing(sqlite3.connect(root / "server.sqlite")) as store, store:
        assert store.execute("UPDATE revisions SET size = ? WHERE file = ?", (size, stored.name)).rowcount == 1


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("no zip", "was not downloaded as a package"),
        ("no document", "holds 0 .tds documents"),
        ("two documents", "holds 2 .tds documents"),
        ("escape", "has a member '../../evil.txt' that leads out of it"),
        ("bomb", "it declares a document type"),
        ("no Hyper file", "is not a Hyper file"),
        ("old engine", "is of class dataengine, not hyper"),
    ],
)
def test_a_hostile_package_is_refused_with_its_reason_and_nothing_changes(shell: Shell, built: Built, kind, sentence):
    smuggle(built, hostile(built, kind))
    assert sentence in shell.refused(edit=SERVED)
    assert not list(shell.place.folder.rglob("evil.txt"))


def test_a_text_as_increment_key_is_refused_and_nothing_changes(shell: Shell, built: Built):
    built.publish("dx", built.build("text.tdsx", sample_columns(), table="MYTABLE", increment_key="CUSTOMER"))
    error = shell.refused(edit=SERVED)
    assert "The increment key [CUSTOMER] of x is TEXT; it has to be an integer, a date or a datetime" in error
