"""A fault at every call to Tableau in turn: the refresh succeeds, or it fails clearly over a whole datasource and the next heals.

A change is found and applied once per delivery; each play then goes back to the moment before Tableau was asked (the folder
from a copy, the datasource published again as it was) and plays the part that talks to Tableau with one fault at one call.
`make test` plays every call with one kind of fault, in turn, and where most is at stake a lasting one too; with TIR_FAULTS=all
every call meets every kind. Waiting passes on a clock of its own, so nothing here waits for long.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from pyspark.sql import SparkSession
from tableauhyperapi import HyperProcess, Telemetry

from tir_dagster.errors import TirError
from tir_dagster.orchestration.home import tir_home
from tir_dagster.refresh.deliveries import patch as by_patch
from tir_dagster.refresh.deliveries import whole
from tir_dagster.refresh.deliveries.trigger import no_spark, plan_trigger, refresh_on_server, watch
from tir_dagster.refresh.state.call_budget import BudgetSpentError
from tir_dagster.refresh.state.change_sets import ChangeSetStore, new_id
from tir_dagster.refresh.state.lease import LeaseLostError
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.retries import RetryPolicy
from tir_dagster.sandbox.tableau.settings import Settings
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spark.session import spark_session
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster.tableau.client import TableauClient, paced
from tir_dagster.tableau.datasources import FoundProject, find_project, read_datasource, server_version
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.pace import nap
from tir_dagster_tests.orchestration.served import PROJECT, Served
from tir_dagster_tests.packages import plain
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.rest_calls import check_played
from tir_dagster_tests.sandbox.tableau.helpers import Admin, Looker
from tir_dagster_tests.stages import Refresher
from tir_dagster_tests.tableau.helpers import Disk

EVERYTHING = os.environ.get("TIR_FAULTS") == "all"
# What passes: a refresh need not fail of it.
PASSING: dict[str, dict[str, Any]] = {
    "too many calls": {"kind": "status", "status": 429, "retry_after": 1},
    "cut before": {"kind": "cut", "when": "before"},
    "expired session": {"kind": "expire_session"},
    "cut after": {"kind": "cut", "when": "after"},
    "server error": {"kind": "status", "status": 500},
    "cut during": {"kind": "cut", "when": "during"},
}
# What stays: this call never succeeds, or none does from this one on.
LASTING: dict[str, dict[str, Any]] = {
    "broken": {"kind": "status", "status": 500, "times": 100_000},
    "down": {"kind": "status", "status": 503, "times": 100_000},
}
DELIVERIES = ["republish", "server", "patch", "trigger", *(["trigger incremental"] if EVERYTHING else [])]
# Packages that are published by a job of the server, as large ones are.
BY_JOB = ["republish by job", "server by job"]
# Where a refresh that ends half-way leaves most behind.
AT_STAKE = ("publish", "add_tags", "refresh", "update_data")
TAGS = {"kept", "dear to people"}
ADVICE = re.compile(
    r"\b([Rr]un|[Ll]ook|Check|Compare|Create|Choose|[Gg]ive|Repair|Open|Refresh|Upgrade|Wait|next refresh)\b"
)


@dataclass
class Time:
    """Waiting passes on this clock, and hardly at all on the wall's."""

    now: float = 0.0
    share: float = 0.004

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        nap(seconds, share=self.share)

    def policy(self) -> RetryPolicy:
        return RetryPolicy(tries=3, sleep=self.sleep, clock=lambda: self.now)


@dataclass(frozen=True)
class Spot:
    """One call of a refresh: its place among all, and among those of the same method and path."""

    place: int
    method: str
    path: str
    nth: int
    route: str

    def __str__(self) -> str:
        return f"call {self.place} ({self.method} {self.route}, number {self.nth + 1})"

    def fault(self, kind: str) -> dict[str, Any]:
        if kind == "down":
            return {**LASTING[kind], "skip": self.place}
        if kind == "expired session" and self.route in ("server_info", "sign_in"):
            kind = "cut during"
        return {**PASSING, **LASTING}[kind] | {"method": self.method, "path": self.path, "skip": self.nth}


def spots_of(calls: list[dict[str, Any]]) -> list[Spot]:
    """The calls of a refresh. Jobs and uploads have new ids each time; how often a job is looked at depends on its pace."""
    seen: Counter[tuple[str, str]] = Counter()
    spots = []
    for place, call in enumerate(calls):
        path = re.sub(r"/(jobs|fileUploads)/[^/]+", r"/\1/[^/]+", re.escape(call["path"]))
        key = (call["method"], f"^{path}$")
        if call["route"] != "get_job" or not seen[key]:
            spots.append(Spot(place, *key, seen[key], call["route"]))
        seen[key] += 1
    return spots


@dataclass
class Scene:
    """One extract with a change that is ready to be delivered, and the way back to that moment."""

    place: Served
    admin: Admin
    others: TSC.Server
    client: TableauClient
    looker: Looker
    time: Time = field(default_factory=Time)
    confirmed: Confirmation | None = None
    version: str = ""
    # The error of the last play, and the faults that it never met.
    told: str = ""
    unstruck: list[Any] = field(default_factory=list)

    def prepare(self) -> None:
        self.first_load()
        self.old = self.published()
        self.package = Path(self._download())
        self.change()
        self.new = self.place.source_rows()
        assert self.old != self.new
        self.rewind(folder=False)
        self.stage()
        shutil.copytree(self.home, self.copy)

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def home(self) -> Path:
        return self.place.folder / "extracts"

    @property
    def copy(self) -> Path:
        return self.place.folder / "copy"

    def waiting(self) -> Any:
        return paced(self.time.policy())

    # The delivery's own part

    def first_load(self) -> None:
        with self.waiting():
            self.place.refresh()
        self.confirmed = self.place.confirmed
        assert self.confirmed is not None
        self.place.datasource_id = self.confirmed.datasource_id

    def change(self) -> None:
        """The last rows only: the delivery `server` goes on from them, and something remains before them."""
        self.place.act(("update", "20", "'changed'"))
        self.place.act(("delete", "21"))
        self.place.act(("insert", "100", self.place.value(11), "'new'"))

    def stage(self) -> None:
        refresher = self.place.refresher
        with self.waiting():
            looked = refresher.look(self.confirmed)
            surveyed = refresher.survey(looked)
            plan = refresher.plan(looked, surveyed, "changes")
            plan, change_set = refresher.detect(looked, surveyed, plan, ident=new_id(), resync=[], allow_empty=False)
            assert change_set is not None
            assert plan.decision == "incremental"
            version = refresher.apply(looked, change_set)
        self.version = version.id

    def play(self) -> None:
        """All that talks to Tableau, and the confirmation."""
        self.confirmed = self.deliver()
        self.place.refresher.settle(self.confirmed)

    def deliver(self) -> Confirmation:
        """All that talks to Tableau, in a refresher that remembers nothing."""
        refresher = self.place.refresher = self.place._refresher()
        with self.waiting():
            looked = refresher.look(self.confirmed)
            assert looked.late is None
            return refresher.publish(looked, refresher.versions.get(self.version)).confirmation

    def heal(self) -> str:
        """One clean refresh; its decision."""
        self.place.refresher = self.place._refresher()
        self.place.confirmed = self.confirmed
        with self.waiting():
            done = self.place.refresh()
            self.confirmed = self.place.confirmed
        return done.decision

    # Back to the start

    def rewind(self, *, folder: bool = True) -> None:
        """The datasource and the folder as they were, and a later second on the server's clock."""
        self.admin.clear_faults()
        self.end_jobs()
        self.publish_old()
        self.admin.set(clock_offset_seconds=self._offset() + 2)
        if folder:
            shutil.rmtree(self.home)
            shutil.copytree(self.copy, self.home)
        if self.confirmed is not None:
            before = self._before if folder else self.confirmed
            self._before = self.confirmed = replace(before, server_version=self._server_version())

    def end_jobs(self) -> None:
        """As somebody does on the server's jobs page."""
        for job in self.others.jobs.filter(title=self.name):
            if job.status in ("Pending", "InProgress"):
                self.others.jobs.cancel(job.id)

    def _offset(self) -> float:
        settings = requests.get(f"{self.admin.url}/sandbox/settings", timeout=30).json()
        return float(settings["clock_offset_seconds"])

    def publish_old(self) -> None:
        env = self.place.env
        credentials = TSC.ConnectionCredentials(env["SNOWFLAKE_USER"], env["SNOWFLAKE_PASSWORD"], embed=True)
        credentials = credentials if self.place.built else None
        now = self.others.datasources.get_by_id(self.place.datasource_id)
        item = TSC.DatasourceItem(now.project_id, self.name)
        self.others.datasources.publish(item, str(self.package), "Overwrite", connection_credentials=credentials)
        now = self.others.datasources.get_by_id(self.place.datasource_id)
        now.description, now.owner_id = "Ask Ann.", self._owner
        now.certified, now.certification_note = True, "by Ann"
        self.others.datasources.update(now)
        self.others.datasources.add_tags(now, TAGS)

    @cached_property
    def _owner(self) -> str:
        reader = self.place.sandbox.identity.reader_user
        return next(str(user.id) for user in TSC.Pager(self.others.users) if user.name == reader)

    def _server_version(self) -> str:
        datasource = read_datasource(self.client, self.place.datasource_id, project=self._project, name=self.name)
        assert datasource is not None
        return str(server_version(datasource))

    @cached_property
    def _project(self) -> FoundProject:
        return find_project(self.client, PROJECT)

    # What people see

    def _download(self) -> str:
        target = self.place.folder / f"seen-{time.monotonic_ns()}"
        return str(self.others.datasources.download(self.place.datasource_id, filepath=str(target)))

    def published(self) -> Counter:
        package = Path(self._download())
        rows = self.looker.rows(package, 'SELECT "I", "K", "V", "W" FROM "Extract"."Extract"')
        package.unlink()
        return Counter(tuple(map(plain, row)) for row in rows)

    def lost(self) -> str | None:
        """What people had set on the datasource and do not find there any more."""
        item = self.others.datasources.get_by_id(self.place.datasource_id)
        self.others.datasources.populate_connections(item)
        embedded = [(connection.username, bool(connection.embed_password)) for connection in item.connections]
        settings = (set(item.tags), item.description, item.owner_id, item.certified, item.certification_note, embedded)
        # A published Hyper file signs in nowhere.
        connection = (self.place.env["SNOWFLAKE_USER"], True) if self.place.built else ("tableau_internal_user", False)
        set_up = (TAGS, "Ask Ann.", self._owner, True, "by Ann", [connection])
        return None if settings == set_up else f"something that people set is lost: {settings}"

    def calls(self) -> list[dict[str, Any]]:
        """What the server was asked since this was asked last."""
        answer = requests.delete(f"{self.admin.url}/sandbox/calls", timeout=30)
        return answer.json()["calls"]


@dataclass
class TriggerScene(Scene):
    """The same, where Tableau's own refresh is all that happens."""

    def _refresher(self) -> Refresher:
        return Refresher(
            self.place.spec(),
            snowflake=SnowflakeAccess.from_environment(self.place.env),
            tableau=TableauAccess.from_environment(self.place.env),
            spark=no_spark,
            home=self.place.folder,
            log=self.place.lines.append,
        )

    def first_load(self) -> None:
        self.home.mkdir(exist_ok=True)
        self._settle()

    def _settle(self) -> str:
        refresher = self._refresher()
        with self.waiting():
            watched = watch(refresher.context)
            plan = plan_trigger(self.place.spec(), watched, self.confirmed, "changes")
            if plan.decision != "none":
                self.confirmed = refresh_on_server(refresher.context, plan, watched).confirmation
        return plan.decision

    def change(self) -> None:
        """Rows that Tableau's own increment finds, too."""
        self.place.act(("insert", "100", self.place.value(50), "'new'"))

    def stage(self) -> None:
        """There is nothing to stage."""

    def play(self) -> None:
        assert self._settle() != "none"

    def heal(self) -> str:
        decision = self._settle()
        return "incremental" if decision == "full" and self._always_full else decision

    @property
    def _always_full(self) -> bool:
        return self.place.spec().datasource.refresh == "full"


# Where it is played


@pytest.fixture(scope="module")
def scenes(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Scene]]:
    """One scene per delivery, made when it is first asked for."""
    built: dict[str, Scene] = {}
    admin = Admin(sandbox.tableau_url)
    admin.set(job_seconds=0.02)
    with (
        sandbox.tableau() as others,
        _client(sandbox) as client,
        HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as hyper,
    ):

        def scene(delivery: str) -> Scene:
            if delivery not in built:
                folder = tmp_path_factory.mktemp("faults")
                place = make_place(delivery, sandbox, folder)
                kind = TriggerScene if delivery.startswith("trigger") else Scene
                built[delivery] = kind(place, admin, others, client, Looker(hyper.endpoint, folder))
                built[delivery].prepare()
            return built[delivery]

        yield scene
    for scene in built.values():
        scene.place.close()
    admin.clear_faults()
    admin.set(**asdict(Settings()))


def make_place(delivery: str, sandbox: Sandbox, folder: Path) -> Served:
    kind, _, how = delivery.partition(" ")
    if kind != "trigger":
        datasource = {"publish_job_mb": 0} if how == "by job" else {}
        return Served(
            sandbox, _spark(), folder, settings={"delivery": kind}, datasource=datasource, built=kind != "patch"
        )
    no_spark: Any = None
    return Served(sandbox, no_spark, folder, settings={"delivery": kind}, datasource={"refresh": how or "full"})


def _client(sandbox: Sandbox) -> TableauClient:
    """Somebody who looks on."""
    return TableauClient(TableauAccess(sandbox.tableau_url, sandbox.identity.site, TableauToken(*sandbox.new_token())))


def _spark() -> SparkSession:
    # The session that the other tests of this folder use, too.
    return spark_session("tir tests", home=tir_home())


@pytest.fixture(params=DELIVERIES)
def scene(
    request: pytest.FixtureRequest, scenes: Callable[[str], Scene], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    if request.param == "republish":
        # In pieces, as large files go; the delivery `server` sends its own whole.
        monkeypatch.setenv("TSC_FILESIZE_LIMIT_MB", "0")
    built = scenes(request.param)
    built.rewind()
    yield built
    built.admin.clear_faults()


@pytest.fixture(scope="module")
def recorded(scenes: Callable[[str], Scene]) -> Callable[[Scene], list[Spot]]:
    """The calls of one refresh without a fault."""
    known: dict[str, list[Spot]] = {}

    def record(scene: Scene) -> list[Spot]:
        if scene.name not in known:
            scene.rewind()
            scene.calls()
            scene.play()
            known[scene.name] = spots_of(scene.calls())
            assert scene.published() == scene.new
            assert scene.lost() is None
        return known[scene.name]

    return record


# What must hold


def unclear(scene: Scene, error: Exception) -> str | None:
    """What is wrong with this error's text."""
    text = str(error)
    secrets = (scene.place.env["TABLEAU_TOKEN_SECRET"], scene.place.env["SNOWFLAKE_PASSWORD"])
    if not isinstance(error, TirError):
        return f"not an error of ours: {error!r}"
    if any(secret in text for secret in secrets):
        return "it shows a secret"
    if not (scene.name in text or scene.admin.url in text):
        return "it names neither the datasource nor the server"
    if not ADVICE.search(text) or not text.endswith(".") or "\n" in text or "  " in text:
        return "it does not say what to do"
    return None


def wrong(scene: Scene, *, before_healing: Callable[[], None] = lambda: None) -> str | None:
    """Play with the faults that were set; what does not hold, if anything."""
    scene.told, scene.unstruck = "", []
    try:
        scene.play()
    except Exception as error:
        scene.told = str(error)
        if problem := unclear(scene, error):
            return f"{problem}: {error}"
        scene.admin.clear_faults()
        before_healing()
        return _not_healed(scene)
    scene.unstruck = scene.admin.faults()
    # A server that is down from the sign-out on would not show us anything, either.
    scene.admin.clear_faults()
    if scene.published() != scene.new:
        return "succeeded, but people do not see the source"
    if any("The next refresh puts back" in warning for warning in scene.place.refresher.warnings):
        scene.heal()
    return scene.lost()


def _not_healed(scene: Scene) -> str | None:
    text = scene.told
    seen = scene.published()
    if seen not in (scene.old, scene.new) and "People may not see" not in text:
        return f"failed, and the datasource is neither old nor new: {text}"
    if (decision := scene.heal()) == "full":
        return f"the next refresh was a full one, after: {text}"
    if scene.published() != scene.new:
        return f"the next refresh ({decision}) did not heal, after: {text}"
    if scene.heal() != "none":
        return f"a third refresh found something to do, after: {text}"
    return scene.lost()


def play_all(scene: Scene, spots: list[Spot], kind: str) -> list[str]:
    """One play per call; the complaints."""
    complaints = []
    for spot in spots:
        scene.rewind()
        fault = spot.fault(kind)
        scene.admin.fault(**fault)
        problem = wrong(scene)
        if problem is None and kind in PASSING:
            problem = scene.told or ("the fault never struck" if scene.unstruck else None)
        if problem:
            complaints.append(f"{kind} at {spot}: {problem}")
    return complaints


calls = pytest.mark.parametrize("scene", DELIVERIES, indirect=True)


@calls
def test_the_table_of_rest_calls_says_what_is_played_at(
    request: pytest.FixtureRequest, scene: Scene, recorded: Callable[[Scene], list[Spot]]
) -> None:
    check_played(request.node.callspec.params["scene"], {spot.route for spot in recorded(scene)})


@calls
def test_the_scopes_that_a_connected_app_asks_for_are_enough(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    identity, env = scene.place.sandbox.identity, scene.place.env
    for name in ("client_id", "secret_id", "secret_value"):
        monkeypatch.setitem(env, f"TABLEAU_CONNECTED_APP_{name.upper()}", getattr(identity, f"connected_app_{name}"))
    monkeypatch.setitem(env, "TABLEAU_USERNAME", identity.tableau_user)
    monkeypatch.setitem(env, "TABLEAU_TOKEN_NAME", "")
    monkeypatch.setitem(env, "TABLEAU_TOKEN_SECRET", "")
    scene.play()
    assert scene.published() == scene.new
    assert scene.lost() is None
    assert "scope" not in caplog.text


@pytest.mark.parametrize("scene", ["republish", "server", "patch"], indirect=True)
def test_a_publish_beyond_what_the_site_allows_in_an_hour_touches_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scene.place.env, "TABLEAU_PUBLISHES_PER_HOUR", "1")
    scene.play()
    scene.rewind()
    scene.calls()
    with pytest.raises(BudgetSpentError, match="allows 1 publishes and updates of datasources an hour"):
        scene.deliver()
    assert not {call["route"] for call in scene.calls()} & {"start_upload", "publish", "update_data", "refresh"}
    assert scene.published() == scene.old


every_call = pytest.mark.parametrize("scene", [*DELIVERIES, *(BY_JOB if EVERYTHING else [])], indirect=True)


@every_call
@pytest.mark.parametrize("kind", PASSING)
def test_what_passes_is_survived_at_every_call(
    scene: Scene, recorded: Callable[[Scene], list[Spot]], kind: str
) -> None:
    turn = list(PASSING).index(kind)
    spots = [spot for spot in recorded(scene) if EVERYTHING or spot.place % len(PASSING) == turn]
    assert play_all(scene, spots, kind) == []


@every_call
@pytest.mark.parametrize("kind", LASTING)
def test_what_stays_is_told_and_the_next_refresh_heals(
    scene: Scene, recorded: Callable[[Scene], list[Spot]], kind: str
) -> None:
    turn = list(LASTING).index(kind)
    at_stake = [spot for spot in recorded(scene) if spot.route in AT_STAKE]
    spots = recorded(scene) if EVERYTHING else at_stake[turn :: len(LASTING)] or at_stake
    assert play_all(scene, spots, kind) == []


@pytest.mark.parametrize("scene", ["republish", "server"], indirect=True)
def test_trouble_with_the_comparison_is_not_taken_for_a_foreign_publish(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.deliver()
    # Nobody confirmed it: the next refresh compares the rows, and cannot get them.
    scene.admin.fault("status", path="/content$", status=503, times=100_000)
    with pytest.raises(TirError) as caught:
        scene.heal()
    assert unclear(scene, caught.value) is None
    scene.admin.clear_faults()
    # Or the disk is full once they are downloaded.
    room = iter([10**12] * 2)
    with monkeypatch.context() as filling:
        filling.setattr(shutil, "disk_usage", lambda _: Disk(free=next(room, 0)))
        with pytest.raises(TirError, match="of free disk space and has 0 MB"):
            scene.heal()
    assert scene.heal() == "none", "it had landed, which is confirmed late"
    assert scene.published() == scene.new


@pytest.mark.parametrize("scene", ["patch"], indirect=True)
def test_a_full_disk_does_not_hide_that_a_change_arrived_in_part(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.admin.fault("torn_job", path=f"/{scene.name}$", times=2, actions=1)
    with pytest.raises(TirError, match="A part of the change may be there"):
        scene.play()
    with monkeypatch.context() as filling:
        # The last that a download writes: from there on, what it holds is looked at.
        filling.setattr(shutil, "disk_usage", lambda at: Disk(free=0 if (Path(at) / "shell.tdsx").exists() else 10**12))
        with pytest.raises(TirError, match="of free disk space and has 0 MB"):
            scene.heal()
    assert scene.heal() == "incremental"
    assert scene.published() == scene.new


@pytest.mark.long
@pytest.mark.parametrize("scene", ["server"], indirect=True)
def test_rows_that_are_missing_come_back_by_a_full_load_where_the_kept_version_is_lost(scene: Scene) -> None:
    scene.admin.fault(**LASTING["broken"], method="POST", path="/refresh$")
    scene.admin.fault(**LASTING["broken"], method="POST", path="/datasources$", skip=1)
    with pytest.raises(TirError, match="People may not see"):
        scene.play()
    scene.admin.clear_faults()
    assert scene.confirmed is not None
    shutil.rmtree(scene.place.refresher.versions.get(scene.confirmed.version).folder)
    assert scene.heal() == "full"
    assert (scene.published(), scene.lost()) == (scene.new, None)


def take_over(scene: Scene) -> None:
    other = {"id": "another", "host": "elsewhere", "pid": 7, "purpose": "tir refresh"}
    (scene.place.refresher.folder / "lease.json").write_text(json.dumps(other), encoding="utf-8")


@pytest.mark.parametrize("scene", ["republish", "server", "patch"], indirect=True)
def test_one_who_lost_the_lease_stops_right_before_the_publish(scene: Scene) -> None:
    refresher = scene.place.refresher = scene.place._refresher()
    refresher.listen(lambda line: take_over(scene) if line.startswith(("publishing", "sending")) else None)
    dead, other_payload = (
        refresher.work.with_name(name) / "patch" / "payload.hyper" for name in ("dead", "other_payload")
    )
    put(dead)
    with scene.waiting(), refresher.leased("a slow run", wait_seconds=0):
        assert not dead.exists(), "what others left is swept"
        put(other_payload)
        looked = refresher.look(scene.confirmed)
        with pytest.raises(LeaseLostError, match=r"process 7 on elsewhere \(tir refresh\) has taken over"):
            refresher.publish(looked, refresher.versions.get(scene.version))
        assert json.loads((refresher.folder / "lease.json").read_text(encoding="utf-8"))["id"] == "another"
        assert (scene.published(), scene.lost()) == (scene.old, None)
    assert other_payload.is_file(), "nobody works in the folder of another one"


def put(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.touch()


@pytest.mark.parametrize("scene", ["patch"], indirect=True)
def test_one_whose_files_were_swept_is_told_who_took_over(scene: Scene) -> None:
    refresher = scene.place.refresher = scene.place._refresher()

    def swept(line: str) -> None:
        if line.startswith("sending"):
            take_over(scene)
            shutil.rmtree(refresher.work)

    refresher.listen(swept)
    with scene.waiting(), refresher.leased("a slow run", wait_seconds=0):
        looked = refresher.look(scene.confirmed)
        with pytest.raises(LeaseLostError, match="process 7 on elsewhere"):
            refresher.publish(looked, refresher.versions.get(scene.version))
    assert scene.published() == scene.old


@pytest.mark.parametrize("scene", ["republish"], indirect=True)
def test_one_who_lost_the_lease_after_the_publish_leaves_the_confirmation_to_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresher = scene.place.refresher = scene.place._refresher()
    # All that it waits for here is the second that passes after the publish.
    monkeypatch.setattr(scene.time, "sleep", lambda _: take_over(scene))
    with scene.waiting(), refresher.leased("a slow run", wait_seconds=0):
        looked = refresher.look(scene.confirmed)
        with pytest.raises(LeaseLostError, match="Whatever was published from here is that refresh's to confirm"):
            refresher.publish(looked, refresher.versions.get(scene.version))
    assert (scene.published(), scene.lost()) == (scene.new, None)


@pytest.mark.parametrize("scene", ["patch"], indirect=True)
@pytest.mark.parametrize(
    ("meanwhile", "sentence", "fails"),
    [
        (take_over, "has taken over", True),
        (take_over, "has taken over", False),
        (Scene.publish_old, "Somebody else published .* while its data was changed", True),
    ],
    ids=["another run", "another run, which confirms it", "somebody else"],
)
def test_what_happened_while_a_job_worked_is_noticed_before_anything_is_sent_again_or_confirmed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Scene], None], sentence: str, fails: bool
) -> None:
    refresher = scene.place.refresher = scene.place._refresher()
    sleep, waiting = scene.time.sleep, iter([scene])
    refresher.listen(lambda line: scene.calls() if line.startswith("sending") else None)
    scene.admin.fault("slow_job", path=f"/{scene.name}$", seconds=0.2)
    if fails:
        scene.admin.fault("fail_job", path=f"/{scene.name}$")
    monkeypatch.setattr(scene.time, "sleep", lambda seconds: [sleep(seconds), *map(meanwhile, waiting)])
    with scene.waiting(), refresher.leased("a slow run", wait_seconds=0):
        looked = refresher.look(scene.confirmed)
        with pytest.raises(TirError, match=sentence):
            refresher.publish(looked, refresher.versions.get(scene.version))
    assert [call["route"] for call in scene.calls()].count("update_data") == 1
    assert scene.published() == (scene.old if fails else scene.new)


@pytest.mark.parametrize("scene", ["patch"], indirect=True)
def test_where_no_revisions_are_shown_the_rows_are_compared(scene: Scene) -> None:
    scene.admin.fault("status", path="/revisions$", status=403, code="403004", times=100_000)
    scene.admin.fault("fail_job", path=f"/{scene.name}$")
    scene.calls()
    assert (wrong(scene), scene.told) == (None, "")
    assert "download" in {call["route"] for call in scene.calls()}
    # Here something changed, and nobody can tell whose change it is.
    scene.rewind()
    scene.admin.fault("status", path="/revisions$", status=403, code="403004", times=100_000)
    scene.admin.fault("torn_job", path=f"/{scene.name}$", actions=1)
    with pytest.raises(TirError, match="it is changed, perhaps by somebody else") as caught:
        scene.play()
    assert unclear(scene, caught.value) is None
    assert scene.heal() == "none", "sent again, and confirmed late"
    assert scene.published() == scene.new


@pytest.mark.parametrize("scene", ["republish"], indirect=True)
def test_who_may_neither_see_revisions_nor_download_is_warned(scene: Scene) -> None:
    scene.admin.fault("status", path="/(revisions|content)$", status=403, code="403004", times=100_000)
    assert scene.confirmed is not None
    scene.confirmed = replace(scene.confirmed, server_version=scene._server_version())
    scene.play()
    assert any("would not be noticed" in warning for warning in scene.place.refresher.warnings)
    scene.admin.clear_faults()
    assert (scene.published(), scene.heal()) == (scene.new, "none")


# Jobs


jobs = pytest.mark.parametrize(
    "scene", [*(delivery for delivery in DELIVERIES if delivery != "republish"), "republish by job"], indirect=True
)
refreshes = pytest.mark.parametrize(
    "scene", [delivery for delivery in DELIVERIES if delivery not in ("republish", "patch")], indirect=True
)


@jobs
def test_a_slow_job_is_waited_for(scene: Scene) -> None:
    scene.admin.fault("slow_job", path=f"/{scene.name}$", seconds=0.5)
    assert (wrong(scene), scene.told) == (None, "")


@jobs
def test_a_job_that_outlasts_our_patience_is_told_and_the_next_refresh_heals(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual_share = scene.time.share

    def end_jobs() -> None:
        # The job of the healing refresh needs real time.
        scene.time.share = usual_share
        scene.end_jobs()

    # Hours pass while the job takes seconds.
    monkeypatch.setattr(scene.time, "share", 0)
    scene.admin.fault("slow_job", path=f"/{scene.name}$", seconds=600)
    assert wrong(scene, before_healing=end_jobs) is None
    assert "still runs after" in scene.told


@jobs
def test_a_failed_job_is_told_with_its_notes_if_there_are_any(scene: Scene) -> None:
    # A change that is sent alone is sent twice before it counts as failed.
    delivery = scene.place.spec().delivery
    times = 2 if delivery == "patch" else 1
    scene.admin.fault("fail_job", path=f"/{scene.name}$", times=times, notes="The warehouse is suspended.")
    assert wrong(scene) is None
    # Jobs that publish or change data have no notes.
    without = delivery in ("patch", "republish")
    reason = ", which gives no reason over REST." if without else ": The warehouse is suspended."
    assert f"failed on the server{reason}" in scene.told
    ends = {"patch": " The next refresh makes sure: run it soon.", "republish": " Nothing was published."}
    assert scene.told.endswith(ends.get(delivery, "."))


class Died(BaseException):
    """The process ended here."""


def publishes(scene: Scene) -> int:
    return [call["route"] for call in scene.calls()].count("publish")


@pytest.mark.parametrize("scene", ["republish by job"], indirect=True)
def test_a_run_that_dies_while_its_job_publishes_is_confirmed_by_the_next_and_nothing_is_published_twice(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.admin.fault("slow_job", path=f"/{scene.name}$", seconds=1)
    scene.calls()

    def die(step: str) -> None:
        if step == "sent":
            raise Died

    with monkeypatch.context() as dying:
        dying.setattr(whole, "crash_after", die)
        with pytest.raises(Died):
            scene.play()
    assert scene.published() == scene.old, "the job still runs"
    assert scene.heal() == "none", "the job is waited for, and confirmed late"
    assert (scene.published(), publishes(scene)) == (scene.new, 1)
    assert scene.lost() is None


@pytest.mark.parametrize("scene", ["republish by job"], indirect=True)
def test_a_job_whose_name_a_run_did_not_live_to_hear_is_waited_for_by_the_next(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.admin.fault("slow_job", path=f"/{scene.name}$", seconds=1)
    scene.calls()

    def die(*_: Any) -> None:
        raise Died

    with monkeypatch.context() as dying:
        dying.setattr(ChangeSetStore, "note_job", die)
        with pytest.raises(Died):
            scene.play()
    intent = scene.place.refresher.change_sets.intent()
    assert (intent is not None and intent.by_job, intent and intent.job) == (True, None)
    assert scene.published() == scene.old, "the job still runs"
    assert scene.heal() == "none", "the job is waited for, and confirmed late"
    assert (scene.published(), publishes(scene)) == (scene.new, 1)
    assert scene.lost() is None


@pytest.mark.parametrize("scene", ["server by job"], indirect=True)
def test_a_job_that_still_publishes_a_hole_is_not_called_nothing_and_is_repaired(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.admin.fault("slow_job", path=f"/{scene.name}$", seconds=2)
    with monkeypatch.context() as hours:
        hours.setattr(scene.time, "share", 0)
        with pytest.raises(TirError, match="still runs after") as caught:
            scene.play()
    assert "If the server still publishes it, people do not see" in str(caught.value)
    assert unclear(scene, caught.value) is None
    assert scene.heal() == "incremental", "the hole is outlasted and repaired, and the change is loaded"
    assert (scene.published(), scene.lost()) == (scene.new, None)


@pytest.mark.parametrize("scene", ["patch"], indirect=True)
def test_what_a_change_did_is_claimed_only_by_who_may_look_at_its_job(scene: Scene) -> None:
    scene.admin.fault("slow_job", path=f"/{scene.name}$", seconds=3)
    scene.admin.fault("status", path="/jobs/", status=403, code="403004", times=100_000)
    with pytest.raises(TirError, match=r"refused \(403004\).* The server may still apply the change") as caught:
        scene.play()
    assert (unclear(scene, caught.value), "was changed" in str(caught.value)) == (None, False)
    with pytest.raises(TirError, match=r"refused \(403004\)"):
        # Nobody knows whether it is over, so nothing is published that it could undo.
        scene.heal()
    scene.admin.clear_faults()
    assert scene.heal() == "none", "the change is joined, and confirmed late"
    assert scene.published() == scene.new


@pytest.mark.parametrize("scene", ["patch"], indirect=True)
def test_an_edit_by_people_does_not_end_the_wait_for_a_change_that_was_taken(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.admin.fault("slow_job", path=f"/{scene.name}$", seconds=2)
    with monkeypatch.context() as hours:
        hours.setattr(scene.time, "share", 0)
        with pytest.raises(TirError, match="still runs after"):
            scene.play()
    edits = iter(["Ask Bob."])
    with monkeypatch.context() as people:
        people.setattr(by_patch, "check_unchanged", partial(edited_first, scene, edits, by_patch.check_unchanged))
        assert scene.heal() == "none", "the change is joined, and confirmed late"
    assert (next(edits, None), scene.published()) == (None, scene.new)


def edited_first(scene: Scene, edits: Iterator[str], real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    for text in edits:
        scene.admin.set(clock_offset_seconds=scene._offset() + 2)
        item = scene.others.datasources.get_by_id(scene.place.datasource_id)
        item.description = text
        scene.others.datasources.update(item)
    real(*args, **kwargs)


@jobs
@pytest.mark.parametrize("code", ["404031", pytest.param("400031", marks=pytest.mark.long)])
def test_a_job_that_vanished_is_looked_for_in_the_data(scene: Scene, code: str) -> None:
    scene.admin.fault("vanish_job", path="/jobs/", code=code)
    assert wrong(scene) is None


@jobs
def test_a_job_that_vanished_and_goes_on_is_told_and_then_healed(scene: Scene) -> None:
    scene.admin.fault("slow_job", path=f"/{scene.name}$", seconds=1)
    scene.admin.fault("vanish_job", path="/jobs/")
    with pytest.raises(TirError) as caught:
        scene.play()
    assert unclear(scene, caught.value) is None
    # While it works unseen, a refresh may meet what it did.
    wait_for(lambda: _healed(scene), "a refresh that the forgotten job does not disturb")
    assert scene.published() == scene.new


def _healed(scene: Scene) -> bool:
    try:
        return scene.heal() == "none"
    except TirError as error:
        if problem := unclear(scene, error):
            pytest.fail(f"{problem}: {error}")
        return False


@refreshes
def test_a_refresh_of_somebody_else_is_waited_for(scene: Scene) -> None:
    scene.admin.fault("slow_job", path=f"/{scene.name}$", seconds=1)
    assert scene.others.datasources.refresh(scene.place.datasource_id) is not None
    assert (wrong(scene), scene.told) == (None, "")


# Servers that do not show what refreshes and changes of data did


@pytest.fixture
def unseen(scene: Scene) -> Iterator[Scene]:
    """`updatedAt` and the size stay as they are unless somebody publishes."""
    scene.admin.set(changes_show=False)
    scene.rewind()
    yield scene
    scene.admin.set(changes_show=True)


def changed_by_others(scene: Scene) -> None:
    """They delete a row by a change of their own; its key is not among those of the next change."""
    where = {"op": "eq", "target-col": "K", "const": {"type": "integer", "v": 3}}
    delete = {"action": "delete", "target-schema": "Extract", "target-table": "Extract", "condition": where}
    item = scene.others.datasources.get_by_id(scene.place.datasource_id)
    job = scene.others.datasources.update_hyper_data(item, request_id=str(time.monotonic_ns()), actions=[delete])
    scene.others.jobs.wait_for_job(job.id, timeout=30)


def refreshed_by_others(scene: Scene) -> None:
    """Tableau itself loads the source, which has changed since."""
    job = scene.others.datasources.refresh(scene.place.datasource_id)
    scene.others.jobs.wait_for_job(job.id, timeout=30)


@pytest.mark.parametrize(
    ("scene", "others"),
    [("patch", changed_by_others), ("republish", refreshed_by_others), ("server", refreshed_by_others)],
    indirect=["scene"],
)
def test_what_others_changed_is_noticed_by_its_job_where_nothing_else_shows_it(
    unseen: Scene, others: Callable[[Scene], None]
) -> None:
    unseen.play()
    version = unseen._server_version()
    assert unseen.heal() == "none", "our own job is not taken for somebody else's"
    unseen.admin.set(clock_offset_seconds=unseen._offset() + 2)
    before = unseen.published()
    others(unseen)
    assert unseen._server_version() == version, "nothing shows it"
    unseen.place.lines.clear()
    unseen.heal()
    assert any("comparing its rows" in line for line in unseen.place.lines)
    assert unseen.published() == before == unseen.new
    assert unseen.heal() == "none"


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("scene", ["patch"], indirect=True)
def test_our_own_change_that_is_confirmed_late_is_not_taken_for_somebody_elses(
    unseen: Scene, monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    unseen.admin.set(changes_show=shown)

    def die(step: str) -> None:
        if step == "published":
            raise Died

    with monkeypatch.context() as dying:
        dying.setattr(by_patch, "crash_after", die)
        with pytest.raises(Died):
            unseen.play()
    assert unseen.heal() == "none", "confirmed late"
    assert unseen.confirmed is not None
    ended_at = max(job.ended_at for job in unseen.others.jobs.filter(title=unseen.name))
    assert unseen.confirmed.jobs_until == ended_at.isoformat()
    unseen.place.lines.clear()
    assert unseen.heal() == "none"
    assert not any("comparing its rows" in line for line in unseen.place.lines)


@pytest.mark.parametrize("scene", ["patch"], indirect=True)
def test_a_change_by_others_during_ours_is_noticed_by_its_job(unseen: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    real, once = by_patch.check_unchanged, iter([changed_by_others])

    def check(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        for change in once:
            unseen.admin.set(clock_offset_seconds=unseen._offset() + 2)
            change(unseen)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(by_patch, "check_unchanged", check)
        with pytest.raises(TirError, match="are not what they must be after this refresh"):
            unseen.play()
    unseen.heal()
    assert (unseen.published(), unseen.heal()) == (unseen.new, "none")


@pytest.mark.parametrize("scene", ["patch"], indirect=True)
def test_a_torn_change_is_not_called_nothing_and_is_repaired(unseen: Scene) -> None:
    unseen.admin.fault("torn_job", path=f"/{unseen.name}$", times=2, actions=1)
    with pytest.raises(TirError, match="whether a part of the change is there is unknown") as caught:
        unseen.play()
    assert (unclear(unseen, caught.value), "Nothing was changed" in str(caught.value)) == (None, False)
    assert unseen.published() not in (unseen.old, unseen.new)
    unseen.admin.clear_faults()
    unseen.heal()
    assert (unseen.published(), unseen.heal()) == (unseen.new, "none")


@pytest.mark.parametrize("scene", ["patch"], indirect=True)
def test_who_sees_neither_changes_nor_jobs_is_warned_that_others_are_not_noticed(unseen: Scene) -> None:
    unseen.admin.set(clock_offset_seconds=unseen._offset() + 2)
    unseen.admin.fault("status", method="GET", path="/jobs$", status=403, code="403004", times=100_000)
    unseen.play()
    (warning,) = unseen.place.refresher.warnings
    assert "are not noticed. Use an administrator's token, or set checks: {server: true}" in warning


# Servers that cannot


@pytest.mark.parametrize("version", ["2.4", "2.7", "3.0"])
def test_an_old_server_does_it_or_says_that_it_cannot(scene: Scene, version: str) -> None:
    scene.admin.set(rest_version=version)
    problem = None
    try:
        scene.play()
    except Exception as error:
        problem = unclear(scene, error)
    finally:
        scene.admin.set(rest_version=Settings().rest_version)
    assert problem is None
    assert scene.published() in (scene.old, scene.new)
