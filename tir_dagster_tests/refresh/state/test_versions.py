"""Versions on disk are complete or not there, at whatever line a crash hits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tir_dagster.errors import ExtractError
from tir_dagster.refresh.state import versions
from tir_dagster.refresh.state.versions import Version, VersionStore, Workspace


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path / "sales")


@pytest.fixture(autouse=True)
def plain_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which a copy costs what the file has."""
    monkeypatch.setattr(versions, "shares_blocks", lambda _: False)


def filled(store: VersionStore, content: str = "rows") -> Workspace:
    workspace = store.begin()
    workspace.extract.write_text(content)
    (workspace.folder / "shell.tdsx").write_text(content)
    return workspace


def committed(store: VersionStore, content: str = "rows") -> Version:
    return store.commit(filled(store, content), {"content": content})


def test_a_committed_version_is_the_latest_and_keeps_its_manifest(store: VersionStore):
    assert store.latest() is None
    first = committed(store, "one")
    second = committed(store, "two")
    assert [version.id for version in store.versions()] == ["v00000001", "v00000002"]
    assert store.latest() == second
    assert store.get(first.id).manifest["content"] == "one"
    assert second.manifest["files"] == {"extract.hyper": 3, "shell.tdsx": 3}
    assert second.extract.read_text() == "two"
    assert sorted(path.name for path in store.folder.iterdir()) == ["v00000001", "v00000002"]


def test_a_workspace_without_an_extract_is_no_version(store: VersionStore):
    with pytest.raises(ExtractError, match=r"has no extract\.hyper"):
        store.commit(store.begin(), {})
    assert store.versions() == []


def test_an_abandoned_workspace_is_gone(store: VersionStore):
    store.abandon(filled(store))
    assert list(store.folder.iterdir()) == []


def test_pruning_keeps_the_newest_and_the_protected(store: VersionStore):
    for number in range(6):
        committed(store, str(number))
    assert store.prune(keep=2, protected={"v00000002"}) == ["v00000001", "v00000003", "v00000004"]
    assert [version.number for version in store.versions()] == [2, 5, 6]
    assert store.prune(keep=0) == ["v00000002", "v00000005"]
    assert [version.number for version in store.versions()] == [6]
    assert committed(store).number == 7


def test_pruning_by_size_removes_the_oldest(store: VersionStore):
    for _ in range(4):
        committed(store, "x" * 100)
    together = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())
    assert store.prune(keep=9, most_bytes=together) == []
    assert store.prune(keep=9, most_bytes=together - 1) == ["v00000001"]
    assert store.prune(keep=9, most_bytes=1, protected={"v00000002"}) == ["v00000003"], "not the newest, nor that one"


def test_the_newest_version_that_goes_is_set_aside_as_a_spare_file(store: VersionStore):
    for number in range(4):
        committed(store, f"rows {number}")
    store.prune(keep=2)
    spare = store.spare()
    assert spare is not None
    assert (spare.id, spare.number, spare.extract.read_text()) == ("v00000002", 2, "rows 1")
    assert [version.id for version in store.versions()] == ["v00000003", "v00000004"], "it is none that is kept"

    store.begin()
    assert store.spare() == spare
    committed(store)
    store.prune(keep=2)
    assert [path.name for path in store.folder.glob(".spare.*")] == [".spare.v00000003"]

    store.drop_spare()
    assert store.spare() is None


def test_a_spare_file_takes_no_room_that_is_not_granted(store: VersionStore):
    for number in range(3):
        committed(store, f"rows {number}")
    together = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())

    store.prune(keep=2, most_bytes=together - 1)

    assert store.spare() is None
    assert len(store.versions()) == 2


def test_where_copies_cost_nothing_no_spare_file_is_kept(store: VersionStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(versions, "shares_blocks", lambda _: True)
    for _ in range(3):
        committed(store)

    store.prune(keep=1)

    assert sorted(path.name for path in store.folder.iterdir()) == ["v00000003"]


def test_a_version_that_is_not_there_is_told_by_name(store: VersionStore):
    with pytest.raises(ExtractError, match="no complete version v00000009"):
        store.get("v00000009")


@pytest.mark.parametrize(
    "damage",
    [
        lambda version: (version.folder / "manifest.json").unlink(),
        lambda version: (version.folder / "manifest.json").write_text('{"files": '),
        lambda version: (version.folder / "manifest.json").write_text("[]"),
        lambda version: version.extract.unlink(),
        lambda version: version.extract.write_text(""),
        lambda version: (version.folder / "shell.tdsx").write_text("short"[:2]),
    ],
)
def test_a_broken_version_is_passed_over_and_cleaned(store: VersionStore, damage):
    good, broken = committed(store), committed(store)
    damage(broken)
    assert store.latest() == good
    store.abandon(store.begin())
    assert [path.name for path in store.folder.iterdir()] == [good.id]


def test_an_extract_that_hyper_touched_while_reading_is_still_whole(store: VersionStore):
    version = committed(store)
    version.extract.write_text("rows and a page more")
    assert store.latest() == version


def test_workspaces_and_half_removed_versions_of_a_crash_are_cleaned(store: VersionStore):
    version = committed(store)
    crashed = filled(store)
    (store.folder / ".gone.v00000000.ab").mkdir()
    assert store.versions() == [version]
    fresh = store.begin()
    assert not crashed.folder.exists()
    assert sorted(path.name for path in store.folder.iterdir()) == [fresh.folder.name, version.id]


CRASH = """
import os, signal, sys
from pathlib import Path
from tir_dagster.refresh.state import versions
from tir_dagster.refresh.state.versions import VersionStore

folder, stop = Path(sys.argv[1]), int(sys.argv[2])
lines = 0

def count(frame, event, argument):
    global lines
    if frame.f_code.co_filename != versions.__file__:
        return None
    if event == "line":
        lines += 1
        if lines == stop:
            os.kill(os.getpid(), signal.SIGKILL)
    return count

store = VersionStore(folder)
sys.settrace(count)
workspace = store.begin()
workspace.extract.write_text("new")
(workspace.folder / "shell.tdsx").write_text("new")
store.commit(workspace, {"content": "new"})
store.prune(keep=1)
sys.settrace(None)
print(lines)
"""


def crash_at(folder: Path, line: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CRASH, str(folder), str(line)], capture_output=True, text=True, check=False
    )


def test_a_kill_at_any_line_leaves_the_old_or_the_new_version_whole(tmp_path: Path):
    dry = VersionStore(tmp_path / "dry")
    committed(dry, "old")
    finished = crash_at(dry.folder, -1)
    assert finished.returncode == 0, finished.stderr
    total = int(finished.stdout)
    for line in sorted({*range(1, total, max(1, total // 12)), total - 1}):
        store = VersionStore(tmp_path / f"at{line}")
        committed(store, "old")
        assert crash_at(store.folder, line).returncode == -signal.SIGKILL
        latest = store.latest()
        assert latest is not None, f"line {line}: no version survived"
        assert latest.manifest["content"] in ("old", "new")
        assert latest.extract.read_text() == latest.manifest["content"]
        after = committed(store, "after")
        assert store.latest() == after
        store.prune(keep=1)
        store.drop_spare()
        assert os.listdir(store.folder) == [after.id]  # noqa: PTH208
