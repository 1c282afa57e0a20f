"""A package there and back again: progress is told, everything around it stays, and a server that says no changes nothing."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError, MachineError
from tir_dagster.files import VirtualFile
from tir_dagster.hyper.package.package import read_package
from tir_dagster.refresh.context import ServerLook
from tir_dagster.refresh.datasource import credentials_for, fetch_shell
from tir_dagster.refresh.deliveries import whole
from tir_dagster.refresh.deliveries.settings import is_remembered, remember
from tir_dagster.refresh.deliveries.whole import Delivered, PublishTarget, deliver, finish_delivery, publish_over
from tir_dagster.retries import RetryPolicy
from tir_dagster.spec.extract import Credentials, ExtractSpec
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster.tableau import datasources
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, look_for_datasource, server_version, settled
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.outcome import ForeignPublishError
from tir_dagster.tableau.publishing import Parcel, publish
from tir_dagster.tableau.settings import credential_to_publish, keep
from tir_dagster_tests.sandbox.tableau.helpers import Admin, rewritten, with_second_connection
from tir_dagster_tests.tableau.conftest import Naps, Orders

MEGABYTES = 9


@pytest.fixture
def spec(orders: Orders) -> ExtractSpec:
    datasource = {"name": "Orders", "project": orders.project.path}
    value = {"name": "orders", "source": "A.B.C", "row_key": "ID", "datasource": datasource}
    return spec_from_mapping(value, "a test")


@pytest.fixture
def look(orders: Orders, tmp_path: Path) -> ServerLook:
    """A datasource that is large enough for an upload in pieces, tagged and certified."""
    image = random.Random(1).randbytes(MEGABYTES * 2**20)
    file = rewritten(orders.packages / "ours.tdsx", tmp_path / "large.tdsx", add=[("Image/logo.png", image)])
    credential = orders.credential
    options: dict[str, Any] = {"connections": [credential], "servers": [credential.server_address]}
    made = publish(orders.client, file, project=orders.project, name="Orders", **options)
    orders.others.datasources.add_tags(made.id, ["nightly"])
    item = orders.others.datasources.get_by_id(made.id)
    item.description, item.certified, item.certification_note = "All orders", True, "checked"
    orders.others.datasources.update(item)
    return ServerLook(orders.project, orders.now())


@pytest.fixture
def client(access: Any, quick: RetryPolicy) -> Any:
    """One on whose clock six seconds pass between any two looks."""
    retry = RetryPolicy(tries=3, backoff=quick.backoff, sleep=quick.sleep, clock=itertools.count(0, 6).__next__)
    with TableauClient(access, retry=retry) as client:
        yield client


def found_in(look: ServerLook) -> FoundDatasource:
    assert look.datasource is not None
    return look.datasource


def test_a_republish_tells_how_far_it_is_and_keeps_everything(
    orders: Orders, spec: ExtractSpec, look: ServerLook, tmp_path: Path
) -> None:
    lines: list[str] = []
    delivered = redeliver(orders, spec, look, tmp_path, lines.append)
    assert (delivered.warnings, delivered.doubtful) == ((), False)
    assert (delivered.datasource.revision, keep(delivered.datasource)) == (2, keep(found_in(look)))
    verbs = [line.split()[0] for line in lines]
    assert list(dict.fromkeys(verbs)) == ["downloading", "publishing", "uploading"]
    assert lines[0].endswith(" of 10 MB")


def redeliver(
    orders: Orders, spec: ExtractSpec, look: ServerLook, folder: Path, log: Callable[[str], None] = lambda _: None
) -> Delivered:
    shell, hyper = fetch_shell(orders.client, found_in(look), folder / "download", log=log)
    return deliver(
        orders.client,
        spec,
        look,
        hyper=hyper,
        shell=shell,
        rows=0,
        credentials=[orders.credential],
        home=folder,
        log=log,
    )


def test_a_file_that_is_written_to_while_it_is_sent_is_not_published(
    orders: Orders, spec: ExtractSpec, look: ServerLook, tmp_path: Path
) -> None:
    shell, hyper = fetch_shell(orders.client, found_in(look), tmp_path / "download")

    def write(_: str) -> None:
        with hyper.open("r+b") as opened:
            opened.seek(100)
            opened.write(b"changed")
        os.utime(hyper, ns=(1, 1))

    with pytest.raises(MachineError, match="written to while it was being sent"):
        deliver(
            orders.client,
            spec,
            look,
            hyper=hyper,
            shell=shell,
            rows=0,
            credentials=[orders.credential],
            home=tmp_path,
            log=write,
        )
    assert orders.now().revision == found_in(look).revision


def test_nothing_is_written_to_send_a_package(
    orders: Orders, spec: ExtractSpec, look: ServerLook, tmp_path: Path
) -> None:
    shell, hyper = fetch_shell(orders.client, found_in(look), tmp_path / "download")
    there, seen = set(tmp_path.rglob("*")), set[Path]()
    deliver(
        orders.client,
        spec,
        look,
        hyper=hyper,
        shell=shell,
        rows=0,
        credentials=[orders.credential],
        home=tmp_path,
        log=lambda _: None,
        check=lambda: seen.update(tmp_path.rglob("*")),
    )
    assert {path.suffix for path in seen - there} == {".json"}, "what is to be put back, and no package"


def test_a_publish_is_settled_a_second_after_it_was_first_seen(orders: Orders, access: TableauAccess) -> None:
    orders.create()
    naps: list[float] = []
    now = [100.0]
    policy = RetryPolicy(sleep=naps.append, clock=lambda: now[0])
    with TableauClient(access, retry=policy) as client:
        published = look_for_datasource(client, project=orders.project, name="Orders")
        assert published is not None
        now[0] += 0.4
        settled(client, published, earlier=published)
        now[0] += 5.0
        settled(client, published, earlier=published)
        settled(client, published)
        elsewhere = replace(published, updated_at=None)
        settled(client, elsewhere, earlier=published)
    assert naps == [pytest.approx(0.7), 1.1, 1.1], "what was seen long ago needs no wait, another version the whole one"


def test_what_people_set_during_the_upload_is_kept(
    orders: Orders, spec: ExtractSpec, look: ServerLook, tmp_path: Path
) -> None:
    tag = iter([lambda: orders.others.datasources.add_tags(found_in(look).id, ["urgent"])])
    redeliver(orders, spec, look, tmp_path, lambda _: next(tag, lambda: None)() and None)
    assert orders.now().tags == {"nightly", "urgent"}


def test_somebody_elses_publish_right_after_ours_is_not_confirmed_as_ours(
    orders: Orders, spec: ExtractSpec, look: ServerLook, naps: Naps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Naps.__call__

    def nap(self: Naps, seconds: float) -> None:
        # The one pause of a delivery without trouble: until the second is over in which it was published.
        orders.publish_by_others()
        real(self, seconds)

    monkeypatch.setattr(Naps, "__call__", nap)
    monkeypatch.setattr(datasources, "_SETTLE_SECONDS", 60.0)
    with pytest.raises(ForeignPublishError, match=r"\(revision 2, now 3\)\. Nothing is confirmed\. Run again"):
        redeliver(orders, spec, look, tmp_path)


@pytest.mark.parametrize("shown", [True, False])
def test_a_publish_is_in_doubt_where_nobody_can_tell_what_happened_after_it(
    orders: Orders,
    spec: ExtractSpec,
    look: ServerLook,
    admin: Admin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shown: bool,
) -> None:
    if shown:
        # Something moves it without a revision, such as a refresh by Tableau.
        monkeypatch.setattr(Naps, "__call__", lambda *_: describe_later(orders, admin))
        monkeypatch.setattr(datasources, "_SETTLE_SECONDS", 60.0)
    else:
        admin.fault("status", path="/revisions$", status=403, code="403004", times=99)
        look = ServerLook(look.project, orders.now())
    assert redeliver(orders, spec, look, tmp_path).doubtful


def test_a_publish_whose_answer_was_lost_is_in_doubt(
    orders: Orders, spec: ExtractSpec, look: ServerLook, admin: Admin, tmp_path: Path
) -> None:
    admin.fault("cut", method="POST", path="/datasources$", when="after")
    assert redeliver(orders, spec, look, tmp_path).doubtful


def test_what_changed_while_it_was_looked_at_is_not_confirmed(
    orders: Orders, spec: ExtractSpec, look: ServerLook, admin: Admin, tmp_path: Path
) -> None:
    remember(replace(found_in(look), tags=frozenset({"lost"})), tmp_path)
    describe_later(orders, admin)
    with pytest.raises(ForeignPublishError, match=r"while it was being looked at .* Nothing is confirmed"):
        finish_delivery(orders.client, spec, look, home=tmp_path, env={}, foreign=False, landed=True)
    assert is_remembered(tmp_path), "the next one puts it back"


def describe_later(orders: Orders, admin: Admin) -> None:
    admin.set(clock_offset_seconds=5)
    item = orders.others.datasources.get_by_id(orders.now().id)
    item.description = "All orders since May"
    orders.others.datasources.update(item)


def test_credentials_are_given_to_one_server_only(orders: Orders, spec: ExtractSpec) -> None:
    named = Credentials(username="TIR", password_env="THE_PASSWORD")
    told, env = replace(spec, datasource=replace(spec.datasource, credentials=named)), {"THE_PASSWORD": "secret"}
    found = orders.create(connections=[orders.credential])
    (first,) = found.connections
    twice = replace(found, connections=(first, replace(first, server_address=first.server_address.upper())))
    assert {one.password for one in credentials_for(told, twice, env)} == {"secret"}
    elsewhere = replace(first, type="postgres", server_address="db.example.com")
    with pytest.raises(
        DatasourceError, match=r"for 2 servers \(postgres db\.example\.com; .*Nothing was touched"
    ) as caught:
        credentials_for(told, replace(found, connections=(first, elsewhere)), env)
    assert "secret" not in str(caught.value)
    silent = replace(elsewhere, embed_password=False)
    (only,) = credentials_for(told, replace(found, connections=(first, silent)), env)
    assert only.server_address == first.server_address


@pytest.fixture
def two_connections(orders: Orders, tmp_path: Path) -> ServerLook:
    """A datasource with two connections to the same server, both with a password embedded."""
    address = orders.credential.server_address
    edit = partial(with_second_connection, server=address)
    file = rewritten(orders.packages / "ours.tdsx", tmp_path / "two.tdsx", edit=edit)
    made = publish(orders.client, file, project=orders.project, name="Orders")
    for connection in made.connections:
        set_password(orders, made, connection.id)
    return ServerLook(orders.project, orders.now())


def set_password(orders: Orders, datasource: FoundDatasource, connection_id: str) -> None:
    item = TSC.ConnectionItem()
    item._id, item.username, item.password, item.embed_password = connection_id, "TIR", "secret", True
    orders.others.datasources.update_connection(datasource, item)


@pytest.fixture
def told(spec: ExtractSpec) -> ExtractSpec:
    """The spec, with credentials."""
    named = Credentials(username="TIR", password_env="THE_PASSWORD")
    return replace(spec, datasource=replace(spec.datasource, credentials=named))


def test_each_further_connection_gets_its_password_after_the_publish(
    orders: Orders, told: ExtractSpec, two_connections: ServerLook, admin: Admin, tmp_path: Path
) -> None:
    credentials = credentials_for(told, two_connections.datasource, {"THE_PASSWORD": "secret"})
    shell, hyper = fetch_shell(orders.client, found_in(two_connections), tmp_path / "download")
    options: dict[str, Any] = {"hyper": hyper, "shell": shell, "rows": 0, "home": tmp_path, "log": lambda _: None}
    admin.forget_calls()
    done = deliver(orders.client, told, two_connections, credentials=credentials, **options)
    assert done.warnings == ()
    assert [connection.embed_password for connection in orders.now().connections] == [True, True]
    changes = [call["route"] for call in admin.calls() if call["method"] in ("POST", "PUT")]
    assert changes == ["publish", "update_connection"], "the publish carries the first password"


def test_a_password_that_a_crash_left_out_is_set_by_the_next_run(
    orders: Orders, told: ExtractSpec, two_connections: ServerLook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CrashError(Exception): ...

    def crash(step: str) -> None:
        if step == "landed":
            raise CrashError

    env = {"THE_PASSWORD": "secret"}
    credentials = credentials_for(told, two_connections.datasource, env)
    shell, hyper = fetch_shell(orders.client, found_in(two_connections), tmp_path / "download")
    options: dict[str, Any] = {"hyper": hyper, "shell": shell, "rows": 0, "home": tmp_path, "log": lambda _: None}
    monkeypatch.setattr(whole, "crash_after", crash)
    with pytest.raises(CrashError):
        deliver(orders.client, told, two_connections, credentials=credentials, **options)
    monkeypatch.undo()
    assert [connection.embed_password for connection in orders.now().connections] == [True, False]
    assert credentials_for(told, orders.now(), env), "the next look sees the first password only"
    look = ServerLook(orders.project, orders.now())
    _, warnings = finish_delivery(orders.client, told, look, home=tmp_path, env=env, foreign=False, landed=True)
    assert warnings == ()
    assert [connection.embed_password for connection in orders.now().connections] == [True, True]
    assert not is_remembered(tmp_path)


def test_a_publish_carries_no_password_that_another_server_could_get(
    orders: Orders, told: ExtractSpec, admin: Admin, tmp_path: Path
) -> None:
    file = rewritten(orders.packages / "ours.tdsx", tmp_path / "two.tdsx", edit=with_second_connection)
    made = publish(orders.client, file, project=orders.project, name="Orders")
    ours = next(item for item in made.connections if item.server_address == orders.credential.server_address)
    set_password(orders, made, ours.id)
    look = ServerLook(orders.project, orders.now())
    credentials = credentials_for(told, look.datasource, {"THE_PASSWORD": "secret"})
    assert credential_to_publish(credentials, read_package(file).servers) is None
    shell, hyper = fetch_shell(orders.client, found_in(look), tmp_path / "download")
    options: dict[str, Any] = {"hyper": hyper, "shell": shell, "rows": 0, "home": tmp_path, "log": lambda _: None}
    assert deliver(orders.client, told, look, credentials=credentials, **options).warnings == ()
    embedded = {item.server_address: item.embed_password for item in orders.now().connections}
    assert embedded == {orders.credential.server_address: True, "db.example.com": False}


def test_a_publish_is_written_in_the_order_of_the_schema(orders: Orders, package: Path) -> None:
    file, place = VirtualFile.of(package), (orders.project, "Größe & Co", True)
    root = ET.fromstring(Parcel(file, *place, (), orders.credential).request)
    (datasource,) = root
    assert datasource.attrib == {"name": "Größe & Co"}
    assert [child.tag for child in datasource] == ["connectionCredentials", "project"]
    assert datasource[0].attrib.keys() == {"name", "password", "embed"}
    assert [child.tag for child in ET.fromstring(Parcel(file, *place, (), None).request)[0]] == ["project"]


def test_a_publish_over_tells_how_far_it_is(
    orders: Orders, spec: ExtractSpec, look: ServerLook, tmp_path: Path
) -> None:
    lines: list[str] = []
    place = PublishTarget(spec, look, [orders.credential], tmp_path / "publish", tmp_path, log=lines.append)
    servers = [orders.credential.server_address]
    done = publish_over(orders.client, VirtualFile.of(tmp_path / "large.tdsx"), place, found_in(look), servers=servers)
    assert (done.warnings, keep(done.datasource)) == ((), keep(found_in(look)))
    assert lines
    assert all(line.startswith("uploading ") for line in lines)


@pytest.mark.parametrize(
    ("status", "code", "message", "told"),
    [
        (403, "403004", "User has no write permission on the project", "Give the user behind token"),
        (403, "403132", "The site is over its storage quota", "Make room on the site"),
        (413, "413000", "The file exceeds the limit", "Make room on the site"),
        (400, "400011", "The datasource's type is not allowed", "Fix the reported problem"),
    ],
)
@pytest.mark.parametrize("call", ["/datasources$", "/fileUploads$", "/fileUploads/"])
def test_a_server_that_says_no_is_told_with_datasource_and_cause_and_nothing_changed(
    orders: Orders,
    spec: ExtractSpec,
    look: ServerLook,
    admin: Admin,
    tmp_path: Path,
    status: int,
    code: str,
    message: str,
    told: str,
    call: str,
) -> None:
    shell, hyper = fetch_shell(orders.client, found_in(look), tmp_path / "download")
    for method in ("POST", "PUT"):
        admin.fault("status", method=method, path=call, status=status, code=code, message=message)
    with pytest.raises(RefusedError) as error:
        deliver(
            orders.client,
            spec,
            look,
            hyper=hyper,
            shell=shell,
            rows=0,
            credentials=[orders.credential],
            home=tmp_path,
            log=lambda _: None,
        )
    text = str(error.value)
    assert f"datasource 'Orders' in project {orders.project.path!r}" in text
    assert f"refused ({code}), {message}. {told}" in text
    assert text.endswith(" Nothing was published.")
    admin.clear_faults()
    assert server_version(orders.now()) == look.version
    assert keep(orders.now()) == keep(found_in(look))
    assert is_remembered(tmp_path), "the next refresh looks whether the publish took anything away"
