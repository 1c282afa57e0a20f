"""Change sets for tests of what is durable."""

from __future__ import annotations

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.changes.plan import SourceState
from tir_dagster.refresh.state.change_sets import ChangeSetStore


def a_change_set(ident: str) -> ChangeSet:
    """A change set without rows."""
    return ChangeSet(
        id=ident,
        extract="orders",
        base="v1",
        source_version="2026-01-01",
        known=SourceState("d", "s", "i", "t"),
        mode="changes",
        decision="incremental",
        reason=None,
        keys=1,
        rows=1,
        purged={},
        appended={},
        watermark=None,
        settles=(),
        warnings=(),
        sentence="",
    )


def staged(store: ChangeSetStore, ident: str, content: str) -> None:
    """Commit a change set whose only file of keys has this content."""
    with store.staging(ident) as folder:
        (folder / "keys").mkdir()
        (folder / "keys" / "part-0").write_text(content)
        store.commit(a_change_set(ident), folder)
