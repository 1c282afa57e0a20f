"""Webhooks: whom the server tells what, and what becomes of receivers that do not listen."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.server.endpoint.exceptions import ServerResponseError

from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.processes import PATIENCE_SECONDS, wait_for
from tir_dagster_tests.sandbox.tableau.helpers import (
    OVERWRITE,
    Admin,
    Looker,
    Publisher,
    Source,
)
from tir_dagster_tests.sandbox.tableau.live import LiveData

EVENTS = ("created", "updated", "deleted", "refresh-started", "refresh-succeeded", "refresh-failed")


@dataclass
class Receiver:
    """An HTTP server that keeps what it is sent, and answers with the statuses it is given first."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    received: queue.Queue[Any] = field(default_factory=queue.Queue)

    def next(self) -> Any:
        return self.received.get(timeout=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def running() -> Iterator[Receiver]:
    kept = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.received.put((self.path, self.headers["content-type"], json.loads(body)))
            self.send_response(kept.statuses.pop(0) if kept.statuses else 200)
            self.end_headers()
            self.wfile.write(b"thanks")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield kept
    server.shutdown()
    server.server_close()


@pytest.fixture
def receiver(running: Receiver) -> Receiver:
    running.statuses.clear()
    running.received = queue.Queue()
    return running


@pytest.fixture
def hook(publisher: Publisher, receiver: Receiver, admin: Admin) -> Iterator[Any]:
    """Creates webhooks that are gone after the test."""
    admin.set(webhook_retry_seconds=0.01)
    made = []

    def create(event: str, path: str = "/hook", url: str | None = None) -> Any:
        item = TSC.WebhookItem()
        item.name, item.url, item.event = f"hook {event}", url or f"{receiver.url}{path}", event
        made.append(publisher.server.webhooks.create(item))
        return made[-1]

    yield create
    known = {item.id for item in publisher.server.webhooks.get()[0]}
    for item in made:
        if item.id in known:
            publisher.server.webhooks.delete(item.id)


@pytest.fixture
def live(publisher: Publisher, look: Looker) -> LiveData:
    return LiveData.publish(publisher, look, [(1, "a")])


def told(receiver: Receiver, datasource: Any) -> str:
    """The next event, which must be about this datasource."""
    path, kind, body = receiver.next()
    assert (path, kind) == ("/hook", "application/json")
    assert (body["resource_luid"], body["resource_name"]) == (datasource.id, "Live")
    assert set(body) == {"resource", "event_type", "resource_name", "site_luid", "resource_luid", "created_at"}
    assert body["resource"] == ("EXTRACTS" if "Refresh" in body["event_type"] else "DATASOURCE")
    return str(body["event_type"])


def test_a_webhook_is_created_listed_found_and_deleted(publisher: Publisher, hook: Any) -> None:
    webhooks = publisher.server.webhooks
    made = hook("datasource-refresh-succeeded", "/a?b=c")
    found = webhooks.get_by_id(made.id)
    assert (found.name, found.event, found.owner_id) == (made.name, made.event, publisher.server.user_id)
    assert (found.event, found.url[-6:]) == ("datasource-refresh-succeeded", "/a?b=c")
    assert made.id in {item.id for item in webhooks.get()[0]}
    webhooks.delete(made.id)
    with pytest.raises(ServerResponseError, match="400113"):
        webhooks.get_by_id(made.id)


def test_a_test_sends_an_empty_payload_and_shows_the_answer(
    publisher: Publisher, hook: Any, receiver: Receiver
) -> None:
    receiver.statuses.append(418)
    answer = publisher.server.webhooks.test(hook("datasource-created").id)
    assert receiver.next()[2] == {}
    assert 'status="418"' in answer.text
    assert "<body>thanks</body>" in answer.text


def test_every_event_of_a_datasource_is_told(publisher: Publisher, look: Looker, hook: Any, receiver: Receiver) -> None:
    for event in EVENTS:
        hook(f"datasource-{event}")
    live = LiveData.publish(publisher, look, [(1, "a")])
    assert told(receiver, live.datasource) == "DatasourceCreated"
    LiveData.publish(publisher, look, [(2, "b")])
    assert told(receiver, live.datasource) == "DatasourceUpdated"
    publisher.refresh(live.datasource)
    assert told(receiver, live.datasource) == "DatasourceRefreshStarted"
    # It has nothing to be refreshed from.
    assert told(receiver, live.datasource) == "DatasourceRefreshFailed"
    publisher.server.datasources.update(live.datasource)
    assert told(receiver, live.datasource) == "DatasourceUpdated"
    publisher.server.datasources.delete(live.datasource.id)
    assert told(receiver, live.datasource) == "DatasourceDeleted"


def test_a_refresh_that_succeeds_is_told(publisher: Publisher, source: Source, hook: Any, receiver: Receiver) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0))")
    package = source.package(Column("ID", "NUMBER(38,0)"))
    datasource = publisher.publish(package, "Live", OVERWRITE, connection_credentials=publisher.credentials)
    hook("datasource-refresh-succeeded")
    publisher.refresh(datasource)
    assert told(receiver, datasource) == "DatasourceRefreshSucceeded"


def test_a_cancelled_refresh_has_neither_succeeded_nor_failed(
    live: LiveData, hook: Any, receiver: Receiver, admin: Admin
) -> None:
    for event in ("refresh-succeeded", "refresh-failed", "deleted"):
        hook(f"datasource-{event}")
    admin.fault("slow_job", path=live.datasource.id, seconds=60)
    job = live.endpoint.refresh(live.datasource)
    live.publisher.server.jobs.cancel(job.id)
    live.endpoint.delete(live.datasource.id)
    assert told(receiver, live.datasource) == "DatasourceDeleted"


def test_a_receiver_that_fails_is_asked_again(live: LiveData, hook: Any, receiver: Receiver) -> None:
    made = hook("datasource-updated")
    receiver.statuses[:] = [500, 302, 404]
    live.endpoint.update(live.datasource)
    bodies = [receiver.next()[2] for _ in range(4)]
    assert all(body == bodies[0] for body in bodies)
    assert enabled(live.publisher, made)[0]


def test_a_receiver_that_keeps_failing_is_disabled_until_it_is_enabled_again(
    live: LiveData, hook: Any, receiver: Receiver
) -> None:
    made = hook("datasource-updated")
    receiver.statuses[:] = [500] * 4
    live.endpoint.update(live.datasource)
    wait_for(lambda: not enabled(live.publisher, made)[0], "the webhook to be disabled")
    assert "HTTP status 500" in enabled(live.publisher, made)[1]
    assert receiver.received.qsize() == 4
    live.endpoint.update(live.datasource)
    url = f"{live.publisher.server.webhooks.baseurl}/{made.id}"
    body = '<tsRequest><webhook isEnabled="true"/></tsRequest>'
    assert requests.put(url, data=body, headers=header(live.publisher), timeout=30).ok
    assert enabled(live.publisher, made) == (True, "")
    receiver.received = queue.Queue()
    live.endpoint.update(live.datasource)
    assert told(receiver, live.datasource) == "DatasourceUpdated"
    assert receiver.received.empty()


def header(publisher: Publisher) -> dict[str, str]:
    return {"x-tableau-auth": publisher.server.auth_token}


def enabled(publisher: Publisher, made: Any) -> tuple[bool, str]:
    """Whether the webhook is enabled, and why not; the client's item does not tell."""
    text = requests.get(f"{publisher.server.webhooks.baseurl}/{made.id}", headers=header(publisher), timeout=30).text
    return 'isEnabled="true"' in text, text.partition('statusChangeReason="')[2].partition('"')[0]


@pytest.mark.parametrize(
    "url", ["http://example.com/hook", "http://10.0.0.1/", "ftp://127.0.0.1/", "nothing", "https://", "http://[::1", ""]
)
def test_a_destination_is_https_or_on_this_machine(hook: Any, url: str) -> None:
    with pytest.raises(ServerResponseError, match="400000"):
        hook("datasource-created", url=url or "http:")


def test_an_unknown_event_is_refused(hook: Any) -> None:
    with pytest.raises(ServerResponseError, match="400000"):
        hook("datasource-admired")


def test_the_event_may_be_an_attribute_but_not_two_events(publisher: Publisher, hook: Any, receiver: Receiver) -> None:
    hook("datasource-created")
    destination = (
        f'<webhook-destination><webhook-destination-http method="POST" url="{receiver.url}"/></webhook-destination>'
    )
    source = "<webhook-source><webhook-source-event-datasource-created/></webhook-source>"

    def create(event: str, inner: str) -> int:
        body = f'<tsRequest><webhook name="n" event="{event}">{inner}{destination}</webhook></tsRequest>'
        answer = requests.post(publisher.server.webhooks.baseurl, data=body, headers=header(publisher), timeout=30)
        if answer.ok:
            requests.delete(
                publisher.sandbox.tableau_url + answer.headers["location"], headers=header(publisher), timeout=30
            ).raise_for_status()
        return answer.status_code

    assert create("DatasourceCreated", "") == 201
    assert create("DatasourceCreated", source) == 201
    assert create("DatasourceDeleted", source) == 400


def test_only_administrators_use_webhooks(sandbox: Sandbox) -> None:
    with (
        sandbox.tableau(user=sandbox.identity.reader_user) as server,
        pytest.raises(ServerResponseError, match="403004"),
    ):
        server.webhooks.get()
