"""What people see and click: Dagster's real webserver and daemon in a real browser. The tests tell one story.

Screenshots of each step are kept in build/screenshots.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import dagster as dg
import pytest
import requests
from playwright.sync_api import Page, expect, sync_playwright

from tir_dagster.hyper.engine import connect
from tir_dagster.orchestration.home import dagster_instance, tir_home
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.orchestration.partitions import slice_partitions
from tir_dagster_tests.processes import answers, free_port, listening, running, wait_for

ROOT = Path(__file__).parents[2]
# Three of the runs start a Spark of their own, on machines that may have little to spare.
PATIENCE_SECONDS = 600.0
wait_long = partial(wait_for, seconds=PATIENCE_SECONDS, pause=0.5)
LOCATION = "extracts"
# Dagster's own daemon; but it looks for backfills, and at those under way, every other second instead of twice a minute.
DAEMON = """\
import dagster._daemon.controller as controller
controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 2
from dagster._daemon.cli import main
main()
"""


@dataclass(frozen=True)
class Screen:
    """A page of the browser on the UI, and the history behind it."""

    page: Page
    url: str
    instance: dg.DagsterInstance

    def open(self, path: str) -> Page:
        self.page.goto(f"{self.url}{path}")
        return self.page

    def rest(self) -> None:
        """Show nothing while runs are waited for: an open page asks and draws all the time, which they need the processors for."""
        self.page.goto("about:blank")

    def keep(self, name: str) -> None:
        self.page.screenshot(path=ROOT / "build" / "screenshots" / f"{name}.png")

    def runs(self, job: str, status: dg.DagsterRunStatus = dg.DagsterRunStatus.SUCCESS) -> list[dg.DagsterRun]:
        return list(self.instance.get_runs(dg.RunsFilter(job_name=job, statuses=[status])))


@pytest.fixture(scope="module")
def url(place) -> Iterator[str]:
    """Webserver and daemon, as `tir dev` starts them; both ask one code server, which loads the definitions once."""
    # Nothing waits here for the sake of others: neither the source's quiet nor the time between two looks of a sensor.
    hasty = place.spec_text.replace("quiet_period: 1 second", "quiet_period: 0 seconds, interval: 1 second")
    (place.folder / "specs.yaml").write_text(hasty, encoding="utf-8")
    code, web = free_port(), free_port()
    workspace = f"load_from: [{{grpc_server: {{host: 127.0.0.1, port: {code}, location_name: {LOCATION}}}}}]\n"
    (place.folder / "workspace.yaml").write_text(workspace, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIR_SPECS", str(place.folder / "specs.yaml"))
        with dagster_instance() as instance:
            # Two servers that make the same new database at the same time break it.
            instance.get_runs(limit=1)
        with (
            running(place.folder, "dagster", "api", "grpc", "-p", str(code), "-m", "tir_dagster.definitions"),
            listening(code),
            running(place.folder, "dagster-webserver", "-p", str(web), "-w", "workspace.yaml"),
            running(place.folder, "python", "-c", DAEMON, "run", "-w", "workspace.yaml"),
        ):
            made = f"http://127.0.0.1:{web}"
            wait_long(lambda: answers(made), "the webserver answers")
            yield made


@pytest.fixture(scope="module")
def screen(place, url) -> Iterator[Screen]:
    search = subprocess.run([ROOT / "scripts" / "find-chromium"], capture_output=True, text=True, check=False)
    assert search.returncode == 0, search.stderr
    (ROOT / "build" / "screenshots").mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver, dagster_instance() as instance:
        browser = driver.chromium.launch(executable_path=search.stdout.strip(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 760})
        page.set_default_timeout(PATIENCE_SECONDS * 1000)
        expect.set_options(timeout=PATIENCE_SECONDS * 1000)
        yield Screen(page, url, instance)
        browser.close()


def months(place) -> list[str]:
    return list(slice_partitions(place.spec.slices).get_partition_keys())


def launch(screen: Screen, chosen: str) -> None:
    """The dialog that materializes slices, as anybody would fill it in."""
    page = screen.open(f"/locations/{LOCATION}/jobs/orders_refresh")
    page.get_by_role("button", name="Materialize").first.click()
    confirm, slices = page.get_by_role("button", name="Confirm"), page.get_by_text("Partition selection")
    expect(confirm.or_(slices).first).to_be_visible()
    if confirm.is_visible():
        # Dagster warns that no change set was materialized before; a run by hand makes its own.
        confirm.click()
    dialog = page.get_by_role("dialog")
    field = dialog.get_by_placeholder("ex: ")
    field.fill(chosen)
    field.press("Enter")
    screen.keep(f"launch {chosen}")
    dialog.get_by_role("button", name="Launch backfill").click()
    expect(dialog).to_have_count(0)
    screen.rest()


def published_rows(place, screen: Screen) -> int | None:
    confirmed = last_confirmation(screen.instance, extract_keys(place.spec).published_datasource)
    return confirmed.rows if confirmed else None


def source_rows(place) -> int:
    return int(place.sql("SELECT COUNT(*) FROM MYTABLE")[0][0])


def filled(screen: Screen, count: int) -> Page:
    page = screen.open("/assets/orders/purged_extract?view=partitions")
    expect(page.get_by_text(f"Materialized ({count})")).to_be_visible()
    return page


def test_the_lineage_shows_the_four_assets_and_materializing_all_asks_for_slices(place, screen):
    page = screen.open(f"/locations/{LOCATION}/asset-groups/orders/lineage")
    for name in ("source_table", "changed_keys", "purged_extract", "published_datasource"):
        expect(page.get_by_text(name, exact=True).first).to_be_visible()
    expect(page.get_by_text("Loading")).to_have_count(0)
    screen.keep("lineage")
    page.get_by_role("button", name="Materialize all").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text("Launch runs to materialize 2 assets")).to_be_visible()
    expect(dialog.get_by_placeholder("ex: ")).to_have_attribute("placeholder", re.compile(months(place)[-1]))
    screen.keep("materialize all")


def test_two_slices_are_materialized_by_clicking_in_one_run_and_are_seen_filled(place, screen):
    first, second = months(place)[-2:]
    launch(screen, f"{first}, {second}")
    wait_long(lambda: screen.runs("orders_refresh"), "the run of two slices")
    assert len(screen.runs("orders_refresh")) == 1
    page = filled(screen, 2)
    page.get_by_text(second, exact=True).first.click()
    expect(page.get_by_text("tir/slice_fingerprint").first).to_be_visible()
    screen.keep("two slices")
    assert published_rows(place, screen) == source_rows(place)


def test_a_backfill_over_a_range_is_one_run(place, screen):
    first, *_, last = months(place)[-5:-1]
    launch(screen, f"[{first}...{last}]")
    wait_long(lambda: len(screen.runs("orders_refresh")) == 2, "the backfill")
    filled(screen, 5)
    page = screen.open("/overview/backfills")
    expect(page.get_by_text("4 partitions").first).to_be_visible()
    expect(page.get_by_text("Success")).to_have_count(2)
    screen.keep("backfills")


def switch(screen: Screen, sensor: str, *, on: bool) -> None:
    page = screen.open(f"/locations/{LOCATION}/sensors/{sensor}")
    expect(page.get_by_text("Preview tick").first).to_be_visible()
    # The switch itself is drawn by its label.
    page.locator("input[type=checkbox]").first.dispatch_event("click")

    def is_as_wanted() -> bool:
        running = [
            state for state in screen.instance.all_instigator_state() if state.name == sensor and state.is_running
        ]
        return bool(running) == on

    wait_long(is_as_wanted, f"{sensor} is {'on' if on else 'off'}")


CHECKS = """{ assetNodes(assetKeys: [{path: ["orders", "published_datasource"]}]) { assetChecksOrError {
  ... on AssetChecks { checks { name executionForLatestMaterialization { status } } } } } }"""


def check_states(screen: Screen) -> dict[str, str | None]:
    """What the page shows of the datasource's checks; None stands for "Not evaluated"."""
    answer = requests.post(f"{screen.url}/graphql", json={"query": CHECKS}, timeout=60).json()
    (node,) = answer["data"]["assetNodes"]
    executions = {
        check["name"]: check["executionForLatestMaterialization"] for check in node["assetChecksOrError"]["checks"]
    }
    return {name: execution["status"] if execution else None for name, execution in executions.items()}


def test_a_change_in_the_source_starts_its_runs_by_the_sensors(place, screen):
    stamp = "DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE))"
    columns = "ORDER_ID, ORDER_DATE, CUSTOMER, QUANTITY, UPDATED_AT"
    place.sql(
        f"INSERT INTO MYTABLE ({columns}) SELECT MAX(ORDER_ID) + 1, MAX(ORDER_DATE), 'new', 1, {stamp} FROM MYTABLE"
    )
    for sensor in ("orders_source", "orders_refresh"):
        switch(screen, sensor, on=True)
    screen.rest()
    wait_long(lambda: published_rows(place, screen) == source_rows(place), "the change is published")
    wait_long(lambda: set(check_states(screen).values()) == {"SUCCEEDED"}, "its checks are evaluated, not reset")
    (detection,) = screen.runs("orders_detect")
    assert detection.tags["dagster/sensor_name"] == "orders_source"
    # What the next test breaks would be repaired before anybody could look at it.
    for sensor in ("orders_refresh", "orders_source"):
        switch(screen, sensor, on=False)
    expect(screen.page.get_by_text("Loading ticks")).to_have_count(0)
    screen.keep("sensor")
    page = screen.open("/runs?q%5B0%5D=tag%3Adagster%2Fsensor_name%3Dorders_source")
    expect(page.get_by_text(detection.run_id[:8]).first).to_be_visible()
    screen.keep("run of the sensor")


def test_a_failed_check_is_seen_in_red(place, screen):
    confirmed = last_confirmation(screen.instance, extract_keys(place.spec).published_datasource)
    extract = tir_home() / "extracts" / "orders" / "versions" / confirmed.version / "extract.hyper"
    with connect(extract) as connection:
        connection.execute_command(
            'DELETE FROM "Extract"."Extract" WHERE "ORDER_ID" = (SELECT MAX("ORDER_ID") FROM "Extract"."Extract")'
        )
    page = screen.open("/assets/orders/published_datasource?view=checks")
    page.get_by_role("button", name="Execute all").click()
    key = dg.AssetCheckKey(extract_keys(place.spec).published_datasource, "equals_source")

    def failed() -> bool:
        executions = screen.instance.event_log_storage.get_latest_asset_check_execution_by_key([key])
        return key in executions and executions[key].status.value == "FAILED"

    wait_long(failed, "the check finds the lost row")
    page = screen.open("/assets/orders/published_datasource?view=checks&checkDetail=equals_source")
    expect(page.get_by_text("1 slice differs from the source").first).to_be_visible()
    screen.keep("failed check")
