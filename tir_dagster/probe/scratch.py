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
from tir_dagster.tableau.datasources import FoundDatasource, FoundProject, find_datasource, find_project, settled
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
    own = Own(client, project, findings, folder)
    with own.deleted():
        file = _hyper_file(folder / "probe.hyper", {_TABLE: _ROWS})
        with findings.asking("publishing a Hyper file", "publish.hyper_connection"):
            own.publish(file, "CreateNew")
            types = [connection.type for connection in own.now().connections]
            findings.note("publish.hyper_connection", types == ["hyper"], ", ".join(types))
        if findings.answers["publish.hyper_connection"].is_so is None:
            # Whatever comes next would be refused for the same reason.
            return
        _overwrite(own, findings, file)
        _publish_as_job(own, findings, file)
        for question in (_transfer, _replace_keys, _repeat_request, _fail_second_action, _other_actions):
            question(own, findings)
        if copy is not None:
            _refresh_copy(own, findings, copy)


class Own:
    """A datasource that the probe makes in one project."""

    def __init__(self, client: TableauClient, project: FoundProject, findings: Findings, folder: Path) -> None:
        self.client, self.project, self.folder = client, project, folder
        self.name = f"tir-probe-{uuid.uuid4().hex[:12]}"
        self._findings = findings
        # A publish that may still be queued.
        self._publish_job = ""

    @contextmanager
    def deleted(self) -> Iterator[None]:
        """Delete at the end all that the probe made, and first what a killed probe of this user left."""
        items = [item for item in self._items() if item.owner_id == self.client.user_id]
        self._delete([item for item in items if _OWN_NAME.fullmatch(item.name)], "left by an earlier probe")
        try:
            yield
        finally:
            if self._publish_job:
                # It would bring the datasource back.
                with suppress(DatasourceError):
                    self.ended(self._publish_job)
            self._delete([item for item in self._items() if item.name == self.name], "of this probe")

    def _items(self) -> list[Any]:
        items = self.client.call(lambda server: list(TSC.Pager(server.datasources)), doing="list the datasources")
        return [item for item in items if item.project_id == self.project.id]

    def _delete(self, items: list[Any], whose: str) -> None:
        for item in items:
            self._findings.tell(f"deleting {item.name}, {whose}")
            try:
                self.client.call(partial(_delete, datasource_id=item.id), doing=f"delete {item.name}")
            except DatasourceError as error:
                raise DatasourceError(
                    f"{error} It is in project {self.project.path!r}. Delete it by hand, or run the probe again: that"
                    " deletes what an earlier one left."
                ) from error

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
        self._findings.note(f"{group}.moves_updated_at", after.updated_at != before.updated_at)
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

    def rows(self) -> Counter[tuple[Any, ...]]:
        """The published rows, downloaded."""
        target = self.folder / uuid.uuid4().hex
        download(self.client, self.now(), target)
        is_package = zipfile.is_zipfile(target)
        if "transfer.download_is_package" not in self._findings.answers:
            self._findings.note("transfer.download_is_package", is_package)
        if is_package:
            with zipfile.ZipFile(target) as archive:
                (member,) = [member for member in archive.namelist() if member.endswith(".hyper")]
                target = Path(archive.extract(member, self.folder / f"{target.name}.files"))
        with connect(target) as connection:
            return Counter(tuple(row) for row in connection.execute_list_query(f"SELECT * FROM {describe(target).sql}"))


def _delete(server: Any, *, datasource_id: str) -> None:
    try:
        server.datasources.delete(datasource_id)
    except TSC.ServerResponseError as error:
        # Else the answer to the first request was lost.
        if error.code != "404004":
            raise


def _hyper_file(path: Path, tables: Mapping[str, Rows]) -> Path:
    """A Hyper file with tables of keys K and texts V; the table `keys` of a payload has no texts."""
    with connect(path, create=True) as connection:
        connection.execute_command(f"CREATE SCHEMA {quoted(_SCHEMA)}")
        for name, rows in tables.items():
            # In the published table texts are never NULL: inserting one fails while the batch runs.
            text = "" if name == "keys" else f', "V" TEXT{" NOT NULL" if name == _TABLE else ""}'
            connection.execute_command(f'CREATE TABLE {quoted(_SCHEMA, name)} ("K" BIGINT{text})')
            for key, value in rows:
                values = [str(key), *([literal(value) if value else "NULL"] if text else [])]
                listed = ", ".join(values).replace("None", "NULL")
                connection.execute_command(f"INSERT INTO {quoted(_SCHEMA, name)} VALUES ({listed})")
    return path


def _action(kind: str, source: str, operator: str = "") -> dict[str, Any]:
    target = {"target-schema": _SCHEMA, "target-table": _TABLE, "source-schema": _SCHEMA, "source-table": source}
    condition = {"condition": {"op": operator, "target-col": "K", "source-col": "K"}} if operator else {}
    return {"action": kind, **target, **condition}


_REPLACE_KEYS = (_action("delete", "keys", "eq"), _action("insert", "rows"))


def _overwrite(own: Own, findings: Findings, file: Path) -> None:
    mark = f"Made by tir probe-server: {uuid.uuid4().hex}"
    settings: dict[str, dict[str, Any]] = {
        "keeps_tags": {"tags": {mark}},
        "keeps_description": {"description": mark},
        "keeps_certification": {"certified": True, "certification_note": mark},
    }
    datasource_id = own.now().id

    def change(server: Any, values: Mapping[str, Any]) -> None:
        item = server.datasources.get_by_id(datasource_id)
        for name, value in values.items():
            setattr(item, name, value)
        server.datasources.update(item)

    for key, values in settings.items():
        with findings.asking(f"setting its {' and '.join(values)}", f"overwrite.{key}"):
            ask(own.client, partial(change, values=values), doing=f"change {own.name}")
    keys = ("keeps_id", "adds_revision", "moves_updated_at", "new_connections", *settings)
    with findings.asking("overwriting it", *(f"overwrite.{key}" for key in keys)):
        before = own.before_change()
        own.publish(file, "Overwrite")
        after = own.note_change("overwrite", before)
        findings.note("overwrite.keeps_id", after.id == before.id)
        kept = {connection.id for connection in before.connections} & {
            connection.id for connection in after.connections
        }
        findings.note("overwrite.new_connections", not kept)
        for key, (name, value) in ((key, next(iter(values.items()))) for key, values in settings.items()):
            if f"overwrite.{key}" not in findings.answers:
                was, is_now = getattr(before, name) == value, getattr(after, name) == value
                findings.note(f"overwrite.{key}", is_now if was else None, "" if was else "could not be set")


def _publish_as_job(own: Own, findings: Findings, file: Path) -> None:
    with findings.asking("publishing it by a job", "publish.as_job", "publish.job_names_datasource"):
        job = own.publish_as_job(file)
        parts = ", ".join(sorted({item.tag.rpartition("}")[2] for item in job.iter()}))
        findings.note("publish.as_job", _is_done(job), f"type {job.get('type')}, elements {parts}")
        names = {value for item in job.iter() for value in item.attrib.values()}
        findings.note("publish.job_names_datasource", own.now().id in names)


def _is_done(job: Any) -> bool:
    return job.get("finishCode") in ("0", "3")


def _transfer(own: Own, findings: Findings) -> None:
    datasource_id = own.now().id

    def content(server: Any, headers: Mapping[str, str]) -> Mapping[str, str]:
        url = f"{server.datasources.baseurl}/{datasource_id}/content"
        headers = {"Accept-Encoding": "identity", **headers}
        answer: Mapping[str, str] = server.datasources.get_request(url, parameters={"headers": headers}).headers
        return answer

    with findings.asking("downloading a part of it", "transfer.ranges"):
        mark = ask(own.client, partial(content, headers={}), doing=f"download {own.name}").get("ETag", "")
        ranged = {"Range": "bytes=1-", "If-Range": mark}
        part = ask(own.client, partial(content, headers=ranged), doing=f"download {own.name}").get("Content-Range")
        is_strong = mark.startswith('"')
        findings.note("transfer.ranges", bool(part) and is_strong, f"ranges: {bool(part)}, strong ETag: {is_strong}")

    def upload(server: Any) -> None:
        upload_id = server.fileuploads.initiate()
        for piece in (b"a piece", b""):
            server.fileuploads.append(upload_id, *RequestFactory.Fileupload.chunk_req(piece))

    with findings.asking("uploading an empty piece", "transfer.empty_piece"):
        code = refusal(lambda: ask(own.client, upload, doing="upload an empty piece"))
        findings.note("transfer.empty_piece", not code, code)


def _replace_keys(own: Own, findings: Findings) -> None:
    keys = ("patch.replaces_keys", "patch.moves_updated_at", "patch.adds_revision", "transfer.download_is_package")
    with findings.asking("replacing a key in its data", *keys):
        before = own.before_change()
        own.ended(own.patch(_REPLACE_KEYS, keys=[(2, None)], rows=[(2, "TWO")]))
        own.note_change("patch", before)
        findings.note("patch.replaces_keys", own.rows() == Counter([(1, "one"), (2, "TWO"), _NULL_ROW]))


def _repeat_request(own: Own, findings: Findings) -> None:
    request, insert = uuid.uuid4().hex, [_action("insert", "rows")]
    with findings.asking("sending a request twice", "patch.request_once", "patch.request_reused"):
        jobs = [own.patch(insert, request=request, rows=[(9, "nine")]) for _ in range(2)]
        for job_id in jobs:
            own.ended(job_id)
        count = own.rows()[9, "nine"]
        same = "the same job" if len(set(jobs)) == 1 else "another job"
        findings.note("patch.request_once", count == 1, f"{same}, {count} rows")
        update = [_action("update", "rows", "eq")]
        code = refusal(lambda: own.ended(own.patch(update, request=request, rows=[(9, "NINE")])))
        ran = "it ran" if (9, "NINE") in own.rows() else "it did not run, without an error"
        findings.note("patch.request_reused", bool(code), code or ran)


def _fail_second_action(own: Own, findings: Findings) -> None:
    with findings.asking("failing in the second action", "patch.all_or_nothing", "patch.failed_notes"):
        before = own.rows()
        job = own.ended(own.patch(_REPLACE_KEYS, keys=[(1, None)], rows=[(4, None)]))
        if _is_done(job):
            findings.note("patch.all_or_nothing", None, "nothing failed")
        else:
            findings.note("patch.all_or_nothing", own.rows() == before)
            findings.note("patch.failed_notes", bool(notes(job)), _QUOTED.sub("…", notes(job)))


def _other_actions(own: Own, findings: Findings) -> None:
    for key, operator in (("patch.null_equals_null", "eq"), ("patch.op_is", "is")):
        with findings.asking(f"deleting a NULL key by `{operator}`", key):
            delete = [_action("delete", "keys", operator)]
            code = refusal(lambda delete=delete: own.ended(own.patch(delete, keys=[(None, None)])))  # type: ignore[misc]
            findings.note(key, _NULL_ROW not in own.rows(), code)
    for kind, operator, rows in (
        ("update", "eq", [(1, "ONE")]),
        ("upsert", "eq", [(1, "uno"), (3, "three")]),
        ("replace", "", [(5, "five")]),
    ):
        with findings.asking(f"changing its data by {kind}", f"patch.{kind}"):
            others = Counter(row for row in own.rows() if kind != "replace" and row[0] not in dict(rows))
            own.ended(own.patch([_action(kind, "rows", operator)], rows=rows))
            findings.note(f"patch.{kind}", own.rows() == others + Counter(rows))


def _credential(source: FoundDatasource, copy: Copy) -> ConnectionCredential:
    """The credentials for the one Snowflake of the extract: no other server may get them."""
    places = {(place.server_address, place.server_port) for place in source.connections if place.type == "snowflake"}
    if len(places) != 1:
        raise DatasourceError(
            f"{source.shown} reads {len(places)} servers of Snowflake. Name an extract that reads one."
        )
    address, port = places.pop()
    return ConnectionCredential(address, copy.username, copy.password, port)


def _refresh_copy(own: Own, findings: Findings, copy: Copy) -> None:
    """Put a copy of the extract in the place of the Hyper file, and refresh it."""
    client, wait = own.client, partial(wait_for_job, own.client, what="refresh of the copy", timeout=_JOB_SECONDS)
    full = ("moves_updated_at", "adds_revision", "queued_once", "notes_rows", "full_type")
    is_set_up = None
    with findings.asking("copying the extract, then a full refresh", *(f"refresh.{key}" for key in full)):
        source = find_datasource(client, project=find_project(client, copy.project), name=copy.name)
        package = read_package(download(client, source, own.folder / "copy.tdsx"))
        credential = _credential(source, copy)
        publish(client, package.path, project=own.project, name=own.name, overwrite=True, connections=[credential])
        before = own.before_change()
        first = start_refresh(client, before, incremental=False)
        # The client makes None of 409093.
        second = ask(
            client, lambda server: server.datasources.refresh(before.id), doing="refresh it twice", repeat=False
        )
        findings.note("refresh.queued_once", second is None)
        job = wait(first.job_id)
        if second is not None:
            wait(second.id)
        own.note_change("refresh", before)
        findings.note("refresh.notes_rows", rows_in_notes(job.notes) is not None, _QUOTED.sub("…", " ".join(job.notes)))
        is_incremental = is_incremental_job(client, first.job_id, before)
        findings.note("refresh.full_type", None if is_incremental is None else not is_incremental)
        is_set_up = package.incremental
    if is_set_up is None:
        return
    keys = ("increment.type", "increment.reads_last_again") if is_set_up else ("increment.full_if_not_set_up",)
    with findings.asking("an incremental refresh of the copy", *keys):
        rows, started = own.rows().total(), start_refresh(client, own.now(), incremental=True)
        wait(started.job_id)
        more, is_incremental = own.rows().total() - rows, is_incremental_job(client, started.job_id, before)
        if is_set_up:
            findings.note("increment.type", is_incremental)
            findings.note("increment.reads_last_again", more > 0, f"{more:+,} rows")
        else:
            is_full = None if is_incremental is None else not is_incremental and more == 0
            findings.note("increment.full_if_not_set_up", is_full, f"{more:+,} rows")
