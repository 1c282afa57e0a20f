"""The page of `tir report`: one file that needs nothing else, whatever the history holds."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from random import Random

import dagster as dg

from tir_dagster.changes.plan import Plan
from tir_dagster.cli.overview.page import write_page
from tir_dagster.cli.overview.past import PastRefresh, estimate
from tir_dagster.cli.overview.planning import Outlook
from tir_dagster.cli.overview.report import CheckResult, Incident, Report, incidents_of
from tir_dagster.cli.overview.status import Line
from tir_dagster.errors import TirError
from tir_dagster.refresh.preview import Preview
from tir_dagster.spec.reading import parse_specs
from tir_dagster_tests.browser import chromium, look
from tir_dagster_tests.spec.sample import GOOD

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
HOSTILE = "<script>alert('1')</script>&\"x\""
# They have no end.
VOID = {"meta", "br", "hr", "img", "link"}


def a_refresh(number: int, slices: dict[str, tuple[int, int]], *, decision: str = "incremental") -> PastRefresh:
    at = NOW - timedelta(hours=number)
    removed, added = (sum(counts[side] for counts in slices.values()) for side in (0, 1))
    return PastRefresh(
        version=f"v{10_000 - number:08}",
        at=at.timestamp(),
        run_id="run",
        source_version=at.isoformat(),
        rows=2_000_000,
        decision=decision,
        reason="FIRST_LOAD" if decision == "full" else None,
        keys=added,
        rows_purged=removed,
        rows_appended=added,
        slices=slices,
        seconds=4.0 + added / 50_000,
        stages={
            "look": 0.6,
            "survey": 1.2,
            "detect": 0.5 + added / 90_000,
            "apply": 0.4,
            "verify": 0.3,
            "publish": 1.0,
        },
        bytes_read=80 * added,
        bytes_sent=50_000_000,
        extract_bytes=51_000_000,
    )


def many_refreshes(refreshes: int, slices: int) -> list[PastRefresh]:
    random = Random(1)
    names = [f"{2000 + at // 12}-{at % 12 + 1:02}" for at in range(slices - 1)] + ["(no date)"]
    past = [
        a_refresh(
            at,
            {
                name: (random.randint(0, 300), random.randint(1, 400))
                for name in names[-3:] + random.sample(names, slices // 6)
            },
        )
        for at in range(refreshes - 1)
    ]
    full = a_refresh(refreshes, dict.fromkeys(names, (0, 10000)), decision="full")
    return [*past[: refreshes // 2], replace(full, at=past[refreshes // 2].at), *past[refreshes // 2 :]]


def a_report(
    refreshes: list[PastRefresh], notes: tuple[str, ...] = (), state: str = "ok", incidents: tuple[Incident, ...] = ()
) -> Report:
    (spec,) = parse_specs(f"{GOOD}    freshness: 90 minutes\n", "test.yaml")
    line = Line(spec.name, "extract", state, notes=list(notes))  # type: ignore[arg-type]
    checks = [
        CheckResult("equals_source", True, NOW.timestamp(), "24 slices equal the source."),
        CheckResult("unique_row_key", False, NOW.timestamp(), HOSTILE),
    ]
    return Report(spec, NOW, line, refreshes, checks if refreshes else [], 24, 20, incidents)


class Balance(HTMLParser):
    """Checks that every element ends where it must, and collects names of elements and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {tag, *(name for name, _ in attrs)}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {tag, *(name for name, _ in attrs)}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_no_network_and_no_script():
    page = write_page(a_report(many_refreshes(30, 24)))
    names = Balance(page).names
    assert not names & {"script", "link", "img", "iframe", "src", "href", "onclick", "onload"}
    assert not re.search(r"https?://|@import|url\(", page)
    assert "default-src 'none'" in page


def test_the_page_can_be_read_light_and_dark_narrow_and_wide(tmp_path):
    pages = {
        "report": a_report(
            many_refreshes(30, 24),
            incidents=(Incident(NOW.timestamp() - 7200, "source empty", f"{HOSTILE} " * 20, NOW.timestamp()),),
        ),
        "report young": a_report(
            [a_refresh(0, {"2026-01": (10, 20)}), a_refresh(1, {"2026-01": (0, 90)}, decision="full")]
        ),
        "report crowded": a_report(many_refreshes(150, 200), notes=("on hold",), state="on hold"),
        "report empty": a_report([], state="never run"),
    }
    with chromium() as browser:
        for name, report in pages.items():
            file = tmp_path / "report.html"
            file.write_text(write_page(report), encoding="utf-8")
            assert look(browser, file.as_uri(), name) == [], name


def test_texts_of_others_are_escaped():
    refresh = replace(a_refresh(1, {HOSTILE: (1, 2)}), warnings=(HOSTILE,), decision=HOSTILE, reason=HOSTILE)
    page = write_page(a_report([refresh], notes=(HOSTILE,), state="problem"))
    assert "script" not in Balance(page).names
    assert page.count("&lt;script&gt;") >= 5


def test_every_slice_and_refresh_has_a_cell_and_what_does_not_fit_is_counted():
    page = write_page(a_report(many_refreshes(30, 24)))
    assert page.count("<title>2001-11, ") == 30
    assert "(full)" in page
    crowded = write_page(a_report(many_refreshes(150, 200)))
    assert "the 60 newest of 150 refreshes" in crowded
    assert "earlier slices" in crowded


def test_ages_past_the_declared_freshness_stand_out():
    page = write_page(
        a_report([replace(a_refresh(at, {}), at=(NOW - timedelta(hours=at)).timestamp()) for at in (1, 2, 5)])
    )
    assert "v00009998, published 2026-03-01 10:00 UTC: its data was 60 min old when the next one was published" in page
    assert re.findall(r'class="(late|moved)" x', page) == ["late", "moved", "moved"], (
        "3 hours, 1 hour, 1 hour; 90 minutes are declared"
    )


def test_incidents_are_listed_with_their_end():
    failed = Incident(NOW.timestamp() - 7200, "guard", HOSTILE, NOW.timestamp() - 3600)
    page = write_page(a_report([a_refresh(1, {})], incidents=(replace(failed, at=NOW.timestamp(), ended=None), failed)))
    assert re.findall(r'class="t (good|bad)">(not yet|2026-03-01 11:00 UTC)<', page) == [
        ("bad", "not yet"),
        ("good", "2026-03-01 11:00 UTC"),
    ]
    assert "No run of this extract in Dagster&#x27;s history failed." in write_page(a_report([a_refresh(1, {})]))


def test_a_failed_run_is_an_incident_that_ends_with_the_next_publish(tmp_path, monkeypatch):
    monkeypatch.setenv("TIR_HOME", str(tmp_path))

    @dg.op(name="orders__purged_extract")
    def stop() -> None:
        raise TirError("Half of the rows would go.")

    @dg.job(name="orders_refresh")
    def refresh() -> None:
        stop()

    report = a_report([])
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        refresh.execute_in_process(instance=instance, raise_on_error=False)
        (open_one,) = incidents_of(report.spec, instance, [])
        later = replace(a_refresh(0, {}), at=open_one.at + 60)
        (ended,) = incidents_of(report.spec, instance, [replace(later, at=open_one.at + 120), later])
    assert (open_one.sentence, open_one.ended) == ("Half of the rows would go.", None)
    assert ended.ended == later.at, "the first one after it"


def test_without_a_refresh_the_page_says_how_to_start():
    assert "tir refresh orders" in write_page(a_report([], state="never run"))


def test_what_moved_stands_beside_what_full_refreshes_would_have_moved():
    page = write_page(a_report([a_refresh(1, {"2026-01": (10, 1_000)}), a_refresh(2, {"2026-01": (0, 3_000)})]))
    assert re.search(r"rows read from Snowflake</td><td>4,000</td><td>4,000,000</td><td>0\.10%", page)
    assert "bytes sent to Tableau</td><td>100.0 MB</td><td>at most 102.0 MB" in page


def test_a_plan_says_when_the_file_is_built_anew():
    (spec,) = parse_specs(GOOD, "test.yaml")
    newest = replace(a_refresh(1, {}), extract_bytes=2_500_000, rebuilt_above=2_600_000)
    plan = Plan(spec.name, "changes", "incremental")
    outlook = Outlook(spec, plan, Preview(plan), newest=newest)
    (line,) = [line for line in outlook.lines() if line.startswith("  file ")]
    assert line.endswith("2.5 MB, with the room that purged rows left; built anew above 2.6 MB")
    assert (outlook.as_dict(())["extract_bytes"], outlook.as_dict(())["rebuilt_above_bytes"]) == (2_500_000, 2_600_000)
    without = replace(outlook, newest=replace(newest, rebuilt_above=None))
    assert not [line for line in without.lines() if line.startswith("  file ")]


def test_an_estimate_is_the_middle_of_refreshes_that_moved_about_as_much():
    past = [a_refresh(at, {"2026-01": (0, added)}) for at, added in enumerate((10, 20, 30, 40, 50, 100_000, 900_000))]
    small = estimate(past, "incremental", 25)
    assert small is not None
    assert (small.refreshes, small.rows, small.bytes_read) == (5, (10, 50), 25 * 80)
    assert round(small.seconds, 1) == 4.0
    assert estimate(past, "full", 25) is None
