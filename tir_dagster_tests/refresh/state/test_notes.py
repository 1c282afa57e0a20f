"""Notes on disk: what earlier releases wrote is read, and what cannot be read is as good as none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tir_dagster.refresh.state.notes import (
    Compared,
    SettingsNote,
    forget_settings,
    read_compared,
    read_settings,
    settings_file,
    write_compared,
    write_settings,
)
from tir_dagster.tableau.datasources import Connection, ServerVersion
from tir_dagster.tableau.settings import Attachments, KeptSettings

VERSION = "8a5b 3 2026-05-01T06:00:00Z 1024"
CONNECTION = Connection("", "snowflake", "a.snowflakecomputing.com", "443", "TIR", embed_password=True)
KEPT = KeptSettings(
    tags=frozenset({"nightly", "ümläut/x"}),
    description="All orders",
    certified=True,
    certification_note="checked",
    owner_id="42",
    connections=(CONNECTION,),
)
NOTE = SettingsNote(
    ServerVersion.parse(VERSION), KEPT, Attachments(tasks={"1": "full refresh on a schedule of its own"}), ("tags",)
)
# As the release before wrote it.
EARLIER = {
    "version": VERSION,
    "kept": {
        "tags": ["nightly", "ümläut/x"],
        "description": "All orders",
        "certified": True,
        "certification_note": "checked",
        "owner_id": "42",
        "connections": [
            {
                "id": "",
                "type": "snowflake",
                "server_address": "a.snowflakecomputing.com",
                "server_port": "443",
                "username": "TIR",
                "embed_password": True,
            }
        ],
    },
    "beside": {"tasks": {"1": "full refresh on a schedule of its own"}, "subscriptions": None},
    "left": ["tags"],
}


def test_settings_are_read_as_they_were_written_and_then_forgotten(tmp_path: Path) -> None:
    assert read_settings(tmp_path) is None
    write_settings(tmp_path, NOTE)
    assert read_settings(tmp_path) == NOTE
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    forget_settings(tmp_path)
    assert (read_settings(tmp_path), list(tmp_path.iterdir())) == (None, [])


def test_a_note_of_the_release_before_is_read(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(json.dumps(EARLIER), encoding="utf-8")
    assert read_settings(tmp_path) == NOTE


def test_a_note_of_an_older_release_says_less(tmp_path: Path) -> None:
    kept = {name: value for name, value in EARLIER["kept"].items() if name != "connections"}  # type: ignore[attr-defined]
    (tmp_path / "kept.json").write_text(json.dumps({"version": VERSION, "kept": kept}), encoding="utf-8")
    note = read_settings(tmp_path)
    assert note is not None
    assert (note.kept.connections, note.beside, note.left) == ((), Attachments(), None)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": "1", "kept": {}}'])
def test_settings_that_cannot_be_read_are_none(tmp_path: Path, text: str) -> None:
    settings_file(tmp_path).write_text(text, encoding="utf-8")
    assert read_settings(tmp_path) is None


def test_a_comparison_counts_for_the_versions_that_were_compared(tmp_path: Path) -> None:
    compared = Compared(["a", "b"], keyed=True, bare=True)
    write_compared(tmp_path, (VERSION, "ours", "True"), compared)
    assert read_compared(tmp_path, (VERSION, "ours", "True")) == compared
    assert read_compared(tmp_path, (VERSION, "ours", "False")) is None
    # As the release before wrote it.
    value = {"of": [None, "ours", "True"], "compared": {"fingerprints": ["a"], "heals": True}}
    (tmp_path / "compared.json").write_text(json.dumps(value), encoding="utf-8")
    assert read_compared(tmp_path, (None, "ours", "True")) == Compared(["a"], heals=True)


@pytest.mark.parametrize("text", ["", "[]", '{"of": ["ours"]}', '{"of": ["ours"], "compared": {"unknown": 1}}'])
def test_a_comparison_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "compared.json").write_text(text, encoding="utf-8")
    assert read_compared(tmp_path, ("ours",)) is None
