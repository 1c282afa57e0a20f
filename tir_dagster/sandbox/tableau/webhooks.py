"""Webhooks: which events a site's subscribers want, and the thread that delivers them over HTTP."""

from __future__ import annotations

import http.client
import ipaddress
import json
import logging
import threading
import time
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.store import insert
from tir_dagster.sandbox.tableau.wire import ApiError, moment

if TYPE_CHECKING:
    from tir_dagster.sandbox.tableau.server import Server
    from tir_dagster.sandbox.tableau.store import Row

log = logging.getLogger("tir_dagster.sandbox.tableau")
# The first attempt and three more, each after a longer while; then the webhook is disabled.
ATTEMPTS = 4
_SLOWER = 3.0
_TIMEOUT_SECONDS = 10.0
_LARGEST_ANSWER = 64 * 1024
# A loop that wakes up by itself now and then, in case a delivery of an earlier life waits.
_LOOK_SECONDS = 0.5
GIVEN_UP = "The webhook was disabled because its destination did not answer with success."


@dataclass(frozen=True)
class Event:
    """One kind of event: its name, its element in a request, and the word for what it happened to."""

    name: str
    element: str
    resource: str


CREATED = Event("DatasourceCreated", "webhook-source-event-datasource-created", "DATASOURCE")
UPDATED = Event("DatasourceUpdated", "webhook-source-event-datasource-updated", "DATASOURCE")
DELETED = Event("DatasourceDeleted", "webhook-source-event-datasource-deleted", "DATASOURCE")
STARTED = Event("DatasourceRefreshStarted", "webhook-source-event-datasource-refresh-started", "EXTRACTS")
SUCCEEDED = Event("DatasourceRefreshSucceeded", "webhook-source-event-datasource-refresh-succeeded", "EXTRACTS")
FAILED = Event("DatasourceRefreshFailed", "webhook-source-event-datasource-refresh-failed", "EXTRACTS")
EVENTS = (CREATED, UPDATED, DELETED, STARTED, SUCCEEDED, FAILED)


def announce(server: Server, db: Any, event: Event, datasource_id: str) -> None:
    """Queue the event for those who want it, in the transaction in which it happens."""
    source = db.execute("SELECT site_id, name FROM datasources WHERE id = ?", (datasource_id,)).fetchone()
    if source is None:
        return
    wanted = "SELECT id FROM webhooks WHERE site_id = ? AND event = ? AND enabled"
    for row in db.execute(wanted, (source["site_id"], event.name)).fetchall():
        body = {
            "resource": event.resource,
            "event_type": event.name,
            "resource_name": source["name"],
            "site_luid": source["site_id"],
            "resource_luid": datasource_id,
            "created_at": moment(server.now()),
        }
        insert(db, "deliveries", webhook_id=row["id"], body=json.dumps(body), attempts=0, due=time.time())
        server.mail.set()


def checked_url(url: str) -> str:
    """A destination: https anywhere, and http only on this machine, where a sandbox's receivers are."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise ApiError(400000, f"The destination {url!r} is not a URL.") from error
    if parts.scheme not in ("https", "http") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise ApiError(400000, f"The destination {url!r} is not a URL.")
    if parts.scheme == "http" and not _is_loopback(host):
        raise ApiError(400000, f"The destination {url!r} must be https.")
    return url


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def post(url: str, body: bytes) -> tuple[int, str]:
    """Status and text of the answer; OSError or HTTPException without one. Redirects are not followed."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS)
    try:
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection.request("POST", target, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read(_LARGEST_ANSWER).decode("utf-8", "replace")
    finally:
        connection.close()


class Courier:
    """Delivers what is due, at least once; what is not delivered outlives a restart."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="courier")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._server.mail.set()
        self._thread.join(timeout=_TIMEOUT_SECONDS)

    def _work(self) -> None:
        while not self._stopping.is_set():
            self._server.mail.clear()
            try:
                for row in self._due():
                    if not self._stopping.is_set():
                        self._deliver(row)
                pause = self._pause()
            except Exception:
                log.exception("the courier failed")
                pause = _LOOK_SECONDS
            self._server.mail.wait(pause)

    def _due(self) -> list[Row]:
        return self._server.store.rows(
            "SELECT d.*, w.url FROM deliveries d JOIN webhooks w ON w.id = d.webhook_id WHERE d.due <= ? ORDER BY d.id",
            time.time(),
        )

    def _pause(self) -> float:
        row = self._server.store.row("SELECT min(due) AS due FROM deliveries")
        soon = row["due"] - time.time() if row is not None and row["due"] is not None else _LOOK_SECONDS
        return min(max(soon, 0.0), _LOOK_SECONDS)

    def _deliver(self, row: Row) -> None:
        try:
            status, _ = post(row["url"], row["body"].encode())
            why = f"HTTP status {status}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            status, why = 0, str(error) or type(error).__name__
        if 200 <= status < 300:
            self._server.store.run("DELETE FROM deliveries WHERE id = ?", row["id"])
        elif row["attempts"] + 1 < ATTEMPTS:
            wait = self._server.settings.current.webhook_retry_seconds * _SLOWER ** row["attempts"]
            self._server.store.run(
                "UPDATE deliveries SET attempts = attempts + 1, due = ? WHERE id = ?", time.time() + wait, row["id"]
            )
        else:
            self._give_up(row["webhook_id"], why)

    def _give_up(self, webhook_id: str, why: str) -> None:
        with self._server.store.transaction() as db:
            db.execute(
                "UPDATE webhooks SET enabled = 0, reason = ? WHERE id = ?", (f"{GIVEN_UP} Last: {why}", webhook_id)
            )
            db.execute("DELETE FROM deliveries WHERE webhook_id = ?", (webhook_id,))
