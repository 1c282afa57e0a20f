"""What a crash left, and the files of pending work: whole or not there."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from tir_dagster.changes.plan import Reason, Situation, SourceState, plan_refresh
from tir_dagster.refresh.server_content import outcome_by_content
from tir_dagster.refresh.state.change_sets import ChangeSetStore, DamagedStateError
from tir_dagster.refresh.state.lease import EXPIRE_SECONDS, lease
from tir_dagster.refresh.state.records import Confirmation, Intent
from tir_dagster.tableau.outcome import PublishOutcome
from tir_dagster_tests.refresh.state.staged import staged

KNOWN = SourceState("d", "s", "i", "t")
CONFIRMED = Confirmation("orders", "v1", "2026-01-01", KNOWN, None, "id", "server 1", "old rows", 1, ())
INTENT = Intent("orders", "c", "v2", "server 1", "new rows", KNOWN, hole="rows missing")


@pytest.mark.parametrize(
    ("version", "fingerprint", "verdict"),
    [
        ("server 1", None, PublishOutcome.NOT_LANDED),
        ("server 2", "new rows", PublishOutcome.LANDED),
        ("server 2", "rows missing", PublishOutcome.HOLE),
        ("server 2", "old rows", PublishOutcome.NOT_LANDED),
        ("server 2", "other rows", PublishOutcome.FOREIGN),
        ("server 2", None, PublishOutcome.FOREIGN),
    ],
)
def test_what_the_server_holds_decides_what_a_crash_left(version, fingerprint, verdict):
    prints = (fingerprint, "the same in another form") if fingerprint else ()
    outcome = outcome_by_content(intent=INTENT, confirmed=CONFIRMED, server_version=version, server_fingerprints=prints)
    assert outcome is verdict


def test_records_of_an_earlier_release_can_still_be_read():
    text = replace(CONFIRMED, lag=None).to_json().replace('"lag": null, ', "")
    assert "lag" not in text
    # Nor was it known when DDL had run, and by which role was read.
    text = text.replace('"ddl": null, ', "").replace('"role": null, ', "")
    assert "ddl" not in text
    assert "role" not in text
    assert Confirmation.from_json(text) == CONFIRMED
    with pytest.raises(ValueError, match="not a complete"):
        Confirmation.from_json("{}")


def test_a_foreign_publish_is_noticed_under_every_policy():
    now = Situation("orders", "changes", "full", KNOWN, KNOWN)
    assert plan_refresh(now).decision == "none"
    assert plan_refresh(replace(now, foreign=True)).decision == "full"
    assert plan_refresh(replace(now, foreign=True, policy="auto")).reason is Reason.FOREIGN_PUBLISH


def test_a_change_set_made_again_takes_the_place_of_the_first(tmp_path):
    store = ChangeSetStore(tmp_path)
    staged(store, "c1", "first")
    staged(store, "c1", "second")
    assert [change_set.id for change_set in store.pending()] == ["c1"]
    assert (store.path("c1") / "keys" / "part-0").read_text() == "second"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_pending_work_that_cannot_be_read_is_an_error_that_says_what_to_do(tmp_path, text):
    store = ChangeSetStore(tmp_path / "orders" / "change_sets")
    staged(store, "c1", "keys")
    (store.path("c1") / "change_set.json").write_text(text)
    with pytest.raises(DamagedStateError, match=r"orders: .*Remove .*/c1, then run tir refresh orders --full\."):
        store.pending()
    (tmp_path / "orders" / "change_sets" / "intent.json").write_text(text)
    with pytest.raises(DamagedStateError, match=r"intent\.json cannot be read"):
        store.intent()


def test_what_is_settled_is_pending_no_more_even_if_its_files_could_not_be_removed(tmp_path, monkeypatch):
    store = ChangeSetStore(tmp_path)
    staged(store, "c1", "keys")
    # As if the process died right after the first step of removing it.
    monkeypatch.setattr("shutil.rmtree", lambda *_args, **_options: None)
    store.settle(("c1",))
    assert store.pending() == ()


def test_reports_that_were_looked_at_count_for_the_base_they_were_compared_with(tmp_path):
    store = ChangeSetStore(tmp_path / "change_sets")
    assert store.looked_at("v1") == frozenset()
    store.remember_looked_at("v1", [7])
    store.remember_looked_at("v1", [9, 8])
    assert store.looked_at("v1") == {7, 8, 9}
    assert store.looked_at("v2") == frozenset()
    store.remember_looked_at("v2", [10])
    assert store.looked_at("v2") == {10}, "an earlier base's are forgotten"
    for unreadable in ("", "[]", '{"base": "v2"}'):
        (tmp_path / "change_sets" / "looked.json").write_text(unreadable)
        assert store.looked_at("v2") == frozenset(), "looked at once more"


def test_a_guard_that_a_dead_process_left_is_removed_and_a_young_one_is_waited_for(tmp_path):
    path = tmp_path / "lease.json"
    guard = tmp_path / "lease.json.guard"
    guard.mkdir()
    long_ago = time.time() - EXPIRE_SECONDS - 1
    os.utime(guard, (long_ago, long_ago))
    with lease(path, purpose="test", wait_seconds=5):
        assert path.is_file()
    assert not guard.exists()
