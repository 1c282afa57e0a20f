"""Publishing: what others did is never overwritten, and a lost answer never leads to a blind second try."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import Connection, CreateMode

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau import publishing, transfer
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import server_version
from tir_dagster.tableau.jobs import JobFailedError
from tir_dagster.tableau.outcome import ForeignPublishError, PublishUnknownError
from tir_dagster.tableau.publishing import ByJob, publish
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.tableau.conftest import OTHERS_PACKAGE, Naps, Orders
from tir_dagster_tests.tableau.helpers import PASSING

PUBLISH = {"method": "POST", "path": "/datasources$"}


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every file in pieces of 1 kB."""
    monkeypatch.setenv("TSC_FILESIZE_LIMIT_MB", "0")
    monkeypatch.setattr(transfer, "BYTES_PER_MB", 1024)
    monkeypatch.setenv("TSC_CHUNK_SIZE_MB", "1")


@pytest.fixture(params=["whole", "in pieces"])
def either_way(request: pytest.FixtureRequest) -> str:
    if request.param == "in pieces":
        request.getfixturevalue("in_pieces")
    return str(request.param)


def test_a_new_datasource_is_created_with_its_credentials(orders: Orders, either_way: str) -> None:
    found = orders.create(connections=[orders.credential])
    assert (found.revision, found.connections[0].embed_password) == (1, True)
    assert orders.holds_ours()


class Late(TableauClient):
    """A server whose list of datasources shows a publish only when it is asked for the second time."""

    hidden = False

    def call(self, action: Any, *, doing: str, repeat: bool = True) -> Any:
        answer = super().call(action, doing=doing, repeat=repeat)
        self.hidden, was_hidden = doing.startswith("publish "), self.hidden
        return [] if was_hidden else answer


def test_a_datasource_that_is_listed_a_moment_later_is_waited_for(orders: Orders, package: Path) -> None:
    with Late(orders.client.access, retry=orders.client.retry) as client:
        assert publish(client, package, project=orders.project, name="Orders").revision == 1


def test_an_overwrite_keeps_the_id_and_adds_a_revision(orders: Orders, either_way: str) -> None:
    created = orders.create()
    orders.publish_by_others()
    found = orders.overwrite(expected=server_version(orders.now()))
    assert (found.id, found.revision) == (created.id, 3)
    assert orders.holds_ours()


class Proxied(TableauClient):
    """A proxy answers some of the calls with a page of its own."""

    page = b"<html><head/><body>Please sign in</body></html>"

    def call(self, action: Any, *, doing: str, repeat: bool = True) -> Any:
        def answered_by_the_proxy(server: Any) -> Any:
            real = server.datasources.post_request
            server.datasources.post_request = lambda *_, **__: SimpleNamespace(content=self.page)
            try:
                return action(server)
            finally:
                server.datasources.post_request = real

        return super().call(
            answered_by_the_proxy if doing.startswith("publish ") else action, doing=doing, repeat=repeat
        )


@pytest.mark.parametrize("page", [Proxied.page, b"no XML at all"])
def test_the_page_of_a_proxy_is_not_taken_for_a_publish(
    orders: Orders, package: Path, either_way: str, page: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = orders.create()
    monkeypatch.setattr(Proxied, "page", page)
    with (
        Proxied(orders.client.access, retry=orders.client.retry) as client,
        pytest.raises(DatasourceError, match=r"the answer is not Tableau's\. Check that no proxy answers"),
    ):
        publish(client, package, project=orders.project, name="Orders", overwrite=True)
    assert orders.now() == before


class Blind(TableauClient):
    """A server that takes a publish and goes on showing what was there before."""

    def call(self, action: Any, *, doing: str, repeat: bool = True) -> Any:
        return None if doing.startswith("publish ") else super().call(action, doing=doing, repeat=repeat)


def test_a_publish_that_never_shows_is_not_called_one(orders: Orders, package: Path) -> None:
    orders.create()
    with (
        Blind(orders.client.access, retry=orders.client.retry) as client,
        pytest.raises(PublishUnknownError, match=r"accepted it and still shows the old content\. Nothing is confirmed"),
    ):
        publish(client, package, project=orders.project, name="Orders", overwrite=True)


def test_an_upload_that_never_arrives_is_no_publish_of_ours(
    orders: Orders, admin: Admin, in_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job of the same user publishes meanwhile."""
    created = orders.create()
    admin.fault("cut", method="PUT", path="/fileUploads/", when="before", times=99)
    once = iter([publish_by_ourselves])
    monkeypatch.setattr(Naps, "__call__", lambda *_: [play(orders) for play in once])
    with pytest.raises(DatasourceError, match=r"upload a piece .* Nothing was published\.$"):
        orders.overwrite(expected=server_version(created))
    assert orders.now().revision == 2


def publish_by_ourselves(orders: Orders) -> None:
    """In one request, which is not in the way of pieces that are cut."""
    with pytest.MonkeyPatch.context() as whole:
        whole.setenv("TSC_FILESIZE_LIMIT_MB", "64")
        item = TSC.DatasourceItem(orders.project.id, "Orders")
        orders.client.call(
            lambda server: server.datasources.publish(item, str(orders.packages / OTHERS_PACKAGE), "Overwrite"),
            doing="publish otherwise",
        )


def test_a_password_that_is_embedded_during_the_upload_is_not_lost(orders: Orders, in_pieces: None) -> None:
    created = orders.create()

    def embed() -> None:
        item = orders.others.datasources.get_by_id(created.id)
        orders.others.datasources.populate_connections(item)
        (connection,) = item.connections
        connection.username, connection.password, connection.embed_password = "ANN", "secret", True
        orders.others.datasources.update_connection(item, connection)

    once = iter([embed])
    with pytest.raises(DatasourceError, match="would lose the password embedded"):
        orders.overwrite(expected=server_version(created), progress=lambda *_: next(once, lambda: None)())
    assert orders.now().connections[0].embed_password
    assert orders.now().revision == 1


def test_progress_is_told_piece_by_piece(orders: Orders, in_pieces: None, package: Path) -> None:
    seen: list[tuple[int, int]] = []
    orders.create(progress=lambda done, total: seen.append((done, total)))
    size = package.stat().st_size
    assert len(seen) > 2
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


def test_a_bare_extract_is_published(orders: Orders, hyper: Any, tmp_path: Path) -> None:
    file = tmp_path / "bare.hyper"
    with Connection(hyper, file, CreateMode.CREATE) as connection:
        connection.execute_command('CREATE TABLE "public"."t" AS (SELECT 7 AS "n")')
    found = publish(orders.client, file, project=orders.project, name="Bare")
    assert found.has_extracts


def test_a_datasource_that_is_there_already_is_not_overwritten_unasked(orders: Orders) -> None:
    created = orders.create()
    with pytest.raises(
        DatasourceError, match=r"a datasource of that name exists already .* Nothing was overwritten\. Run again"
    ):
        orders.create()
    assert orders.now() == created


@pytest.mark.parametrize("file", ["missing.tdsx", "orders.csv"])
def test_a_file_that_cannot_be_published_is_told(orders: Orders, tmp_path: Path, file: str) -> None:
    with pytest.raises(DatasourceError, match=r"must be a \.tdsx or \.hyper file that exists"):
        publish(orders.client, tmp_path / file, project=orders.project, name="Orders")


def test_a_broken_package_is_refused_by_the_server_and_the_datasource_stays_whole(
    orders: Orders, tmp_path: Path, either_way: str
) -> None:
    before = orders.create()
    broken = tmp_path / "broken.tdsx"
    broken.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DatasourceError, match=r"refused \(400011\), .*not a zip archive"):
        publish(orders.client, broken, project=orders.project, name="Orders", overwrite=True)
    assert orders.now() == before


@pytest.mark.parametrize("fault", PASSING)
def test_a_publish_survives_what_passes_and_happens_once(
    orders: Orders, admin: Admin, either_way: str, fault: dict[str, Any]
) -> None:
    created = orders.create()
    admin.fault(**PUBLISH, **fault)
    found = orders.overwrite(expected=server_version(created))
    assert admin.faults() == []
    assert found.revision == 2, "one publish, whether its answer was lost or not"
    assert orders.holds_ours()


@pytest.mark.parametrize("fault", [fault for fault in PASSING if fault["kind"] == "cut"])
def test_a_creation_survives_what_passes_and_happens_once(
    orders: Orders, admin: Admin, either_way: str, fault: dict[str, Any]
) -> None:
    admin.fault(**PUBLISH, **fault)
    assert orders.create().revision == 1
    assert orders.holds_ours()


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize(("method", "skip"), [("POST", 0), ("PUT", 1)])
def test_an_upload_survives_what_passes_and_arrives_whole(
    orders: Orders, admin: Admin, in_pieces: None, fault: dict[str, Any], method: str, skip: int
) -> None:
    admin.fault(method=method, path="/fileUploads", skip=skip, **fault)
    orders.create()
    assert admin.faults() == []
    assert orders.holds_ours(), "a piece that was taken before the cut must not be in the file twice"


@pytest.mark.parametrize("when", ["before", "after"])
def test_only_the_piece_that_was_cut_is_sent_again_and_only_if_the_server_lacks_it(
    orders: Orders, admin: Admin, large: Path, when: str
) -> None:
    admin.fault("cut", method="PUT", path="/fileUploads/", when=when, skip=1)
    admin.forget_calls()
    publish(orders.client, large, project=orders.project, name="Orders")
    calls = [call for call in admin.calls() if "/fileUploads" in call["path"]]
    assert sum(call["method"] == "POST" for call in calls) == 1, "one session"
    taken = [call["bytes_in"] // 2**20 for call in calls if call["method"] == "PUT" and call["status"] == 200]
    assert sum(taken) == (3 if when == "before" else 2), (
        "the second piece was taken, though nobody was told, or once more"
    )
    assert orders.content() == large.read_bytes()


def test_where_the_server_tells_nothing_a_cut_piece_starts_a_new_session(
    orders: Orders, admin: Admin, large: Path
) -> None:
    admin.fault("cut", method="PUT", path="/fileUploads/", when="after", skip=1)
    admin.fault("status", method="PUT", path="/fileUploads/", status=400, code="400000", skip=1)
    admin.forget_calls()
    publish(orders.client, large, project=orders.project, name="Orders")
    assert sum(call["route"] == "start_upload" for call in admin.calls()) == 2
    assert orders.content() == large.read_bytes()


@pytest.mark.parametrize("call", [PUBLISH, {"method": "PUT", "path": "/fileUploads/", "skip": 1}])
def test_an_upload_session_that_is_gone_is_started_over(
    orders: Orders, admin: Admin, in_pieces: None, call: dict[str, Any]
) -> None:
    admin.fault("status", **call, status=404, code="404015")
    orders.create()
    assert admin.faults() == []
    assert orders.holds_ours()


@pytest.mark.parametrize("fault", [{"kind": "status", "status": 503}, {"kind": "cut", "when": "before"}])
def test_a_publish_that_never_gets_through_fails_clearly_with_the_datasource_whole(
    orders: Orders, admin: Admin, either_way: str, fault: dict[str, Any]
) -> None:
    created = orders.create()
    admin.fault(**PUBLISH, **fault, times=99)
    with pytest.raises(DatasourceError, match=r"broke 3 times, and the server still holds what it held before"):
        orders.overwrite(expected=server_version(created))
    assert orders.now() == created


def test_a_server_that_stays_busy_is_told_and_the_datasource_stays_whole(orders: Orders, admin: Admin) -> None:
    created = orders.create()
    admin.fault("status", **PUBLISH, status=429, retry_after=9, times=99)
    with pytest.raises(DatasourceError, match="still asks for fewer calls"):
        orders.overwrite(expected=server_version(created))
    assert orders.now() == created


def test_a_publish_by_others_since_the_version_was_read_is_not_overwritten(orders: Orders, either_way: str) -> None:
    expected = server_version(orders.create())
    orders.publish_by_others()
    theirs = orders.now()
    with pytest.raises(ForeignPublishError, match=r"somebody else changed it .* Nothing was overwritten") as error:
        orders.overwrite(expected=expected)
    assert "Nothing was overwritten" in str(error.value)
    assert orders.now() == theirs


def test_a_publish_by_others_during_the_upload_is_not_overwritten(orders: Orders, in_pieces: None) -> None:
    expected = server_version(orders.create())
    once = iter([orders.publish_by_others])
    with pytest.raises(ForeignPublishError):
        orders.overwrite(expected=expected, progress=lambda *_: next(once, lambda: None)())
    assert not orders.holds_ours()
    assert orders.now().revision == 2


def test_a_publish_by_others_while_we_wait_to_try_again_is_not_overwritten(
    orders: Orders, admin: Admin, naps: Naps, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = server_version(orders.create())
    admin.fault("status", **PUBLISH, status=429, retry_after=8)
    real = Naps.__call__

    def nap(self: Naps, seconds: float) -> None:
        if seconds == 8:
            orders.publish_by_others()
        real(self, seconds)

    monkeypatch.setattr(Naps, "__call__", nap)
    with pytest.raises(ForeignPublishError):
        orders.overwrite(expected=expected)
    assert not orders.holds_ours()


def test_a_publish_by_others_after_a_cut_is_not_taken_for_ours(
    orders: Orders, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = server_version(orders.create())
    admin.fault("cut", **PUBLISH, when="after")
    real = publishing.send

    def send_then_others(*args: Any, **kwargs: Any) -> Any:
        try:
            return real(*args, **kwargs)
        finally:
            orders.publish_by_others()

    monkeypatch.setattr(publishing, "send", send_then_others)
    with pytest.raises(ForeignPublishError) as error:
        orders.overwrite(expected=expected)
    assert "Ours was published too" in str(error.value)
    assert "Compare the content" in str(error.value)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_publish_that_only_the_history_tells_of_is_told_to_be_no_more_than_that(
    orders: Orders, admin: Admin, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    expected, told = server_version(orders.create()), []
    admin.fault("cut", **PUBLISH, when=when)
    real = publishing.send

    def send_then_others(*args: Any, **kwargs: Any) -> Any:
        try:
            return real(*args, **kwargs)
        finally:
            if when == "before":
                # They sign in as the same user.
                orders.publish_by_others()

    monkeypatch.setattr(publishing, "send", send_then_others)
    orders.overwrite(expected=expected, inferred=lambda: told.append(orders.holds_ours()))
    assert told == [when == "after"]


def test_a_deleted_datasource_is_not_created_anew_unasked(orders: Orders) -> None:
    created = orders.create()
    orders.others.datasources.delete(created.id)
    with pytest.raises(ForeignPublishError, match="it is gone"):
        orders.overwrite(expected=server_version(created))


def test_without_a_history_a_lost_answer_is_not_guessed_at(orders: Orders, admin: Admin) -> None:
    admin.fault("status", path="/revisions$", status=403, code="403004", times=99)
    expected = server_version(orders.create())
    # Without revisions only the time can show a change, and that has whole seconds.
    time.sleep(1.1)
    admin.fault("cut", **PUBLISH, when="after")
    with pytest.raises(PublishUnknownError, match="Compare its content before publishing again"):
        orders.overwrite(expected=expected)


def test_embedded_credentials_without_a_replacement_stop_the_publish_before_anything_is_touched(
    orders: Orders, either_way: str
) -> None:
    created = orders.create(connections=[orders.credential])
    with pytest.raises(DatasourceError, match=r"would lose the password .* \(now named: none\)"):
        orders.overwrite(expected=server_version(created))
    assert orders.now() == created


def test_no_secret_shows_in_any_text(
    orders: Orders, admin: Admin, either_way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    created = orders.create(connections=[orders.credential])
    admin.fault("status", **PUBLISH, status=503, times=99)
    with pytest.raises(DatasourceError) as error:
        orders.overwrite(connections=[orders.credential], expected=server_version(created))
    admin.clear_faults()
    admin.fault("status", **PUBLISH, status=403, code="403004")
    with pytest.raises(DatasourceError) as refused:
        orders.overwrite(connections=[orders.credential], expected=server_version(created))
    shown = traceback.format_exception(error.value) + traceback.format_exception(refused.value)
    texts = [*shown, repr(orders.client), repr(orders.credential), repr(created), caplog.text]
    secrets = (orders.credential.password, orders.client.access.identity.secret)  # type: ignore[union-attr]
    assert not [text for secret in secrets for text in texts if secret in text]


# By a job of the server


@dataclass
class Jobs:
    """Publish everything by a job; the ids that the server gave."""

    timeout: float = 30.0
    taken: list[str] = field(default_factory=list)

    @property
    def always(self) -> ByJob:
        return ByJob(0, self.timeout, self.taken.append)


@pytest.fixture
def jobs(admin: Admin) -> Jobs:
    admin.set(job_seconds=0.05)
    return Jobs()


def test_only_a_large_package_is_published_by_a_job(orders: Orders, package: Path, jobs: Jobs) -> None:
    size = package.stat().st_size
    orders.create(by_job=ByJob(size + 1, 30.0, jobs.taken.append))
    assert jobs.taken == []
    assert orders.overwrite(by_job=ByJob(size, 30.0, jobs.taken.append)).revision == 2
    assert [orders.others.jobs.get_by_id(job).type for job in jobs.taken] == ["PublishDatasource"]
    assert orders.holds_ours()


def test_a_new_datasource_is_created_by_a_job(orders: Orders, either_way: str, jobs: Jobs) -> None:
    found = orders.create(connections=[orders.credential], by_job=jobs.always)
    assert (found.revision, found.connections[0].embed_password, len(jobs.taken)) == (1, True, 1)


def test_a_server_that_knows_no_such_jobs_publishes_at_once(orders: Orders, admin: Admin, jobs: Jobs) -> None:
    admin.set(rest_version="2.8")
    access = replace(orders.client.access)
    with TableauClient(access, retry=orders.client.retry) as client:
        package = orders.packages / "ours.tdsx"
        publish(client, package, project=orders.project, name="Orders", by_job=jobs.always)
    assert jobs.taken == []


@pytest.mark.parametrize("fault", PASSING)
def test_a_publish_by_a_job_survives_what_passes_and_happens_once(
    orders: Orders, admin: Admin, jobs: Jobs, fault: dict[str, Any]
) -> None:
    created = orders.create()
    admin.fault("slow_job", path="/Orders$", seconds=0.5)
    admin.fault(**PUBLISH, **fault)
    assert orders.overwrite(expected=server_version(created), by_job=jobs.always).revision == 2
    assert admin.faults() == []
    assert (orders.holds_ours(), orders.now().revision) == (True, 2)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_answer_is_not_sent_again_by_who_may_not_see_whether_a_job_runs(
    orders: Orders, admin: Admin, jobs: Jobs, when: str
) -> None:
    created = orders.create()
    admin.forget_calls()
    admin.fault("slow_job", path="/Orders$", seconds=2)
    admin.fault("cut", **PUBLISH, when=when)
    admin.fault("status", method="GET", path="/jobs$", status=403, code="403004", times=99)
    with pytest.raises(PublishUnknownError, match=r"may yet publish the new one\. Nothing is confirmed"):
        orders.overwrite(expected=server_version(created), by_job=jobs.always)
    assert sum(call["method"] == "POST" and call["path"].endswith("/datasources") for call in admin.calls()) == 1


def test_a_job_that_nobody_named_is_waited_for_and_not_taken_for_ours(orders: Orders, admin: Admin, jobs: Jobs) -> None:
    created, asked = orders.create(), []
    admin.fault("slow_job", path="/Orders$", seconds=0.5)
    admin.fault("cut", **PUBLISH, when="after")
    ours = replace(jobs.always, asked=lambda: asked.append(orders.now().revision))
    assert orders.overwrite(expected=server_version(created), by_job=ours).revision == 2
    assert (asked, jobs.taken) == ([1], [])


def test_a_job_that_fails_is_told_and_nothing_is_published(orders: Orders, admin: Admin, jobs: Jobs) -> None:
    created = orders.create()
    admin.fault("fail_job", path="/Orders$")
    with pytest.raises(JobFailedError, match=r"gives no reason over REST\. .* Nothing was published\.$"):
        orders.overwrite(expected=server_version(created), by_job=jobs.always)
    assert orders.now() == created


def test_a_job_that_vanished_is_looked_for_in_the_revisions(orders: Orders, admin: Admin, jobs: Jobs) -> None:
    created, inferred = orders.create(), []
    admin.fault("vanish_job", path="/jobs/")
    # The job has ended when it is first looked at, and is forgotten.
    by_job = ByJob(0, jobs.timeout, lambda _: wait_for(lambda: orders.now().revision == 2, "the publish"))
    found = orders.overwrite(expected=server_version(created), by_job=by_job, inferred=lambda: inferred.append(True))
    assert (found.revision, inferred) == (2, [True])


def test_a_job_that_vanished_before_anything_shows_is_not_sent_again(orders: Orders, admin: Admin, jobs: Jobs) -> None:
    created = orders.create()
    admin.fault("slow_job", path="/Orders$", seconds=3)
    admin.fault("vanish_job", path="/jobs/", code="400031")
    with pytest.raises(PublishUnknownError, match=r"no longer knows job .* may yet publish the new one"):
        orders.overwrite(expected=server_version(created), by_job=jobs.always)
    assert orders.now() == created


def test_a_publish_by_others_while_our_job_waits_is_noticed(orders: Orders, admin: Admin, jobs: Jobs) -> None:
    created = orders.create()
    admin.fault("slow_job", path="/Orders$", seconds=1)
    ours = ByJob(0, 30.0, lambda _: orders.publish_by_others())
    with pytest.raises(ForeignPublishError, match="Ours was published too"):
        orders.overwrite(expected=server_version(created), by_job=ours)
    assert orders.now().revision == 3
