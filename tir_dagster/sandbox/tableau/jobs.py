"""Background jobs: queued in the store, worked off by threads, run again after a crash; each takes effect at once or not at all."""

from __future__ import annotations

import json
import threading
import time
import uuid
from contextlib import closing
from dataclasses import asdict
from typing import Any

from tir_dagster.sandbox.tableau.content import replace_extract
from tir_dagster.sandbox.tableau.people import Session
from tir_dagster.sandbox.tableau.publishing import StagedPublish, publish_staged
from tir_dagster.sandbox.tableau.refresh import RefreshFailedError, refreshed_package
from tir_dagster.sandbox.tableau.server import Server, log
from tir_dagster.sandbox.tableau.store import Row, insert
from tir_dagster.sandbox.tableau.wire import ApiError

PENDING, RUNNING, SUCCESS, FAILED, CANCELLED = "Pending", "InProgress", "Success", "Failed", "Cancelled"
FINISH_CODES = {SUCCESS: 0, FAILED: 1, CANCELLED: 2}
REFRESH, PUBLISH = "RefreshExtract", "PublishDatasource"
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
        with self._server.store.transaction() as db:
            job = self.queue_refresh(datasource, incremental=bool(task["incremental"]), task_id=task["id"])
            db.execute("UPDATE tasks SET last_run = ? WHERE id = ?", (self._server.now(), task["id"]))
        return job

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
        rows = self._server.store.rows("SELECT * FROM jobs WHERE site_id = ? ORDER BY created DESC", session.site_id)
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
            return _write_end(db, job_id, state, note, now=self._server.now())

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
            except RefreshFailedError as error:
                self._finish(job["id"], FAILED, str(error))
            except Exception as error:
                log.exception("job %s failed unexpectedly", job["id"])
                self._finish(job["id"], FAILED, f"Unexpected error: {error}")
            finally:
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
                "SELECT * FROM jobs WHERE state = ? AND abs(? - created) >= ? ORDER BY created", (PENDING, now, wait)
            )
            with closing(waiting):
                job: Row | None = next((row for row in waiting if _subject(row) not in self._busy), None)
            if job is not None:
                self._busy.add(_subject(job))
                db.execute("UPDATE jobs SET state = ?, started = ? WHERE id = ?", (RUNNING, now, job["id"]))
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
                also=lambda db: _write_end(db, job["id"], SUCCESS, result.note, now=self._server.now()),
            )
        if not replaced:
            self._check(job)
            raise RefreshFailedError(
                f"The data source {job['title']!r} was published again while it was being refreshed."
            )

    def _publish(self, job: Row) -> None:
        payload = json.loads(job["payload"])
        publish_staged(
            self._server,
            Session(**payload["session"]),
            StagedPublish.from_json(payload),
            also=lambda db, datasource_id: _end_publish(db, job["id"], datasource_id, now=self._server.now()),
        )


def _subject(job: Row) -> str:
    subject: str = job["datasource_id"] or job["id"]
    return subject


def _write_end(db: Any, job_id: str, state: str, note: str, *, now: float) -> bool:
    """Write down the end of a job that has none yet; False when it was over already."""
    done: int = db.execute(
        "UPDATE jobs SET state = ?, finish_code = ?, notes = ?, completed = ? WHERE id = ? AND state IN (?, ?)",
        (state, FINISH_CODES[state], note, now, job_id, PENDING, RUNNING),
    ).rowcount
    # A publish carries passwords until it is over.
    db.execute("UPDATE jobs SET payload = '{}' WHERE id = ? AND kind = ? AND completed IS NOT NULL", (job_id, PUBLISH))
    if done and state != CANCELLED:
        db.execute(
            "UPDATE tasks SET failed_count = CASE WHEN ? THEN 0 ELSE failed_count + 1 END"
            " WHERE id = (SELECT task_id FROM jobs WHERE id = ?)",
            (state == SUCCESS, job_id),
        )
    return bool(done)


def _end_publish(db: Any, job_id: str, datasource_id: str, *, now: float) -> bool:
    db.execute("UPDATE jobs SET datasource_id = ? WHERE id = ?", (datasource_id, job_id))
    return _write_end(db, job_id, SUCCESS, "", now=now)
