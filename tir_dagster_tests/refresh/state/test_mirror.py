"""State that is shared through an object store: each commit is one step, and only the holder of the lease can write."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.alerts.problems import AlertState
from tir_dagster.alerts.storage import AlertStorage, BusyError
from tir_dagster.changes.change_set import table_folder
from tir_dagster.errors import TirError
from tir_dagster.orchestration.io_managers import StateFolder
from tir_dagster.refresh.state.call_budget import BudgetSpentError, CallBudget
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.history import HistoryStore
from tir_dagster.refresh.state.hold import Hold, HoldFile
from tir_dagster.refresh.state.lease import LeaseHeldError, LeaseLostError, lease, lease_holder
from tir_dagster.refresh.state.mirror import Mirror, mirror_of, mount
from tir_dagster.refresh.state.objects import ConflictError, S3Store, StateStoreError
from tir_dagster.refresh.state.versions import Version, VersionStore
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster.tableau.calls import Budget
from tir_dagster_tests.alerts.reports import failed
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.refresh.state.staged import a_change_set, staged
from tir_dagster_tests.refresh.state.workers import Bucket

NOW = datetime(2026, 11, 18, tzinfo=UTC)
# Each write of the state that others see, in the bucket.
STATE = {"method": "PUT", "path": r"state\.json"}


@dataclass(frozen=True)
class Worker:
    """A disk of its own, and what is on it of the extract `orders`."""

    home: Path

    @property
    def folder(self) -> Path:
        return self.home / "extracts" / "orders"

    @property
    def change_sets(self) -> ChangeSetStore:
        return ChangeSetStore(self.folder / "change_sets")

    @property
    def versions(self) -> VersionStore:
        return VersionStore(self.folder / "versions")

    @property
    def history(self) -> HistoryStore:
        return HistoryStore(self.folder / "history")

    @property
    def hold(self) -> HoldFile:
        return HoldFile(self.folder)

    @property
    def alerts(self) -> AlertStorage:
        return AlertStorage(self.home / "alerts")

    def lease(self, **more: Any) -> Any:
        return lease(self.folder / "lease.json", purpose="a test", **more)

    def make_version(self, content: str) -> Version:
        workspace = self.versions.begin()
        workspace.extract.write_text(content)
        (workspace.folder / "shell.tdsx").write_text("shell")
        return self.versions.commit(workspace, {"content": content, "source_version": "now"})


@dataclass(frozen=True)
class Shared:
    """Two workers, and the bucket between them."""

    address: str
    first: Worker
    second: Worker
    bucket: Bucket
    store: S3Store

    def third(self, home: Path) -> Worker:
        mount(home, self.address)
        return Worker(home)

    def state(self) -> dict[str, Any]:
        stored = self.store.get("extracts/orders/state.json")
        assert stored is not None
        value: dict[str, Any] = json.loads(stored.body)
        return value

    def files(self) -> set[str]:
        return {key.rpartition("-")[2] for key in self.store.keys("extracts/orders/files/")}


@pytest.fixture
def shared(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    for name, value in sandbox.env.items():
        monkeypatch.setenv(name, value)
    address, bucket = f"s3://landing/state/{tmp_path.name}", Bucket(sandbox)
    workers = [Worker(tmp_path / name) for name in ("first", "second")]
    for worker in workers:
        mount(worker.home, address)
    yield Shared(address, workers[0], workers[1], bucket, S3Store(address))
    bucket.calm()


def test_what_one_worker_commits_the_other_one_goes_on_with(shared: Shared):
    with shared.first.lease():
        staged(shared.first.change_sets, "c1", "keys of the change")
        shared.first.make_version("one")
    with shared.second.lease():
        assert [change_set.id for change_set in shared.second.change_sets.pending()] == ["c1"]
        assert (shared.second.change_sets.path("c1") / "keys" / "part-0").read_text() == "keys of the change"
        version = shared.second.versions.get("v00000001")
        assert not (version.folder / "extract.hyper").exists(), "fetched when it is needed, not before"
        assert (version.extract.read_text(), version.shell.read_text()) == ("one", "shell")
        shared.second.change_sets.settle(("c1",))
        assert shared.second.make_version("two").id == "v00000002"
        assert shared.second.versions.prune(1) == ["v00000001"]
    with shared.first.lease():
        assert shared.first.change_sets.pending() == ()
        assert [version.extract.read_text() for version in shared.first.versions.versions()] == ["two"]
        assert not (shared.first.folder / "versions" / "v00000001").exists()
    assert shared.files() == {"extract.hyper", "shell.tdsx"}, "what is not needed any more is not kept"


def test_the_files_of_a_table_are_shared_whatever_its_name(shared: Shared):
    names = ("plan", "leases", "work")
    with shared.first.lease(), shared.first.change_sets.staging("c1") as folder:
        for name in names:
            keys = table_folder(folder, name) / "keys"
            keys.mkdir(parents=True)
            (keys / "part-0.parquet").write_text(name)
        shared.first.change_sets.commit(a_change_set("c1"), folder)
    with shared.second.lease():
        (_,) = shared.second.change_sets.pending()
        for name in names:
            assert [file.read_text() for file in shared.second.change_sets.keys("c1", name)] == [name]


def test_what_was_replaced_is_uploaded_once_and_pruned_by_its_age(shared: Shared, tmp_path: Path):
    shared.bucket.calls()
    with shared.first.lease():
        staged(shared.first.change_sets, "c1", "keys")
        uploads = [
            call for call in shared.bucket.calls() if call["method"] == "PUT" and call["path"].endswith("part-0")
        ]
        assert len(uploads) == 1
        for number in (1, 2):
            version = shared.first.make_version(str(number))
            folder = shared.first.change_sets.path("c1")
            shared.first.history.add(version, folder, None, now=NOW + timedelta(days=number))
        shared.first.change_sets.settle(("c1",))
    other = shared.third(tmp_path / "third")
    assert [entry.version for entry in other.history.entries()] == ["v00000002", "v00000001"]
    with other.lease():
        other.history.prune(days=1, now=NOW + timedelta(days=2, hours=1))
    assert [entry.version for entry in shared.second.history.entries()] == ["v00000002"]


def test_who_only_reads_copies_only_small_files(shared: Shared):
    with shared.first.lease():
        staged(shared.first.change_sets, "c1", "keys")
        shared.first.hold.put(Hold("today", "me", "a test"))
        holder = lease_holder(shared.second.folder / "lease.json")
        assert holder is not None
        assert holder.purpose == "a test"
        shared.bucket.calls()
        assert len(shared.second.change_sets.pending()) == 1
        assert shared.second.hold.read() == Hold("today", "me", "a test")
        assert [call["method"] for call in shared.bucket.calls()] == ["GET"]
    assert lease_holder(shared.second.folder / "lease.json") is None


def test_one_at_a_time(shared: Shared):
    with shared.first.lease(), pytest.raises(LeaseHeldError, match=r"^orders: process \d+ on .* \(a test, since"):
        shared.second.lease().__enter__()
    with shared.second.lease():
        pass


def test_of_many_who_take_the_lease_at_once_one_gets_it(shared: Shared, tmp_path: Path):
    start, got = threading.Barrier(8), []

    def try_it(number: int) -> None:
        mine = mirror_of(shared.third(tmp_path / f"w{number}").folder)
        assert mine is not None
        start.wait()
        if mine.take({"id": str(number)}, lambda *_: True) is None:
            got.append(number)

    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    assert shared.state()["holder"] == {"id": str(got[0])}


def test_the_store_lets_one_of_many_create_and_one_of_many_replace(shared: Shared):
    for turn in range(3):
        stored = shared.store.get("raced")
        done, etag = [], stored.etag if stored else None

        def write(number: int, etag: str | None = etag, done: list[int] = done, turn: int = turn) -> None:
            # A content of its own: objects with the same content have the same tag.
            body = f"{turn} {number}".encode()
            try:
                shared.store.put("raced", body, etag=etag)
            except ConflictError:
                return
            done.append(number)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 1


def test_whoever_lost_the_lease_cannot_write_any_more(shared: Shared):
    with shared.first.lease() as mine:
        staged(shared.first.change_sets, "c1", "keys")
        shared.bucket.clock_ahead(60)
        with shared.second.lease():
            shared.bucket.clock_ahead(0)
            before, files = shared.state(), shared.files()
            for write in (
                lambda: shared.first.make_version("late"),
                lambda: staged(shared.first.change_sets, "c2", "late"),
                lambda: shared.first.change_sets.settle(("c1",)),
            ):
                with pytest.raises(LeaseLostError, match=r"somebody else has the lease in s3://landing/"):
                    write()
            with pytest.raises(LeaseLostError, match=r"and process \d+ on .* has taken over"):
                mine.check()
            assert (shared.state(), shared.files()) == (before, files)
            assert [change_set.id for change_set in shared.second.change_sets.pending()] == ["c1"]
    with pytest.raises(LeaseLostError, match="the lease has ended"):
        shared.first.make_version("after the end")


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "status": 503, "times": 2, **STATE},
        {"kind": "status", "status": 409, "times": 2, **STATE},
        {"kind": "status", "status": 500, "method": "PUT", "path": "/files/"},
        {"kind": "cut", "when": "before", "times": 2, **STATE},
        {"kind": "cut", "when": "after", **STATE},
        {"kind": "cut", "when": "during", "method": "GET", "path": r"state\.json"},
        {"kind": "delay", "seconds": 0.5, **STATE},
    ],
    ids=lambda fault: f"{fault['kind']} {fault.get('status', fault.get('when', ''))} {fault.get('path')}",
)
def test_a_store_that_fails_in_the_middle_of_a_commit_is_asked_again(shared: Shared, fault: dict[str, Any]):
    with shared.first.lease():
        shared.bucket.fail(fault)
        shared.first.make_version("one")
        shared.bucket.calm()
    with shared.second.lease():
        assert [version.extract.read_text() for version in shared.second.versions.versions()] == ["one"]
    assert shared.files() == {"extract.hyper", "shell.tdsx"}


def test_a_store_that_goes_on_failing_is_an_error_and_nothing_is_lost(shared: Shared):
    with shared.first.lease():
        shared.first.make_version("one")
    with shared.first.lease():
        shared.bucket.fail({"kind": "status", "status": 403, "times": 50, **STATE})
        with pytest.raises(StateStoreError, match=r"extracts/orders/state\.json\): access is denied\. Check"):
            shared.first.make_version("two")
        shared.bucket.calm()
    assert len(shared.files() & {"extract.hyper"}) == 1
    assert len(shared.store.keys("extracts/orders/files/")) > 2, "what was uploaded before is still there"
    with shared.second.lease():
        assert [version.extract.read_text() for version in shared.second.versions.versions()] == ["one"]
    assert len(shared.store.keys("extracts/orders/files/")) == 2, "and was removed by the next holder of the lease"


def test_a_lost_or_cut_object_is_a_lost_version_and_never_a_guess(shared: Shared):
    with shared.first.lease():
        for content in ("one", "two"):
            shared.first.make_version(content)
    files = {name: file for name, (file, _) in shared.state()["files"].items()}
    shared.store.delete([f"extracts/orders/{files['versions/v00000001/extract.hyper']}"])
    cut = f"extracts/orders/{files['versions/v00000002/extract.hyper']}"
    stored = shared.store.get(cut)
    assert stored is not None
    shared.store.put(cut, b"t", etag=stored.etag)
    with shared.second.lease():
        assert [shared.second.versions.find(f"v0000000{number}") for number in (1, 2)] == [None, None]
        for version in shared.second.versions.versions():
            with pytest.raises(StateStoreError, match=r"is gone or cut there\. Nothing was guessed"):
                _ = version.extract


def test_what_is_on_the_disk_when_a_store_is_first_used_goes_there(shared: Shared, tmp_path: Path):
    old = Worker(tmp_path / "old")
    old.make_version("one")
    staged(old.change_sets, "c1", "keys")
    old.hold.put(Hold("today", "me", "a test"))
    old.history.add(old.versions.get("v00000001"), old.change_sets.path("c1"), None, now=NOW)
    (old.folder / "work").mkdir()
    (old.folder / "work" / "scratch.json").write_text("{}")
    mount(old.home, shared.address)
    assert old.hold.release(), "without the lease"
    with shared.second.lease():
        assert shared.second.hold.read() is None
        assert [change_set.id for change_set in shared.second.change_sets.pending()] == ["c1"]
        assert shared.second.versions.get("v00000001").extract.read_text() == "one"
        assert [entry.version for entry in shared.second.history.entries()] == ["v00000001"]
        assert not (shared.second.folder / "work").exists()


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match"])
def test_a_store_that_ignores_conditions_is_refused(shared: Shared, tmp_path: Path, ignored: str):
    class Careless(S3Store):
        def put(self, key: str, body: bytes, *, etag: str | None) -> str:
            if (etag is None) is (ignored == "If-None-Match"):
                there = self.get(key)
                etag = there.etag if there else None
            return super().put(key, body, etag=etag)

    mine = Mirror(Careless(shared.address), "extracts/orders", tmp_path)
    assert mine.take({"id": "me"}, lambda *_: True) is None
    with pytest.raises(
        StateStoreError, match=rf"ignores the conditions of writes \({ignored}\).* Nothing was published"
    ):
        mine.begin()


def test_what_others_write_does_not_keep_a_dead_holder_alive(shared: Shared):
    def is_alive(_: Any, age: float) -> bool:
        return age < 30

    dead, next_one = mirror_of(shared.first.folder), mirror_of(shared.second.folder)
    assert dead is not None
    assert next_one is not None
    assert dead.take({"id": "dead"}, is_alive) is None
    dead.begin()
    # From now on each object seems to be this old when it is read.
    shared.bucket.clock_ahead(20)
    assert next_one.take({"id": "next"}, is_alive) == {"id": "dead"}
    for _ in range(2):
        shared.second.hold.put(Hold("today", "me", "a test"))
    assert next_one.take({"id": "next"}, is_alive) is None


def test_what_a_write_with_a_lost_answer_has_listed_stays_for_the_next_holder(shared: Shared, tmp_path: Path):
    class Losing(S3Store):
        then: Any = None

        def put(self, key: str, body: bytes, *, etag: str | None) -> str:
            tag = super().put(key, body, etag=etag)
            if self.then is not None and key.endswith("state.json"):
                then, self.then = self.then, None
                then()
                raise ConflictError(key)
            return tag

    store, folder = Losing(shared.address), tmp_path / "mine"
    mine, other = Mirror(store, "extracts/orders", folder), mirror_of(shared.second.folder)
    assert other is not None
    assert mine.take({"id": "mine"}, lambda *_: True) is None
    mine.begin()
    version = folder / "versions" / "v00000001"
    version.mkdir(parents=True)
    (version / "extract.hyper").write_text("rows")
    store.then = lambda: other.take({"id": "other"}, lambda *_: False)
    with pytest.raises(LeaseLostError):
        mine.push(version)
    listed = [file for file, _ in shared.state()["files"].values()]
    assert len(listed) == 1
    assert shared.store.size(f"extracts/orders/{listed[0]}") == len("rows")


def test_a_hold_is_released_while_another_worker_has_the_lease(shared: Shared):
    with shared.first.lease() as held:
        shared.first.hold.put(Hold("today", "me", "a test"))
        assert shared.second.hold.release()
        held.check()
        shared.first.make_version("one")
    assert shared.second.hold.read() is None


def test_an_unreadable_state_is_an_error_that_says_what_to_do(shared: Shared):
    shared.store.put("extracts/orders/state.json", b"{", etag=None)
    with pytest.raises(StateStoreError, match=r"state\.json cannot be read\. Nothing was touched\. Restore"):
        shared.first.lease().__enter__()


@pytest.mark.parametrize(
    "address", ["", "bucket", "s3://", "file:///tmp/state", "s3://user:secret@bucket/x", "s3://bucket/x?versionId=1"]
)
def test_an_address_that_is_none_is_refused_without_being_shown(tmp_path: Path, address: str):
    with pytest.raises(TirError, match="Set it to something like s3://bucket/prefix") as refused:
        mount(tmp_path, address)
    assert "secret" not in str(refused.value)


def test_the_resource_of_dagster_reads_what_another_worker_wrote(shared: Shared, tmp_path: Path):
    with shared.first.lease():
        shared.first.hold.put(Hold("today", "me", "a test"))
    state = StateFolder(path=str(tmp_path / "sensor"), address=shared.address)
    assert state.hold("orders").read() == Hold("today", "me", "a test")


# Alerts and counted calls


def test_an_open_problem_with_its_ids_and_left_reports_are_known_to_all_workers(shared: Shared):
    before = AlertState()
    with shared.first.alerts.locked(5):
        shared.first.alerts.save(before, AlertState(handled=("run-1",)))
        with pytest.raises(BusyError), shared.second.alerts.locked(0.1):
            pass
    shared.second.alerts.leave(failed("run-2"), slot="orders/sensor")
    with shared.first.alerts.locked(5):
        (left,) = shared.first.alerts.left_reports(["orders"]).values()
        # Meanwhile the slot gets a newer report.
        shared.second.alerts.leave(failed("run-3"), slot="orders/sensor")
        shared.first.alerts.drop_report("orders/sensor", left.id)
    with shared.second.alerts.locked(5):
        assert shared.second.alerts.load().handled == ("run-1",)
        (newer,) = shared.second.alerts.left_reports(["orders"]).values()
        assert newer.id != left.id
        shared.second.alerts.drop_report("orders/sensor", newer.id)
    with shared.first.alerts.locked(5):
        assert shared.first.alerts.left_reports(["orders"]) == {}


def test_calls_that_a_site_limits_are_counted_for_all_workers(shared: Shared):
    access = TableauAccess("https://10ax.online.tableau.com", "s", TableauToken("t", "s"), publishes_per_hour=2)
    needs = {Budget.PUBLISHES: 1}
    for worker in (shared.first, shared.second):
        calls = CallBudget(worker.home, access, "orders", now=lambda: 1000.0)
        with calls.reserved(needs):
            calls.count(Budget.PUBLISHES)
    with (
        pytest.raises(BudgetSpentError, match=r"2 are used \(orders 2\)"),
        CallBudget(shared.first.home, access, "orders", now=lambda: 1000.0).reserved(needs),
    ):
        pass
