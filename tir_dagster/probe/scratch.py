"""Questions to Tableau Server that take a datasource of the probe's own: it is published, changed, refreshed and deleted."""

from __future__ import annotations

import re
import uuid
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.server import RequestFactory

from tir_dagster.errors import DatasourceError
from tir_dagster.hyper.engine import connect, literal, quoted
from tir_dagster.hyper.hyperfile import describe
from tir_dagster.hyper.package.package import read_package
from tir_dagster.probe.doubts import Findings, refusal
from tir_dagster.probe.reading import ask, elements, notes, read
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import (
    FoundDatasource,
    FoundProject,
    find_datasource,
    find_project,
    look_for_datasource,
    settled,
)
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.jobs import JobFailedError, wait_for_job
from tir_dagster.tableau.publishing import publish
from tir_dagster.tableau.refreshes import is_incremental_job, rows_in_notes, start_refresh
from tir_dagster.tableau.settings import ConnectionCredential
from tir_dagster.tableau.transfer import download

_OWN_NAME = re.compile(r"tir-probe-[0-9a-f]{12}")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_JOB_SECONDS = 1800.0
_SCHEMA, _TABLE = "Extract", "Extract"
_NULL_ROW = (None, "none")
_ROWS = ((1, "one"), (2, "two"), _NULL_ROW)
Rows = Sequence[tuple[int | None, str | None]]


@dataclass(frozen=True)
class Copy:
    """The extract to copy, by the path of its project and its name, and the credentials of the copy's refreshes."""

    project: str
    name: str
    username: str
    password: str = field(repr=False)


def probe_scratch(
    client: TableauClient, project: FoundProject, findings: Findings, folder: Path, *, copy: Copy | None = None
) -> None:
    """Publish, overwrite, change and delete a small Hyper file; with `copy` also refresh a copy of that extract."""
    scratch = ScratchDatasource(client, project, findings, folder)
    with scratch.deleted():
        file = _hyper_file(folder / "probe.hyper", {_TABLE: _ROWS})
        with findings.asking("publishing a Hyper file", "publish.hyper_connection"):
            scratch.publish(file, "CreateNew")
            types = [connection.type for connection in scratch.now().connections]
            findings.note("publish.hyper_connection", types == ["hyper"], ", ".join(types))
        if findings.answers["publish.hyper_connection"].is_so is None:
            # Whatever comes next would be refused for the same reason.
            return
        _overwrite(scratch, findings, file)
        _publish_as_job(scratch, findings, file)
        for question in (_transfer, _replace_keys, _repeat_request, _fail_second_action, _other_actions):
            question(scratch, findings)
        if copy is not None:
            _refresh_copy(scratch, findings, copy)


class ScratchDatasource:
    """A datasource of the probe's own in one project."""

    def __init__(self, client: TableauClient, project: FoundProject, findings: Findings, folder: Path) -> None:
        self.client, self.project, self.folder = client, project, folder
        self.name = f"tir-probe-{uuid.uuid4().hex[:12]}"
        self._findings = findings
        # A publish that may still be queued.
        self._publish_job = ""

    @contextmanager
    def deleted(self) -> Iterator[None]:
        """Delete it at the end, and first what a killed probe of this user left."""
        options = TSC.RequestOptions(pagesize=1000)
        items = self.client.call(lambda server: list(TSC.Pager(server.datasources, options)), doing="list datasources")
        for item in items:
            is_here = (item.project_id, item.owner_id) == (self.project.id, self.client.user_id)
            if is_here and _OWN_NAME.fullmatch(item.name):
                self._delete(item.id, f"{item.name}, left by an earlier probe")
        try:
            yield
        finally:
            try:
                self._clean_up()
            except DatasourceError as error:
                raise DatasourceError(
                    f"{error} {self.name} may be left in project {self.project.path!r}: delete it by hand, or run the probe"
                    " again, which deletes it first."
                ) from error

    def _clean_up(self) -> None:
        if self._publish_job:
            # It would bring the datasource back.
            with suppress(RefusedError):
                self.ended(self._publish_job)
        found = look_for_datasource(self.client, project=self.project, name=self.name)
        if found is not None:
            self._delete(found.id, f"{self.name}, of this probe")

    def _delete(self, datasource_id: str, which: str) -> None:
        self._findings.tell(f"deleting {which}")

        def delete(server: Any) -> None:
            try:
                server.datasources.delete(datasource_id)
            except TSC.ServerResponseError as error:
                # Else the answer to the first request was lost.
                if error.code != "404004":
                    raise

        self.client.call(delete, doing=f"delete {which}")

    def now(self) -> FoundDatasource:
        return find_datasource(self.client, project=self.project, name=self.name)

    def before_change(self) -> FoundDatasource:
        """The datasource when its next change will show in `updatedAt`, which may have whole seconds."""
        return settled(self.client, self.now())

    def note_change(self, group: str, before: FoundDatasource) -> FoundDatasource:
        """Note whether a change added a revision and moved `updatedAt`, which may show late."""
        after = self.now()
        if after.updated_at == before.updated_at:
            after = settled(self.client, after)
        # A time that the client cannot read is none.
        moved = None if after.updated_at is None else after.updated_at != before.updated_at
        self._findings.note(f"{group}.moves_updated_at", moved)
        if before.revision is None or after.revision is None:
            self._findings.note(f"{group}.adds_revision", None, "no revisions are shown")
        else:
            added = after.revision - before.revision
            self._findings.note(f"{group}.adds_revision", {0: False, 1: True}.get(added), f"{added} more")
        return after

    def publish(self, file: Path, mode: str, **more: Any) -> Any:
        item = TSC.DatasourceItem(self.project.id, self.name)
        return self._ask(lambda server: server.datasources.publish(item, str(file), mode, **more), "publish")

    def publish_as_job(self, file: Path) -> Any:
        """Overwrite it by a job; return the job when it ended."""
        self._publish_job = str(self.publish(file, "Overwrite", as_job=True).id)
        job = self.ended(self._publish_job)
        self._publish_job = ""
        return job

    def patch(self, actions: Sequence[Mapping[str, Any]], *, request: str = "", **tables: Rows) -> str:
        """Send a batch with a payload of these tables; return the id of its job."""
        payload = _hyper_file(self.folder / f"{uuid.uuid4().hex}.hyper", tables)
        sent = {"request_id": request or uuid.uuid4().hex, "actions": actions, "payload": str(payload)}
        datasource_id = self.now().id
        return str(self._ask(lambda server: server.datasources.update_hyper_data(datasource_id, **sent), "patch").id)

    def _ask(self, action: Callable[[Any], Any], verb: str) -> Any:
        return ask(self.client, action, doing=f"{verb} {self.name}", repeat=False)

    def ended(self, job_id: str) -> Any:
        """The job when it ended, well or not."""
        with suppress(JobFailedError):
            wait_for_job(self.client, job_id, what="job of the probe", timeout=_JOB_SECONDS)
        return elements(read(self.client, f"S/jobs/{job_id}"), "job")[0]

    def select(self, what: str) -> list[list[Any]]:
        """Download it, and query its table."""
        target = self.folder / uuid.uuid4().hex
        download(self.client, self.now(), target)
        is_package = zipfile.is_zipfile(target)
        self._findings.note("transfer.download_is_package", is_package)
        if is_package:
            with zipfile.ZipFile(target) as archive:
                (member,) = [member for member in archive.namelist() if member.endswith(".hyper")]
                target = Path(archive.extract(member, self.folder / f"{target.name}.files"))
        with connect(target) as connection:
            rows: list[list[Any]] = connection.execute_list_query(f"SELECT {what} FROM {describe(target).sql}")
        return rows

    def rows(self) -> Counter[tuple[Any, ...]]:
        return Counter(map(tuple, self.select('"K", "V"')))

    def count(self) -> int:
        return int(self.select("COUNT(*)")[0][0])


def _hyper_file(path: Path, tables: Mapping[str, Rows]) -> Path:
    """A Hyper file with tables of keys K and texts V; the table `keys` of a payload has no texts."""
    with connect(path, create=True) as connection:
        connection.execute_command(f"CREATE SCHEMA {quoted(_SCHEMA)}")
        for name, rows in tables.items():
            # In the published table texts are never NULL: inserting one fails while the batch runs.
            text = "" if name == "keys" else f', "V" TEXT{" NOT NULL" if name == _TABLE else ""}'
            connection.execute_command(f'CREATE TABLE {quoted(_SCHEMA, name)} ("K" BIGINT{text})')
            for key, value in rows:
                values = [key, value] if text else [key]
                listed = ", ".join(map(_sql, values))
                connection.execute_command(f"INSERT INTO {quoted(_SCHEMA, name)} VALUES ({listed})")
    return path


def _sql(value: int | str | None) -> str:
    return "NULL" if value is None else literal(value) if isinstance(value, str) else str(value)


def _action(kind: str, source: str, operator: str = "") -> dict[str, Any]:
    target = {"target-schema": _SCHEMA, "target-table": _TABLE, "source-schema": _SCHEMA, "source-table": source}
    condition = {"condition": {"op": operator, "target-col": "K", "source-col": "K"}} if operator else {}
    return {"action": kind, **target, **condition}


_REPLACE_KEYS = (_action("delete", "keys", "eq"), _action("insert", "rows"))


def _overwrite(scratch: ScratchDatasource, findings: Findings, file: Path) -> None:
    mark = f"tir-probe-{uuid.uuid4().hex}"
    settings: dict[str, dict[str, Any]] = {
        "keeps_tags": {"tags": {mark}},
        "keeps_description": {"description": mark},
        "keeps_certification": {"certified": True, "certification_note": mark},
    }
    datasource_id = scratch.now().id

    def change(server: Any, values: Mapping[str, Any]) -> None:
        item = server.datasources.get_by_id(datasource_id)
        for name, value in values.items():
            setattr(item, name, value)
        server.datasources.update(item)

    for key, values in settings.items():
        with findings.asking(f"setting its {' and '.join(values)}", f"overwrite.{key}"):
            ask(scratch.client, partial(change, values=values), doing=f"change {scratch.name}")
    keys = ("keeps_id", "adds_revision", "moves_updated_at", "new_connections", *settings)
    with findings.asking("overwriting it", *(f"overwrite.{key}" for key in keys)):
        before = scratch.before_change()
        scratch.publish(file, "Overwrite")
        after = scratch.note_change("overwrite", before)
        findings.note("overwrite.keeps_id", after.id == before.id)
        ids = {connection.id for connection in before.connections}
        findings.note("overwrite.new_connections", all(connection.id not in ids for connection in after.connections))
        for key, values in settings.items():
            name, value = next(iter(values.items()))
            if f"overwrite.{key}" not in findings.answers:
                was, is_now = getattr(before, name) == value, getattr(after, name) == value
                findings.note(f"overwrite.{key}", is_now if was else None, "" if was else "could not be set")


def _publish_as_job(scratch: ScratchDatasource, findings: Findings, file: Path) -> None:
    with findings.asking("publishing it by a job", "publish.as_job", "publish.job_names_datasource"):
        job = scratch.publish_as_job(file)
        parts = ", ".join(sorted({item.tag.rpartition("}")[2] for item in job.iter()}))
        findings.note("publish.as_job", _is_done(job), f"type {job.get('type')}, elements {parts}")
        names = {value for item in job.iter() for value in item.attrib.values()}
        findings.note("publish.job_names_datasource", scratch.now().id in names)


def _is_done(job: Any) -> bool:
    return job.get("finishCode") in ("0", "3")


def _transfer(scratch: ScratchDatasource, findings: Findings) -> None:
    datasource_id = scratch.now().id

    def content(server: Any, headers: Mapping[str, str]) -> Mapping[str, str]:
        url = f"{server.datasources.baseurl}/{datasource_id}/content"
        headers = {"Accept-Encoding": "identity", **headers}
        answer: Mapping[str, str] = server.datasources.get_request(url, parameters={"headers": headers}).headers
        return answer

    with findings.asking("downloading a part of it", "transfer.ranges"):
        mark = ask(scratch.client, partial(content, headers={}), doing=f"download {scratch.name}").get("ETag", "")
        ranged = {"Range": "bytes=1-", "If-Range": mark}
        part = ask(scratch.client, partial(content, headers=ranged), doing=f"download {scratch.name}").get(
            "Content-Range"
        )
        is_strong = mark.startswith('"')
        findings.note("transfer.ranges", bool(part) and is_strong, f"ranges: {bool(part)}, strong ETag: {is_strong}")

    with findings.asking("uploading an empty piece", "transfer.empty_piece"):
        upload_id = ask(scratch.client, lambda server: server.fileuploads.initiate(), doing="begin an upload")

        def append(server: Any, piece: bytes) -> None:
            server.fileuploads.append(upload_id, *RequestFactory.Fileupload.chunk_req(piece))

        ask(scratch.client, partial(append, piece=b"a piece"), doing="upload a piece", repeat=False)
        code = refusal(lambda: ask(scratch.client, partial(append, piece=b""), doing="upload an empty piece"))
        findings.note("transfer.empty_piece", not code, code)


def _replace_keys(scratch: ScratchDatasource, findings: Findings) -> None:
    keys = ("patch.replaces_keys", "patch.moves_updated_at", "patch.adds_revision", "transfer.download_is_package")
    with findings.asking("replacing a key in its data", *keys):
        before = scratch.before_change()
        scratch.ended(scratch.patch(_REPLACE_KEYS, keys=[(2, None)], rows=[(2, "TWO")]))
        scratch.note_change("patch", before)
        findings.note("patch.replaces_keys", scratch.rows() == Counter([(1, "one"), (2, "TWO"), _NULL_ROW]))


def _repeat_request(scratch: ScratchDatasource, findings: Findings) -> None:
    request, insert = uuid.uuid4().hex, [_action("insert", "rows")]
    with findings.asking("sending a request twice", "patch.request_once", "patch.request_reused"):
        jobs = [scratch.patch(insert, request=request, rows=[(9, "nine")]) for _ in range(2)]
        for job_id in jobs:
            scratch.ended(job_id)
        count = scratch.rows()[9, "nine"]
        same = "the same job" if len(set(jobs)) == 1 else "another job"
        findings.note("patch.request_once", count == 1, f"{same}, {count} rows")
        update = [_action("update", "rows", "eq")]
        code = refusal(lambda: scratch.ended(scratch.patch(update, request=request, rows=[(9, "NINE")])))
        ran = "it ran" if (9, "NINE") in scratch.rows() else "it did not run, without an error"
        findings.note("patch.request_reused", bool(code), code or ran)


def _fail_second_action(scratch: ScratchDatasource, findings: Findings) -> None:
    with findings.asking("failing in the second action", "patch.all_or_nothing", "patch.failed_notes"):
        before = scratch.rows()
        job = scratch.ended(scratch.patch(_REPLACE_KEYS, keys=[(1, None)], rows=[(4, None)]))
        if _is_done(job):
            findings.note("patch.all_or_nothing", None, "nothing failed")
        else:
            findings.note("patch.all_or_nothing", scratch.rows() == before)
            findings.note("patch.failed_notes", bool(notes(job)), _QUOTED.sub("…", notes(job)))


def _other_actions(scratch: ScratchDatasource, findings: Findings) -> None:
    for key, operator in (("patch.null_equals_null", "eq"), ("patch.op_is", "is")):
        with findings.asking(f"deleting a NULL key by `{operator}`", key):
            delete = [_action("delete", "keys", operator)]
            code = refusal(lambda delete=delete: scratch.ended(scratch.patch(delete, keys=[(None, None)])))  # type: ignore[misc]
            findings.note(key, _NULL_ROW not in scratch.rows(), code)
    for kind, operator, rows in (
        ("update", "eq", [(1, "ONE")]),
        ("upsert", "eq", [(1, "uno"), (3, "three")]),
        ("replace", "", [(5, "five")]),
    ):
        with findings.asking(f"changing its data by {kind}", f"patch.{kind}"):
            others = Counter(row for row in scratch.rows() if kind != "replace" and row[0] not in dict(rows))
            scratch.ended(scratch.patch([_action(kind, "rows", operator)], rows=rows))
            findings.note(f"patch.{kind}", scratch.rows() == others + Counter(rows))


def _credential(source: FoundDatasource, copy: Copy) -> ConnectionCredential:
    """The credentials for the one Snowflake of the extract: no other server may get them."""
    places = {(place.server_address, place.server_port) for place in source.connections if place.type == "snowflake"}
    if len(places) != 1:
        raise DatasourceError(
            f"{source.shown} reads {len(places)} servers of Snowflake. Name an extract that reads one."
        )
    address, port = places.pop()
    return ConnectionCredential(address, copy.username, copy.password, port)


def _refresh_copy(scratch: ScratchDatasource, findings: Findings, copy: Copy) -> None:
    """Put a copy of the extract in the place of the Hyper file, and refresh it."""
    client, wait = (
        scratch.client,
        partial(wait_for_job, scratch.client, what="refresh of the copy", timeout=_JOB_SECONDS),
    )
    full = ("moves_updated_at", "adds_revision", "queued_once", "notes_rows", "full_type")
    is_set_up = None
    with findings.asking("copying the extract, then a full refresh", *(f"refresh.{key}" for key in full)):
        source = find_datasource(client, project=find_project(client, copy.project), name=copy.name)
        package = read_package(download(client, source, scratch.folder / "copy.tdsx"))
        credential = _credential(source, copy)
        publish(
            client,
            package.path,
            project=scratch.project,
            name=scratch.name,
            overwrite=True,
            connections=[credential],
            servers=package.servers,
        )
        before = scratch.before_change()
        first = start_refresh(client, before, incremental=False)
        # The client makes None of 409093.
        second = ask(client, lambda server: server.datasources.refresh(before.id), doing="refresh it", repeat=False)
        findings.note("refresh.queued_once", second is None)
        job = wait(first.job_id)
        if second is not None:
            wait(second.id)
        scratch.note_change("refresh", before)
        findings.note("refresh.notes_rows", rows_in_notes(job.notes) is not None, _QUOTED.sub("…", " ".join(job.notes)))
        is_incremental = is_incremental_job(client, first.job_id, before)
        findings.note("refresh.full_type", None if is_incremental is None else not is_incremental)
        is_set_up = package.incremental
    if is_set_up is None:
        return
    keys = ("increment.type", "increment.reads_last_again") if is_set_up else ("increment.full_if_not_set_up",)
    with findings.asking("an incremental refresh of the copy", *keys):
        rows, started = scratch.count(), start_refresh(client, scratch.now(), incremental=True)
        wait(started.job_id)
        more, is_incremental = scratch.count() - rows, is_incremental_job(client, started.job_id, before)
        if is_set_up:
            findings.note("increment.type", is_incremental)
            findings.note("increment.reads_last_again", more > 0, f"{more:+,} rows")
        else:
            is_full = None if is_incremental is None else not is_incremental and more == 0
            findings.note("increment.full_if_not_set_up", is_full, f"{more:+,} rows")
