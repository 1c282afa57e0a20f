"""Publishing, overwriting, downloading, and what a datasource remembers of it."""

from __future__ import annotations

import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import Connection, CreateMode
from tableauserverclient.server.endpoint.exceptions import ServerResponseError

from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster_tests.sandbox.tableau.helpers import (
    OVERWRITE,
    Admin,
    Looker,
    Publisher,
    Source,
    rewritten,
    with_second_connection,
)

ID = Column("ID", "NUMBER(38,0)")


@pytest.fixture
def package(source: Source) -> Path:
    return source.package(ID, Column("DAY", "DATE"), increment_key="DAY")


def connection_of(publisher: Publisher, datasource: Any) -> Any:
    publisher.server.datasources.populate_connections(datasource)
    return datasource.connections[0]


@pytest.mark.parametrize("in_pieces", [False, True], ids=["one request", "pieces"])
def test_the_stored_package_is_what_was_sent(
    publisher: Publisher, package: Path, admin: Admin, monkeypatch: pytest.MonkeyPatch, *, in_pieces: bool
) -> None:
    if in_pieces:
        with zipfile.ZipFile(package, "a") as archive:
            archive.writestr("Data/padding", bytes(range(256)) * 4096 * 3)
        monkeypatch.setenv("TSC_FILESIZE_LIMIT_MB", "0")
        monkeypatch.setenv("TSC_CHUNK_SIZE_MB", "1")
    admin.forget_calls()
    datasource = publisher.publish(package)
    assert publisher.download(datasource).read_bytes() == package.read_bytes()
    pieces = [call for call in admin.calls() if call["route"] == "append_upload"]
    assert len(pieces) == (4 if in_pieces else 0)


def test_a_published_datasource_tells_what_it_is(publisher: Publisher, package: Path) -> None:
    published = publisher.publish(package)
    datasource = publisher.server.datasources.get_by_id(published.id)
    assert (datasource.name, datasource.project_id) == ("Orders", publisher.project.id)
    assert (datasource.owner_id, datasource.has_extracts) == (publisher.server.user_id, True)
    assert datasource.datasource_type == "snowflake"
    assert datasource.webpage_url == f"{publisher.sandbox.tableau_url}/#/datasources/{datasource.content_url}"
    assert published.webpage_url == datasource.webpage_url
    connection = connection_of(publisher, datasource)
    assert (connection.connection_type, connection.embed_password) == ("snowflake", False)
    assert connection.server_address == "sandbox.snowflakecomputing.com"


def test_a_name_is_not_overwritten_unless_asked(publisher: Publisher, package: Path) -> None:
    publisher.publish(package)
    with pytest.raises(ServerResponseError, match="403007"):
        publisher.publish(package)


def test_overwriting_keeps_the_id_and_resets_credentials_owner_and_tags(publisher: Publisher, package: Path) -> None:
    server = publisher.server
    first = publisher.publish(package, connection_credentials=publisher.credentials)
    first.tags = {"gold", "two words"}
    first.certified, first.description = True, "kept"
    reader = next(user for user in server.users.all() if user.name == publisher.sandbox.identity.reader_user)
    first.owner_id = reader.id
    server.datasources.update(first)
    before = server.datasources.get_by_id(first.id)
    assert (before.tags, before.owner_id) == ({"gold", "two words"}, reader.id)
    assert connection_of(publisher, before).embed_password is True

    publisher.publish(package, mode=OVERWRITE)

    after = server.datasources.get_by_id(first.id)
    assert (after.id, after.tags, after.owner_id) == (first.id, set(), server.user_id)
    assert connection_of(publisher, after).embed_password is False
    assert (after.certified, after.description) == (True, "kept")


def test_credentials_passed_while_overwriting_are_embedded(publisher: Publisher, package: Path) -> None:
    publisher.publish(package)
    credentials = TSC.ConnectionCredentials("SOMEBODY", "secret", embed=True)
    datasource = publisher.publish(package, mode=OVERWRITE, connection_credentials=credentials)
    stored = connection_of(publisher, datasource)
    assert (stored.username, stored.embed_password, stored.password) == ("SOMEBODY", True, None)


@pytest.mark.parametrize("size", ["one request", "pieces"])
def test_a_datasource_has_no_connections_in_a_publish(
    publisher: Publisher, package: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    if size == "pieces":
        monkeypatch.setenv("TSC_FILESIZE_LIMIT_MB", "0")
    connection = TSC.ConnectionItem()
    connection.server_address = "sandbox.snowflakecomputing.com"
    connection.connection_credentials = TSC.ConnectionCredentials("SOMEBODY", "secret", embed=True)
    with pytest.raises(ServerResponseError, match="400000: Bad Request") as refused:
        publisher.publish(package, connections=[connection])
    assert "unexpected element 'connections' in tsRequest/datasource" in refused.value.detail


def test_of_several_connections_the_first_gets_the_credentials_of_a_publish(
    publisher: Publisher, source: Source
) -> None:
    package = rewritten(source.package(ID), publisher.folder / "two.tdsx", edit=with_second_connection)
    datasource = publisher.publish(package, connection_credentials=publisher.credentials)
    publisher.server.datasources.populate_connections(datasource)
    assert [connection.embed_password for connection in datasource.connections] == [True, False]


def test_a_connections_credentials_can_be_changed_later(publisher: Publisher, package: Path) -> None:
    datasource = publisher.publish(package)
    connection = connection_of(publisher, datasource)
    connection.username, connection.password, connection.embed_password = "LATER", "secret", True
    updated = publisher.server.datasources.update_connection(datasource, connection)
    assert (updated.username, updated.embed_password) == ("LATER", True)


def test_several_connections_are_changed_in_one_call(publisher: Publisher, package: Path) -> None:
    datasource = publisher.publish(package)
    connection = connection_of(publisher, datasource)
    changed = publisher.server.datasources.update_connections(
        datasource, [connection.id], username="BOTH", password="secret", embed_password=True
    )
    assert [(item.id, item.username, item.embed_password) for item in changed] == [(connection.id, "BOTH", True)]


def test_every_publish_is_a_revision_and_old_ones_can_be_downloaded(
    publisher: Publisher, source: Source, package: Path
) -> None:
    first = package.read_bytes()
    datasource = publisher.publish(package)
    second = source.package(ID, caption="Other").read_bytes()
    publisher.publish(package, mode=OVERWRITE)
    publisher.server.datasources.populate_revisions(datasource)
    assert [(entry.revision_number, entry.current) for entry in datasource.revisions] == [("1", False), ("2", True)]
    assert publisher.download(datasource, "1").read_bytes() == first
    assert publisher.download(datasource, "2").read_bytes() == second
    assert publisher.download(datasource).read_bytes() == second


def test_a_package_can_be_downloaded_without_its_extract(publisher: Publisher, package: Path) -> None:
    datasource = publisher.publish(package)
    with zipfile.ZipFile(publisher.download(datasource, include_extract=False)) as archive:
        assert archive.namelist() == ["Orders.tds"]


def test_publishing_as_a_job_answers_before_it_is_done(publisher: Publisher, package: Path) -> None:
    job = publisher.publish(package, as_job=True, connection_credentials=publisher.credentials)
    assert (job.type, job.finish_code) == ("PublishDatasource", -1)
    assert publisher.finished(job.id).finish_code == TSC.JobItem.FinishCode.Success
    found = list(publisher.server.datasources.filter(project_name=publisher.project.name))
    assert publisher.download(found[0]).read_bytes() == package.read_bytes()
    assert connection_of(publisher, found[0]).embed_password is True


def test_a_bare_extract_becomes_a_package(publisher: Publisher, hyper: Any, look: Looker) -> None:
    file = publisher.folder / "bare.hyper"
    with Connection(hyper, file, CreateMode.CREATE) as connection:
        connection.execute_command('CREATE TABLE "public"."t" AS (SELECT 7 AS "n")')
    datasource = publisher.publish(file)
    assert (datasource.datasource_type, datasource.has_extracts) == ("hyper", True)
    downloaded = publisher.download(datasource)
    assert look.rows(downloaded, 'SELECT "n" FROM "public"."t"') == [[7]]
    # What the server made up can be published again.
    publisher.publish(downloaded, mode=OVERWRITE)
    job = publisher.refresh(datasource)
    assert job.finish_code == TSC.JobItem.FinishCode.Failed
    assert "no connection" in job.notes[0]


def test_a_document_without_an_extract_is_published_as_it_is(publisher: Publisher) -> None:
    datasource = publisher.publish_live("Live")
    assert datasource.has_extracts is False
    assert publisher.download(datasource).read_bytes() == (publisher.folder / "live.tds").read_bytes()


def test_tags_come_and_go(publisher: Publisher) -> None:
    datasource = publisher.publish_live("Tagged")
    endpoint = publisher.server.datasources
    assert endpoint.add_tags(datasource, ["a/b", "c, d"]) == {"a/b", "c, d"}
    endpoint.delete_tags(datasource, "a/b")
    assert endpoint.get_by_id(datasource.id).tags == {"c, d"}


def test_a_deleted_datasource_is_gone(publisher: Publisher) -> None:
    datasource = publisher.publish_live("Short-lived")
    publisher.server.datasources.delete(datasource.id)
    with pytest.raises(ServerResponseError, match="404004"):
        publisher.server.datasources.get_by_id(datasource.id)


def test_a_datasource_moves_and_is_renamed_but_never_onto_another(publisher: Publisher) -> None:
    first, second = publisher.publish_live("One"), publisher.publish_live("Two")
    second.name = "Three"
    publisher.server.datasources.update(second)
    assert publisher.server.datasources.get_by_id(second.id).name == "Three"
    first.name = "Three"
    with pytest.raises(ServerResponseError, match="409006"):
        publisher.server.datasources.update(first)


def test_a_publish_into_a_missing_project_is_refused(publisher: Publisher, package: Path) -> None:
    item = TSC.DatasourceItem("00000000-0000-4000-8000-000000000000", "Orders")
    with pytest.raises(ServerResponseError, match="404005"):
        publisher.server.datasources.publish(item, str(package), "CreateNew")


def test_an_upload_session_does_not_live_for_ever(
    publisher: Publisher, package: Path, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSC_FILESIZE_LIMIT_MB", "0")
    admin.set(upload_session_minutes=0)
    with pytest.raises(ServerResponseError, match="404015"):
        publisher.publish(package)


def upload_url(publisher: Publisher, upload_id: str = "") -> str:
    server = publisher.server
    return f"{server.baseurl}/sites/{server.site_id}/fileUploads/{upload_id}".rstrip("/")


def start_upload(publisher: Publisher) -> str:
    answer = requests.post(upload_url(publisher), headers={"x-tableau-auth": publisher.server.auth_token}, timeout=30)
    return re.search(r'uploadSessionId="([^"]+)"', answer.text)[1]


def append(publisher: Publisher, upload_id: str, piece: bytes) -> int:
    head = b'--B\r\nContent-Disposition: name="tableau_file"; filename="f"\r\n\r\n'
    headers = {
        "x-tableau-auth": publisher.server.auth_token,
        "content-type": "multipart/mixed; boundary=B",
    }
    url = upload_url(publisher, upload_id)
    return requests.put(url, data=head + piece + b"\r\n--B--", headers=headers, timeout=30).status_code


def uploaded_files(publisher: Publisher) -> set[Path]:
    return set((publisher.sandbox.home.data("tableau") / "incoming").iterdir())


def test_of_pieces_sent_at_once_only_those_that_were_accepted_are_in_the_file(publisher: Publisher) -> None:
    before = uploaded_files(publisher)
    upload_id = start_upload(publisher)
    (file,) = uploaded_files(publisher) - before
    pieces = [bytes([number]) * 2_000_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda piece: append(publisher, upload_id, piece), pieces))
    accepted = [piece for piece, status in zip(pieces, statuses, strict=True) if status == 200]
    assert set(statuses) <= {200, 409}
    assert accepted
    content = file.read_bytes()
    assert sorted(content[at : at + 2_000_000] for at in range(0, len(content), 2_000_000)) == accepted


def test_an_upload_that_nobody_finishes_is_deleted(publisher: Publisher, admin: Admin) -> None:
    before = uploaded_files(publisher)
    upload_id = start_upload(publisher)
    assert append(publisher, upload_id, b"piece") == 200
    (abandoned,) = uploaded_files(publisher) - before
    admin.set(upload_session_minutes=0)
    start_upload(publisher)
    assert not abandoned.exists()


def test_of_many_who_publish_one_name_at_once_exactly_one_wins(publisher: Publisher) -> None:
    publisher.publish_live("Another")

    def attempt(_: int) -> str:
        try:
            return str(publisher.publish(publisher.folder / "live.tds", "Contested").id)
        except ServerResponseError as error:
            return error.code

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(attempt, range(8)))
    assert outcomes.count("403007") == 7


def test_many_clients_work_side_by_side(publisher: Publisher, source: Source, package: Path, look: Looker) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0), DAY DATE)")
    source.sql("INSERT INTO {t} VALUES (1, '2023-01-01')")

    def work(number: int) -> list[Any]:
        datasource = publisher.publish(package, f"Orders {number}", connection_credentials=publisher.credentials)
        assert publisher.refresh(datasource).finish_code == TSC.JobItem.FinishCode.Success
        publisher.refresh(datasource, incremental=True)
        downloaded = publisher.download(datasource)
        publisher.publish(downloaded, f"Orders {number}", mode=OVERWRITE)
        return look.events(downloaded)

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(work, range(6)))
    assert outcomes == [[("create", "#2023-01-01#", "1"), ("increment", "#2023-01-01#", "0")]] * 6
