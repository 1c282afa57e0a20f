"""Changing the data of a live-to-Hyper datasource: what a client sends, what it is answered, what readers see."""

from __future__ import annotations

import uuid
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import Connection
from tableauserverclient.server.endpoint.exceptions import ServerResponseError

from tir_dagster.sandbox.tableau.document import Document
from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import OVERWRITE, Admin, Looker, Publisher, Source
from tir_dagster_tests.sandbox.tableau.live import BY_KEY, K, LiveData, action, hyper_file, succeeded

EUROPE = {"op": "eq", "target-col": "V", "const": {"type": "string", "v": "b"}}


@pytest.fixture
def live(publisher: Publisher, look: Looker, admin: Admin) -> LiveData:
    admin.set(change_notes=True)
    return LiveData.publish(publisher, look, [(1, "a"), (2, "b"), (None, "n")])


def test_a_batch_changes_the_data_and_the_job_says_how(live: LiveData) -> None:
    job = live.change(action("upsert", BY_KEY), payload=live.payload([(2, "x"), (9, "y")]))
    assert (job.type, succeeded(job), job.notes) == ("UpdateUploadedFile", True, ["1 rows updated, 1 rows inserted"])
    assert live.rows() == [[1, "a"], [2, "x"], [9, "y"], [None, "n"]]


def test_rows_are_deleted_by_the_keys_of_a_payload_or_by_a_constant(live: LiveData) -> None:
    live.change(action("delete", BY_KEY), payload=live.payload([(1,), (None,), (7,)], [K]))
    assert live.rows() == [[2, "b"], [None, "n"]]
    job = live.change(action("delete", EUROPE, source=False))
    assert (live.rows(), job.notes) == ([[None, "n"]], ["1 rows deleted"])


def test_the_one_connection_can_be_named(live: LiveData) -> None:
    live.endpoint.populate_connections(live.datasource)
    (connection,) = live.datasource.connections
    assert succeeded(live.change(action("delete", EUROPE, source=False), item=connection))
    assert live.rows() == [[1, "a"], [None, "n"]]
    connection._id = str(uuid.uuid4())
    with pytest.raises(ServerResponseError, match="404004"):
        live.send(action("delete", EUROPE, source=False), item=connection)


def test_a_changed_datasource_has_a_later_update_and_no_new_revision(live: LiveData, admin: Admin) -> None:
    before = live.endpoint.get_by_id(live.datasource.id)
    admin.set(clock_offset_seconds=100)
    live.change(action("delete", EUROPE, source=False))
    after = live.endpoint.get_by_id(live.datasource.id)
    assert after.updated_at > before.updated_at
    live.endpoint.populate_revisions(after)
    assert [entry.revision_number for entry in after.revisions] == ["1"]


def test_a_batch_that_cannot_be_carried_out_fails_with_a_reason_and_changes_nothing(live: LiveData) -> None:
    wrong = action("insert", **{"target-table": "Other"})
    job = live.change(action("delete", EUROPE, source=False), wrong, payload=live.payload([(5, "e")]))
    assert not succeeded(job)
    assert job.notes[0].startswith("Action 2 (insert) failed: ")
    assert "does not exist: Extract.Other. (errorCode=410012)" in job.notes[0]
    assert len(live.rows()) == 3


def test_a_payload_that_is_no_hyper_file_fails_the_job(live: LiveData) -> None:
    file = live.publisher.folder / "payload.hyper"
    file.write_bytes(b"nothing")
    job = live.change(action("insert"), payload=str(file))
    assert (succeeded(job), job.notes[0][:29]) == (False, "The data could not be changed")
    assert "no payload" in live.change(action("insert")).notes[0]


def test_the_same_request_runs_once(live: LiveData, admin: Admin) -> None:
    request_id, payload = str(uuid.uuid4()), live.payload([(5, "e")])
    jobs = [live.send(action("insert"), request_id=request_id, payload=payload) for _ in range(2)]
    live.publisher.finished(jobs[0].id)
    jobs.append(live.send(action("insert"), request_id=request_id, payload=payload))
    assert len({job.id for job in jobs}) == 1
    assert [row for row in live.rows() if row[0] == 5] == [[5, "e"]]
    with pytest.raises(ServerResponseError, match="409006"):
        live.send(action("replace"), request_id=request_id, payload=payload)
    admin.set(clock_offset_seconds=25 * 3600)
    later = live.send(action("insert"), request_id=request_id, payload=payload)
    assert later.id != jobs[0].id


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_request_whose_answer_was_lost_is_repeated_safely(live: LiveData, admin: Admin, cut: str) -> None:
    request_id, payload = str(uuid.uuid4()), live.payload([(5, "e")])
    admin.fault("cut", method="PATCH", when=cut)
    with pytest.raises(requests.ConnectionError):
        live.send(action("insert"), request_id=request_id, payload=payload)
    live.publisher.finished(live.send(action("insert"), request_id=request_id, payload=payload).id)
    assert [row for row in live.rows() if row[0] == 5] == [[5, "e"]]


def test_only_live_to_hyper_data_can_be_changed(publisher: Publisher, source: Source, look: Looker) -> None:
    extract = publisher.publish(source.package(Column("K", "NUMBER(38,0)")))
    with pytest.raises(ServerResponseError, match=r"(?s)400000.*no live-to-Hyper connection"):
        LiveData(publisher, look, extract).send(action("delete", EUROPE, source=False))
    with pytest.raises(ServerResponseError, match=r"(?s)400000.*no live-to-Hyper connection"):
        LiveData(publisher, look, publisher.publish_live("Table")).send(action("delete", EUROPE, source=False))


def test_a_batch_that_waits_is_refused_by_what_was_published_meanwhile(
    live: LiveData, source: Source, admin: Admin
) -> None:
    admin.fault("slow_job", path=live.datasource.id, seconds=60)
    first = live.send(action("delete", EUROPE, source=False))
    # Cancelled before it began, it would leave the slowness to the second.
    live.publisher.begun(first.id)
    second = live.send(action("delete", EUROPE, source=False))
    live.publisher.publish(source.package(Column("K", "NUMBER(38,0)")), "Live", OVERWRITE)
    live.publisher.server.jobs.cancel(first.id)
    assert "no live-to-Hyper connection" in live.publisher.finished(second.id).notes[0]


def test_what_is_too_large_is_refused(live: LiveData, admin: Admin) -> None:
    payload = live.payload([(5, "e")])
    admin.set(max_payload_mb=0)
    with pytest.raises(ServerResponseError, match="413000"):
        live.send(action("insert"), payload=payload)
    admin.set(max_payload_mb=100, storage_quota_mb=0.001)
    with pytest.raises(ServerResponseError, match=r"(?s)403004.*quota"):
        live.send(action("insert"), payload=payload)
    with pytest.raises(ServerResponseError, match=r"(?s)403004.*quota"):
        live.publisher.publish(Path(payload), "Another")
    assert len(live.rows()) == 3


def test_who_may_only_look_cannot_change_data(live: LiveData, sandbox: Sandbox) -> None:
    with (
        sandbox.tableau(user=sandbox.identity.reader_user) as server,
        pytest.raises(ServerResponseError, match="403004"),
    ):
        server.datasources.update_hyper_data(
            live.datasource, request_id="r", actions=[action("delete", EUROPE, source=False)]
        )


def test_a_malformed_request_is_refused_at_once(live: LiveData) -> None:
    server = live.publisher.server
    url = f"{live.endpoint.baseurl}/{live.datasource.id}/data"
    headers = {"x-tableau-auth": server.auth_token, "content-type": "application/json"}

    def answer(body: str, **more: str) -> str:
        return requests.patch(url, data=body, headers={**headers, **more}, timeout=30).text

    good = '{"actions": [{"action": "insert"}]}'
    assert "RequestID is missing" in answer(good)
    for body in ("", "[]", "{}", '{"actions": []}', '{"actions": [1]}', "[" * 100_000):
        assert 'code="400000"' in answer(body, requestid="r"), body[:20]
    assert (
        'code="404015"'
        in requests.patch(
            f"{url}?uploadSessionId=1:2-3:0", data=good, headers={**headers, "requestid": "r"}, timeout=30
        ).text
    )


def test_an_older_server_does_not_know_the_call(live: LiveData) -> None:
    server = live.publisher.server
    url = f"{live.endpoint.baseurl}/{live.datasource.id}/data".replace("/api/3.26/", "/api/3.12/")
    headers = {"x-tableau-auth": server.auth_token, "requestid": "r"}
    answer = requests.patch(url, json={"actions": [action("insert")]}, headers=headers, timeout=30)
    assert 'code="404950"' in answer.text


def test_readers_see_all_of_a_batch_or_nothing(live: LiveData, admin: Admin) -> None:
    admin.fault("slow_job", path=live.datasource.id, seconds=0.3)
    job = live.send(action("delete", BY_KEY, **{"source-table": "Keys"}), action("insert"), payload=both(live))
    seen = []

    def over() -> bool:
        seen.append(live.rows())
        return live.publisher.server.jobs.get_by_id(job.id).completed_at is not None

    wait_for(over, "the job to end")
    old, new = [[1, "a"], [2, "b"], [None, "n"]], [[1, "z"], [2, "b"], [None, "n"]]
    assert seen[0] == old
    assert live.rows() == new
    assert all(rows in (old, new) for rows in seen)


def both(live: LiveData) -> str:
    """A payload with a table of keys and a table of rows."""
    path = hyper_file(live.look.hyper, Path(live.payload([(1, "z")])), [(1, "z")])
    with Connection(live.look.hyper, path) as connection:
        connection.execute_command('CREATE TABLE "Extract"."Keys" AS (SELECT "K" FROM "Extract"."Extract")')
    return str(path)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"actions": 0}, [[1, "a"], [2, "b"], [None, "n"]]),
        ({"actions": 1}, [[2, "b"], [None, "n"]]),
        ({"actions": 1, "half": True}, [[2, "b"], [7, "q"], [None, "n"]]),
    ],
    ids=["nothing", "one action", "one action and a half"],
)
def test_a_torn_batch_leaves_its_first_part_and_a_failed_job(
    live: LiveData, admin: Admin, fault: Any, expected: Any
) -> None:
    admin.fault("torn_job", path=live.datasource.id, notes="The backgrounder died.", **fault)
    gone = {"op": "eq", "target-col": "K", "const": {"type": "integer", "v": 1}}
    job = live.change(
        action("delete", gone, source=False), action("insert"), payload=live.payload([(7, "q"), (7, "q")])
    )
    assert (succeeded(job), job.notes) == (False, ["The backgrounder died."])
    assert live.rows() == expected


def test_a_late_job_has_changed_the_data_before_it_says_so(live: LiveData, admin: Admin) -> None:
    admin.fault("late_job", path=live.datasource.id, seconds=600)
    job = live.send(action("delete", EUROPE, source=False))
    wait_for(lambda: live.rows() == [[1, "a"], [None, "n"]], "the change")
    assert live.publisher.server.jobs.get_by_id(job.id).completed_at is None
    live.publisher.server.jobs.cancel(job.id)
    assert live.publisher.finished(job.id).finish_code == TSC.JobItem.FinishCode.Cancelled


def test_a_payload_is_gone_when_its_job_is_over(live: LiveData) -> None:
    incoming = live.publisher.sandbox.home.data("tableau") / "incoming"
    before = set(incoming.iterdir())
    live.change(action("insert"), payload=live.payload([(5, "e")]))
    wait_for(lambda: set(incoming.iterdir()) <= before, "the payload to go")


def test_the_list_of_jobs_names_the_change(live: LiveData) -> None:
    job = live.change(action("delete", EUROPE, source=False))
    found = {item.id: item for item in live.publisher.server.jobs.get()[0]}[job.id]
    assert (found.type, found.status) == ("update_uploaded_file", "Success")


def test_changes_publishes_and_downloads_side_by_side_all_count(live: LiveData, look: Looker) -> None:
    payloads = [live.payload([(number, "new")]) for number in range(100, 106)]

    def change(payload: str) -> Any:
        job = live.change(action("insert"), payload=payload)
        assert {tuple(row) for row in live.rows()} >= {(1, "a"), (2, "b"), (None, "n")}
        return job

    with ThreadPoolExecutor(4) as pool:
        jobs = list(pool.map(change, payloads))
    assert all(succeeded(job) for job in jobs), [job.notes for job in jobs]
    assert [row[0] for row in live.rows()] == [1, 2, *range(100, 106), None]
    with ThreadPoolExecutor(4) as pool:
        running = pool.map(change, payloads[:3])
        LiveData.publish(live.publisher, look, [(1, "a"), (2, "b"), (None, "n")])
    assert {job.notes[0].partition(" again")[0] for job in running} <= {
        "1 rows inserted",
        "The data source 'Live' was published",
    }


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "fileUploads"), ("PUT", "fileUploads"), ("PATCH", "/data"), ("GET", "/jobs/")],
    ids=["start of the upload", "piece", "batch", "question for the job"],
)
def test_a_call_that_fails_changes_nothing_and_can_be_repeated(
    live: LiveData, admin: Admin, method: str, path: str
) -> None:
    request_id, payload = str(uuid.uuid4()), live.payload([(5, "e")])
    admin.fault("status", method=method, path=path, status=403, code="403004")

    def attempt() -> Any:
        return live.publisher.finished(live.send(action("insert"), request_id=request_id, payload=payload).id)

    with pytest.raises(ServerResponseError, match="403004"):
        attempt()
    assert succeeded(attempt())
    assert [row for row in live.rows() if row[0] == 5] == [[5, "e"]]


def test_a_job_that_vanished_was_carried_out_all_the_same(live: LiveData, admin: Admin) -> None:
    admin.fault("vanish_job")
    job = live.send(action("delete", EUROPE, source=False))
    with pytest.raises(ServerResponseError, match="404031"):
        live.publisher.server.jobs.get_by_id(job.id)
    wait_for(lambda: live.rows() == [[1, "a"], [None, "n"]], "the change")


def test_a_package_is_live_to_hyper_when_its_one_connection_is_a_hyper_file_without_an_extract(live: LiveData) -> None:
    """What the server made of a .hyper file can be published again as a package, and changed still."""
    package = live.publisher.download(live.datasource)
    live.publisher.publish(package, "Live", OVERWRITE)
    assert succeeded(live.change(action("delete", EUROPE, source=False)))
    with zipfile.ZipFile(package) as archive:
        text = archive.read("datasource.tds")
    assert Document(text).is_live_to_hyper
    extracted = text.replace(
        b"</datasource>", b"<extract enabled='true'><connection class='hyper'/></extract></datasource>"
    )
    assert not Document(extracted).is_live_to_hyper
    assert not Document(text.replace(b'class="hyper"', b'class="postgres"')).is_live_to_hyper
