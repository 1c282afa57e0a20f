"""Background jobs: queued in the store, worked off by threads, run again after a crash; each takes effect at once or not at all."""

from __future__ import annotations

import json
import threading
import time
import uuid
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau import webhooks
from tir_dagster.sandbox.tableau.batches import BatchError
from tir_dagster.sandbox.tableau.content import replace_extract
from tir_dagster.sandbox.tableau.patching import Torn, patched_package
from tir_dagster.sandbox.tableau.people import Session
from tir_dagster.sandbox.tableau.publishing import StagedPublish, publish_staged
from tir_dagster.sandbox.tableau.refresh import RefreshFailedError, refreshed_package
from tir_dagster.sandbox.tableau.server import Server, log
from tir_dagster.sandbox.tableau.store import Row, insert
from tir_dagster.sandbox.tableau.webhooks import announce
from tir_dagster.sandbox.tableau.wire import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

PENDING, RUNNING, SUCCESS, FAILED, CANCELLED = "Pending", "InProgress", "Success", "Failed", "Cancelled"
FINISH_CODES = {SUCCESS: 0, FAILED: 1, CANCELLED: 2}
REFRESH, PUBLISH, PATCH = "RefreshExtract", "PublishDatasource", "UpdateUploadedFile"
# For so long a request id counts as the same request.
REQUEST_SECONDS = 24 * 3600
# A real server answers 404 or 400031 for a job it has forgotten; the sub-code of the 404 is not documented.
GONE_CODE = 404031
WORKERS = 2


class _StoppedError(Exception):
    """The job was cancelled, or the server goes down: leave without a trace."""


class JobQueue:
    """The jobs of a server and the threads that run them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._busy: set[str] = set()
        self._busy_lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, daemon=True, name=f"job-{n}") for n in range(WORKERS)]

    def start(self) -> None:
        # What was running when the server went down has had no effect yet: it starts over.
        self._server.store.run("UPDATE jobs SET state = ?, started = NULL WHERE state = ?", PENDING, RUNNING)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(timeout=10)

    def queue_refresh(self, datasource: Row, *, incremental: bool, task_id: str | None = None) -> Row:
        """A refresh job; 409093 while another one of the same datasource waits or runs."""
        with self._server.store.transaction() as db:
            if db.execute(
                "SELECT 1 FROM jobs WHERE datasource_id = ? AND kind = ? AND state IN (?, ?)",
                (datasource["id"], REFRESH, PENDING, RUNNING),
            ).fetchone():
                raise ApiError(
                    409093, f"Job for '{datasource['name']}' extract is already queued. Not queuing a duplicate."
                )
            return self._queue(
                db,
                site_id=datasource["site_id"],
                kind=REFRESH,
                datasource_id=datasource["id"],
                title=datasource["name"],
                task_id=task_id,
                payload=json.dumps({"incremental": incremental}),
            )

    def run_task(self, task: Row, datasource: Row) -> Row:
        """The refresh of a task, started by its schedule or by hand."""
        return self.queue_refresh(datasource, incremental=bool(task["incremental"]), task_id=task["id"])

    def queue_publish(self, session: Session, staged: StagedPublish) -> Row:
        payload = {"session": asdict(session), **staged.as_json()}
        with self._server.store.transaction() as db:
            return self._queue(
                db,
                site_id=session.site_id,
                kind=PUBLISH,
                title=staged.publication.name,
                payload=json.dumps(payload),
            )

    def queue_patch(
        self, datasource: Row, request_id: str, actions: Any, stage: Callable[[], str | None], *, connection: str | None
    ) -> Row:
        """A batch of changes; the job of an earlier request with this id, which is not carried out again.

        `stage` makes sure of the payload and gives its file; it is not asked for a repeated request.
        """
        wanted = json.dumps([datasource["id"], actions], sort_keys=True)
        with self._server.store.transaction() as db:
            earlier = self._same_request(db, datasource["site_id"], request_id, wanted)
            if earlier is not None:
                return earlier
            job = self._queue(
                db,
                site_id=datasource["site_id"],
                kind=PATCH,
                datasource_id=datasource["id"],
                title=datasource["name"],
                payload=json.dumps({"actions": actions, "file": stage(), "connection": connection}),
            )
            db.execute(
                "INSERT OR REPLACE INTO data_requests VALUES (?, ?, ?, ?, ?)",
                (datasource["site_id"], request_id, wanted, job["id"], self._server.now()),
            )
            return job

    def _same_request(self, db: Any, site_id: str, request_id: str, wanted: str) -> Row | None:
        found = db.execute(
            "SELECT r.content, j.* FROM data_requests r JOIN jobs j ON j.id = r.job_id"
            " WHERE r.site_id = ? AND r.request_id = ? AND r.created > ?",
            (site_id, request_id, self._server.now() - REQUEST_SECONDS),
        ).fetchone()
        if found is not None and found["content"] != wanted:
            raise ApiError(409006, f"The RequestID {request_id!r} was used for another request already.")
        row: Row | None = found
        return row

    def _queue(self, db: Any, **values: Any) -> Row:
        job_id = str(uuid.uuid4())
        insert(db, "jobs", id=job_id, state=PENDING, created=self._server.now(), notes="", **values)
        self._wake.set()
        row: Row = db.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return row

    def find(self, session: Session, job_id: str) -> Row:
        """The job; an error once the server has forgotten it."""
        row = self._server.store.row("SELECT * FROM jobs WHERE id = ? AND site_id = ?", job_id, session.site_id)
        code = GONE_CODE if row is None or self._is_old(row) else row["gone_code"]
        if row is None or code is not None:
            raise ApiError(code or GONE_CODE, f"Job {job_id!r} could not be found.")
        return row

    def forget(self, job_id: str, code: int) -> None:
        self._server.store.run("UPDATE jobs SET gone_code = ? WHERE id = ?", code, job_id)

    def all(self, session: Session) -> list[Row]:
        rows = self._server.store.rows(
            "SELECT * FROM jobs WHERE site_id = ? ORDER BY created DESC, rowid DESC", session.site_id
        )
        return [row for row in rows if row["gone_code"] is None and not self._is_old(row)]

    def _is_old(self, row: Row) -> bool:
        completed: float | None = row["completed"]
        return completed is not None and self._server.now() - completed > self._server.settings.current.job_keep_seconds

    def cancel(self, job_id: str) -> None:
        """End a job that waits or runs; one that is over stays as it is."""
        self._finish(job_id, CANCELLED, "Job canceled by a user.")

    def fail_jobs_of(self, datasource_id: str, note: str) -> None:
        for row in self._server.store.rows(
            "SELECT id FROM jobs WHERE datasource_id = ? AND state IN (?, ?)", datasource_id, PENDING, RUNNING
        ):
            self._finish(row["id"], FAILED, note)

    def _finish(self, job_id: str, state: str, note: str) -> bool:
        with self._server.store.transaction() as db:
            return _write_end(self._server, db, job_id, state, note)

    def _work(self) -> None:
        while not self._stopping.is_set():
            job = self._next()
            if job is None:
                self._wake.wait(timeout=0.02 if self._has_pending() else 0.5)
                self._wake.clear()
                continue
            try:
                self._run(job)
            except _StoppedError:
                pass
            except ApiError as error:
                self._finish(job["id"], FAILED, error.detail)
            except (RefreshFailedError, BatchError) as error:
                self._finish(job["id"], FAILED, str(error))
            except Exception as error:
                log.exception("job %s failed unexpectedly", job["id"])
                self._finish(job["id"], FAILED, f"Unexpected error: {error}")
            finally:
                self._drop_payload(job)
                with self._busy_lock:
                    self._busy.discard(_subject(job))

    def _has_pending(self) -> bool:
        return self._server.store.row("SELECT 1 FROM jobs WHERE state = ?", PENDING) is not None

    def _next(self) -> Row | None:
        """The oldest job whose time has come; two jobs of one datasource never run side by side."""
        # A job is seen waiting for a while, even when nothing else is to do. A job from the future is due as well: the
        # clock was moved back since.
        now, wait = self._server.now(), self._server.settings.current.job_seconds / 4
        with self._server.store.transaction() as db, self._busy_lock:
            waiting = db.execute(
                "SELECT * FROM jobs WHERE state = ? AND abs(? - created) >= ? ORDER BY created, rowid",
                (PENDING, now, wait),
            )
            with closing(waiting):
                job: Row | None = next((row for row in waiting if _subject(row) not in self._busy), None)
            if job is not None:
                self._busy.add(_subject(job))
                db.execute("UPDATE jobs SET state = ?, started = ? WHERE id = ?", (RUNNING, now, job["id"]))
                if job["kind"] == REFRESH:
                    announce(self._server, db, webhooks.STARTED, job["datasource_id"])
            return job

    def _run(self, job: Row) -> None:
        # Job faults are aimed at this path, because a worker has no request of its own.
        aim = f"/datasources/{job['datasource_id'] or ''}/{job['title']}"
        slow = self._server.faults.strike(("slow_job",), path=aim)
        failing = self._server.faults.strike(("fail_job",), path=aim)
        self._sleep(job, self._server.settings.current.job_seconds * 3 / 4 + (slow.seconds if slow else 0))
        if failing is not None:
            raise RefreshFailedError(failing.notes)
        if job["kind"] == PUBLISH:
            self._publish(job)
        elif job["kind"] == PATCH:
            self._patch(job, aim)
        else:
            self._refresh(job)

    def _sleep(self, job: Row, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check(job)
            self._stopping.wait(min(left, 0.1))
        self._check(job)

    def _check(self, job: Row) -> None:
        row = self._server.store.row("SELECT state FROM jobs WHERE id = ?", job["id"])
        if self._stopping.is_set() or row is None or row["state"] != RUNNING:
            raise _StoppedError

    def _refresh(self, job: Row) -> None:
        incremental = json.loads(job["payload"])["incremental"]
        datasource_id = job["datasource_id"]
        with refreshed_package(
            self._server, datasource_id, incremental=incremental, check=lambda: self._check(job)
        ) as result:
            replaced = replace_extract(
                self._server,
                datasource_id,
                generation=result.generation,
                path=result.path,
                also=lambda db: _write_end(self._server, db, job["id"], SUCCESS, result.note),
            )
        if not replaced:
            self._check(job)
            raise RefreshFailedError(
                f"The data source {job['title']!r} was published again while it was being refreshed."
            )

    def _patch(self, job: Row, aim: str) -> None:
        asked = json.loads(job["payload"])
        # Otherwise the change is there, and its end was not told yet when the server went down.
        if not {"note", "torn"} & asked.keys():
            asked = self._change_data(job, asked, aim)
            late = self._server.faults.strike(("late_job",), path=aim)
            self._sleep(job, late.seconds if late else 0)
        if "torn" in asked:
            raise BatchError(asked["torn"])
        self._finish(job["id"], SUCCESS, asked["note"])

    def _change_data(self, job: Row, asked: dict[str, Any], aim: str) -> dict[str, Any]:
        """What was asked for, with how it ended."""
        fault = self._server.faults.strike(("torn_job",), path=aim)
        torn = Torn(fault.actions, fault.half) if fault else None
        payload = self._server.incoming(asked["file"]) if asked["file"] else None
        check = partial(self._check, job)
        with patched_package(
            self._server, job["datasource_id"], asked["actions"], payload, torn=torn, check=check
        ) as result:
            done = {**asked, **({"torn": fault.notes} if fault else {"note": result.note})}
            replaced = replace_extract(
                self._server,
                job["datasource_id"],
                generation=result.generation,
                path=result.path,
                also=lambda db: _write_change(db, job["id"], done),
            )
        if not replaced:
            self._check(job)
            raise BatchError(f"The data source {job['title']!r} was published again while its data was being changed.")
        return done

    def _drop_payload(self, job: Row) -> None:
        """The payload of a change that is over; one that runs again after a restart needs it."""
        row = self._server.store.row("SELECT 1 FROM jobs WHERE id = ? AND completed IS NOT NULL", job["id"])
        file = json.loads(job["payload"]).get("file") if job["kind"] == PATCH else None
        if row is not None and file:
            self._server.incoming(file).unlink(missing_ok=True)

    def _publish(self, job: Row) -> None:
        payload = json.loads(job["payload"])
        publish_staged(
            self._server,
            Session(**payload["session"]),
            StagedPublish.from_json(payload),
            also=lambda db, datasource_id: _end_publish(self._server, db, job["id"], datasource_id),
        )


def _subject(job: Row) -> str:
    subject: str = job["datasource_id"] or job["id"]
    return subject


def _write_end(server: Server, db: Any, job_id: str, state: str, note: str) -> bool:
    """Write down the end of a job that has none yet; False when it was over already."""
    done: int = db.execute(
        "UPDATE jobs SET state = ?, finish_code = ?, notes = ?, completed = ? WHERE id = ? AND state IN (?, ?)",
        (state, FINISH_CODES[state], note, server.now(), job_id, PENDING, RUNNING),
    ).rowcount
    # A publish carries passwords until it is over.
    db.execute("UPDATE jobs SET payload = '{}' WHERE id = ? AND kind = ? AND completed IS NOT NULL", (job_id, PUBLISH))
    if done and state != CANCELLED:
        _announce_end(server, db, job_id, state)
        db.execute(
            "UPDATE tasks SET failed_count = CASE WHEN ? THEN 0 ELSE failed_count + 1 END"
            " WHERE id = (SELECT task_id FROM jobs WHERE id = ?)",
            (state == SUCCESS, job_id),
        )
    return bool(done)


def _announce_end(server: Server, db: Any, job_id: str, state: str) -> None:
    job = db.execute("SELECT kind, datasource_id FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if job["kind"] == REFRESH:
        announce(server, db, webhooks.SUCCEEDED if state == SUCCESS else webhooks.FAILED, job["datasource_id"])


def _write_change(db: Any, job_id: str, payload: dict[str, Any]) -> bool:
    """Write down that the data is changed; False when the job was cancelled meanwhile."""
    done: int = db.execute(
        "UPDATE jobs SET payload = ? WHERE id = ? AND state = ?", (json.dumps(payload), job_id, RUNNING)
    ).rowcount
    return bool(done)


def _end_publish(server: Server, db: Any, job_id: str, datasource_id: str) -> bool:
    db.execute("UPDATE jobs SET datasource_id = ? WHERE id = ?", (datasource_id, job_id))
    return _write_end(server, db, job_id, SUCCESS, "")
