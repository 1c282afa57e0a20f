"""`tir verify`, `history`, `why`, `rollback` and `release`: prove and undo what refreshes did."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from click.testing import CliRunner

from tir_dagster.cli.main import tir
from tir_dagster.cli.overview.past import past_refreshes
from tir_dagster.hyper.package.package import extract_hyper, packed, read_package
from tir_dagster.orchestration.checks import known_drift
from tir_dagster.orchestration.home import dagster_instance, tir_home
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.orchestration.sensing.watching import news
from tir_dagster.refresh.state.hold import Hold, HoldFile
from tir_dagster.refresh.state.versions import VersionStore
from tir_dagster_tests.hyper.helpers import run
from tir_dagster_tests.orchestration.conftest import Place, download
from tir_dagster_tests.sandbox.tableau.helpers import Admin

FAILED, WRONG_USAGE = 1, 2
Say = Callable[..., Any]


@pytest.fixture
def say(restored: Place, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Run a command: its JSON with `json=True`, else its exit code and what it printed."""
    specs = restored.folder / "extracts.yaml"
    specs.write_text(restored.spec_text, encoding="utf-8")
    monkeypatch.setenv("TIR_SPECS", str(specs))

    def run_command(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(tir, list(arguments))
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if "--json" in arguments and result.stdout else result.output

    return run_command


def store() -> VersionStore:
    return VersionStore(tir_home() / "extracts" / "orders" / "versions")


def tamper(place: Place) -> int:
    """Spoil one row of the published version's file, behind everybody's back; return its key."""
    newest = store().latest()
    assert newest is not None
    (order,) = place.sql("SELECT MIN(ORDER_ID) FROM MYTABLE")[0]
    run(newest.extract, f'UPDATE "Extract"."Extract" SET "NOTE" = \'spoilt\' WHERE "ORDER_ID" = {order}')
    return int(order)


def test_a_wrong_row_is_found_named_and_repaired(restored: Place, say: Say):
    restored.touch("as it must be")
    assert restored.refresh().published
    newest = store().latest()
    order = tamper(restored)
    found = say("verify", "orders", "--all-slices", "--rows", "--json", code=FAILED)
    assert (found["equal"], found["compared"], found["stale"], found["missing"], found["extra"]) == (
        False,
        True,
        1,
        0,
        0,
    )
    (row,) = found["rows"]
    assert (row["kind"], row["key"], row["columns"]) == ("stale", {"ORDER_ID": str(order)}, ["NOTE"])
    assert row["last_replaced"] == newest.id
    assert row["extract"] is None, "values are hidden unless asked for"
    text = say("verify", "orders", "--all-slices", "--rows", "--values", code=FAILED)
    assert "extract: NOTE = spoilt" in text
    assert "source: NOTE = as it must be" in text
    repaired = say("verify", "orders", "--all-slices", "--repair", "--json")
    assert (repaired["equal"], repaired["repaired"], repaired["steps"]) == (
        True,
        True,
        ["replaced the slices that differ"],
    )
    assert restored.published_rows() == restored.source_rows()


def test_without_all_slices_the_touched_ones_are_compared(restored: Place, say: Say):
    restored.touch("touched again")
    assert restored.refresh().published
    assert say("verify", "orders", "--json")["equal"]
    tamper(restored)
    assert say("verify", "orders", "--json", code=FAILED)["slices"]
    assert say("verify", "orders", "--repair", "--json")["repaired"]


def test_rows_of_the_server_are_compared_with_the_source(restored: Place, say: Say):
    assert say("verify", "orders", "--server", "--json")["server"] == "The server holds what was confirmed."
    order = publish_spoilt(restored)
    found = say("verify", "orders", "--server", "--rows", "--json", code=FAILED)
    assert found["server"].startswith("The server holds other rows than were confirmed.")
    assert say("why", "orders", "--key", str(order), "--json")["known"].startswith("the server holds other rows")
    assert "tir verify orders --server --rows" in say("status", code=FAILED)
    assert [(row["kind"], row["key"]) for row in found["rows"]] == [("missing", {"ORDER_ID": str(order)})]
    repaired = say("verify", "orders", "--server", "--repair", "--json")
    assert (repaired["repaired"], repaired["steps"]) == (True, ["loaded everything (FOREIGN_PUBLISH)"]), repaired
    assert say("why", "orders", "--key", str(order), "--json")["known"] is None
    assert restored.published_rows() == restored.source_rows()


def publish_spoilt(place: Place) -> int:
    """Publish what is there without one row, as somebody would by hand; return the row's key."""
    folder = place.folder / "spoilt"
    package = read_package(download(place.sandbox, place.spec.datasource.name, folder))
    hyper = extract_hyper(package, folder / "spoilt.hyper")
    (order,) = place.sql("SELECT MIN(ORDER_ID) FROM MYTABLE")[0]
    run(hyper, f'DELETE FROM "Extract"."Extract" WHERE "ORDER_ID" = {order}')
    target = folder / "spoilt.tdsx"
    packed(package, target.name, hyper=hyper, refresh=None).write(target)
    credentials = TSC.ConnectionCredentials(
        place.sandbox.env["SNOWFLAKE_USER"], place.sandbox.env["SNOWFLAKE_PASSWORD"], embed=True
    )
    with place.sandbox.tableau() as server:
        (datasource,) = server.datasources.filter(name=place.spec.datasource.name)
        item = TSC.DatasourceItem(datasource.project_id, datasource.name)
        server.datasources.publish(item, str(target), "Overwrite", connection_credentials=credentials)
    return int(order)


def test_where_no_repair_works_the_last_version_that_equals_its_source_is_published(restored: Place, say: Say):
    before = restored.published_rows()
    restored.touch("spoilt later")
    assert restored.refresh().published
    tamper(restored)
    restored.sql("DELETE FROM MYTABLE")
    repaired = say("verify", "orders", "--all-slices", "--repair", "--json")
    first, second, last = repaired["steps"]
    assert "which failed" in first
    assert "which failed" in second
    assert last.startswith("published version")
    assert restored.published_rows() == before


def test_why_tells_each_refresh_that_changed_a_row(restored: Place, say: Say):
    (order,) = restored.sql("SELECT MIN(ORDER_ID) FROM MYTABLE")[0]
    (last,) = restored.sql("SELECT MAX(ORDER_ID) FROM MYTABLE")[0]
    for note in ("first", "second"):
        restored.touch(note)
        assert restored.refresh().published
    answer = say("why", "orders", "--key", str(order), "--column", "note", "--json")
    assert [step["changes"]["NOTE"][1] for step in answer["steps"][:2]] == ["second", "first"]
    assert answer["steps"][0]["changes"]["NOTE"] == ["first", "second"]
    assert answer["now"][0]["NOTE"] == "second"
    removed = say("why", "orders", "--key", f"ORDER_ID={last}", "--json")
    assert removed["steps"][0]["what"] == "removed"
    assert removed["now"] == []
    (month,) = restored.sql(f"SELECT TO_CHAR(ORDER_DATE, 'YYYY-MM') FROM KEPT_ASIDE WHERE ORDER_ID = {last}")[0]
    lines = say("why", "orders", "--slice", month, "--column", "QUANTITY")
    assert "1 rows removed, 0 added, -" in lines
    assert "to the sum" in lines
    assert say("why", "orders", "--key", "x", code=WRONG_USAGE).splitlines()[-1].endswith("which is of type integer.")


def test_a_rollback_holds_until_it_is_released_and_the_next_refresh_goes_on(restored: Place, say: Say):
    before, target = restored.published_rows(), store().latest()
    restored.touch("a mistake")
    assert restored.refresh().published
    assert restored.published_rows() != before
    planned = say("rollback", "orders", "--to", "previous", "--dry-run", "--json")
    assert planned["to"] == target.id
    assert (planned["published"], planned["rows"]) == (False, target.manifest["rows"])
    rolled = say("rollback", "orders", "--to", target.id, "--hold", "--reason", "a mistake in the load", "--json")
    assert (rolled["published"], rolled["held"]) == (True, True)
    assert restored.published_rows() == before
    newest, *_ = say("history", "orders", "--json")["versions"]
    assert (newest["version"], newest["decision"], newest["started_by"]) == (
        rolled["version"],
        "rollback",
        "tir rollback",
    )
    assert newest["slices_compared"] == newest["slices"] > 0, "compared after the publish"
    assert "a mistake in the load" in say("history", "orders")
    assert "a mistake in the load" in say("refresh", "orders", code=FAILED)
    assert "on hold" in say("plan", "orders")
    assert restored.published_rows() == before
    assert say("release", "orders", "--json") == {"extract": "orders", "released": True}
    assert say("release", "orders").strip() == "orders was not on hold."
    assert say("refresh", "orders", "--json")["published"]
    assert restored.published_rows() == restored.source_rows()
    assert store().latest().manifest["base"] == rolled["version"]


def test_a_rollback_to_a_wrong_version_is_compared_and_the_next_refresh_repairs_it(restored: Place, say: Say):
    target = store().latest()
    restored.touch("on the way")
    assert restored.refresh().published
    (order,) = restored.sql("SELECT MAX(ORDER_ID) FROM MYTABLE")[0]
    run(target.extract, f'UPDATE "Extract"."Extract" SET "NOTE" = \'spoilt\' WHERE "ORDER_ID" = {order}')
    say("rollback", "orders", "--to", target.id)
    keys = extract_keys(restored.spec)
    with dagster_instance() as instance:
        confirmed = last_confirmation(instance, keys.published_datasource)
        drift = known_drift(instance, keys, confirmed)
        assert drift is not None, "it was compared, not taken for verified"
        # The sensor requested this source version before; only the rollback tells it that there is work again.
        assert f"rollback@{confirmed.version}" in news(instance, restored.spec, keys, confirmed)
    # What is known stays known where a part of the slices is equal or differs as well.
    CliRunner().invoke(tir, ["verify", "orders"])
    with dagster_instance() as instance:
        assert set(known_drift(instance, keys, confirmed).slices) >= set(drift.slices)
    assert say("refresh", "orders", "--json")["published"]
    assert restored.published_rows() == restored.source_rows()


def test_a_rollback_that_fails_leaves_no_hold(restored: Place, say: Say):
    target = store().latest()
    restored.touch("later")
    assert restored.refresh().published
    admin = Admin(restored.sandbox.tableau_url)
    admin.fault(kind="status", status=403, code="403004", method="POST", path="/datasources$|/fileUploads$", times=50)
    try:
        say("rollback", "orders", "--to", target.id, "--hold", code=FAILED)
    finally:
        admin.clear_faults()
    assert HoldFile(tir_home() / "extracts" / "orders").read() is None
    assert say("refresh", "orders", "--json")["extract"] == "orders"
    assert restored.published_rows() == restored.source_rows()


def test_the_status_shows_what_needs_somebody(restored: Place, say: Say):
    def line() -> dict[str, Any]:
        result = CliRunner().invoke(tir, ["status", "--json"])
        (only,) = json.loads(result.stdout)["lines"]
        assert result.exit_code == (only["state"] in ("problem", "on hold", "never run"))
        return only

    shown = line()
    assert (shown["state"], shown["rows"]) == ("ok", store().latest().manifest["rows"])
    assert "turn on the sensors orders_source and orders_refresh" in shown["notes"][-1]
    assert say("status").splitlines()[-1] == "All is well."
    restored.touch("pending")
    restored.detect()
    assert (line()["state"], line()["pending"]) == ("pending", 1)
    HoldFile(tir_home() / "extracts" / "orders").put(Hold("now", "me", "a test"))
    assert line()["state"] == "on hold"
    say("release", "orders")
    assert restored.refresh().published
    tamper(restored)
    say("verify", "orders", "--all-slices", code=FAILED)
    assert (line()["state"], "differs from the source in" in line()["notes"][0]) == ("problem", True)
    assert say("status", code=FAILED).splitlines()[-1] == "1 of 1 needs attention."
    say("verify", "orders", "--all-slices", "--repair")
    assert line()["state"] == "ok"


def test_a_plan_counts_what_the_refresh_then_moves(restored: Place, say: Say):
    assert restored.is_up_to_date()
    assert say("plan", "orders", "--json")["decision"] in ("none", "incremental")
    restored.touch("planned")
    before = store().latest()
    planned = say("plan", "orders", "--json")
    assert (planned["decision"], planned["keys"], planned["would_stop"]) == (
        "incremental",
        {"changed": 5, "new": 0, "gone": 1},
        None,
    )
    text = say("plan", "orders")
    assert "orders: incremental refresh of 6 keys in" in text
    assert "found by    watermark UPDATED_AT on MYDB.MYSCHEMA.MYTABLE" in text
    assert "passes: " in text
    assert say("plan").count("orders: incremental refresh of 6 keys") == 1, "a line for each extract"
    assert store().latest() == before, "nothing was made"
    moved = restored.refresh()
    assert (moved.rows_purged, moved.rows_appended) == (
        sum(counts["removed"] for counts in planned["rows_by_slice"].values()),
        sum(counts["added"] for counts in planned["rows_by_slice"].values()),
    )
    restored.sql("DELETE FROM MYTABLE WHERE MOD(ORDER_ID, 2) = 0")
    text = say("plan", "orders")
    assert "The refresh would stop: orders: " in text
    assert "thresholds.delete_share" in text
    assert "takes       about " in text, "as the refreshes before it took"


def test_all_are_refreshed_although_one_of_them_fails(restored: Place, say: Say, monkeypatch: pytest.MonkeyPatch):
    restored.touch("one of all")
    one = restored.spec_text.partition("extracts:\n")[2].replace("orders", "lost").replace("MYTABLE", "NO_SUCH_TABLE")
    one = one.replace("mydatasource", "lost")
    both = restored.folder / "both.yaml"
    both.write_text(f"extracts:\n{one}{restored.spec_text.partition('extracts:')[2]}", encoding="utf-8")
    monkeypatch.setenv("TIR_SPECS", str(both))
    lost, orders = say("refresh", "--all", "--json", code=FAILED)["extracts"]
    assert (lost["extract"], orders["extract"], orders["decision"]) == ("lost", "orders", "incremental")
    assert "NO_SUCH_TABLE" in lost["error"]
    assert restored.published_rows() == restored.source_rows()
    text = say("refresh", "--all", code=FAILED)
    assert "orders, 2 of 2" in text, "progress says which one it is about"
    assert "\norders: nothing to do" in text
    assert re.search(r"^2 extracts: 1 with nothing to do, 1 failed \(\d+\.\d s\)\.$", text, re.MULTILINE)


def test_a_changed_spec_is_shown_as_a_difference(restored: Place, say: Say, monkeypatch: pytest.MonkeyPatch):
    changed = restored.folder / "changed.yaml"
    changed.write_text(
        restored.spec_text.replace("by: month", "by: day").replace("}\n    changes", "-01}\n    changes"),
        encoding="utf-8",
    )
    monkeypatch.setenv("TIR_SPECS", str(changed))
    planned = say("plan", "orders", "--json")
    assert planned["reason"] == "DEFINITION_CHANGED"
    assert "slices.by: month → day" in planned["spec_changes"]
    assert planned["rows_after"] == restored.sql("SELECT COUNT(*) FROM MYTABLE")[0][0]


def test_a_report_shows_what_refreshes_moved(restored: Place, say: Say):
    restored.touch("reported")
    assert restored.refresh().published
    file = Path(say("report", "orders").splitlines()[-1])
    page = file.read_text(encoding="utf-8")
    assert file == tir_home() / "extracts" / "orders" / "report.html"
    assert re.search(r"6</td><td>6</td><td>5</td>", page), "keys, rows removed and added"
    assert "equals_source" in page
    with dagster_instance() as instance:
        newest = past_refreshes(restored.spec, instance)[0]
    assert (newest.keys, newest.decision) == (6, "incremental")
    assert {"survey", "detect", "apply", "verify", "publish"} <= set(newest.stages)
    assert newest.seconds
    assert newest.bytes_read
    assert newest.extract_bytes


def test_a_rollback_to_what_is_not_there_says_what_is(restored: Place, say: Say):
    error = say("rollback", "orders", "--to", "v99999999", code=FAILED).splitlines()[-1]
    assert "version v99999999 is not kept here. Kept besides the published one:" in error
    published = store().latest()
    assert "shows the rows of version" in say("rollback", "orders", "--to", published.id, code=FAILED)
