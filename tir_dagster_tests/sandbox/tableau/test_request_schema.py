"""What the stand-in takes is what Tableau's schema allows: all that the client library sends, and nothing beside it."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.server import RequestFactory

from tir_dagster.sandbox.tableau.app import OPERATIONS
from tir_dagster.sandbox.tableau.request_schema import REQUESTS, check_request
from tir_dagster.sandbox.tableau.wire import ApiError, read_request

LUID = str(uuid.UUID(int=1))
NEW_SERVER = SimpleNamespace(check_at_least_version=lambda _: True)
DATASOURCE = f'<datasource name="Orders">%s<project id="{LUID}"/></datasource>'


def test_every_call_that_takes_xml_is_in_the_table_and_no_other() -> None:
    takes_xml = {entry.name for entry in OPERATIONS if entry.method in ("POST", "PUT") and not entry.json}
    assert set(REQUESTS) == takes_xml
    assert list(REQUESTS) == sorted(REQUESTS)


# What tableauserverclient sends


def datasource_item() -> TSC.DatasourceItem:
    item = TSC.DatasourceItem(LUID, "Orders")
    item._id, item.owner_id, item.description = LUID, LUID, "All orders"
    item.certified, item.certification_note, item.encrypt_extracts = True, "checked", False
    item.use_remote_query_agent, item.ask_data_enablement = False, TSC.DatasourceItem.AskDataEnablement.SiteDefault
    return item


def workbook_item() -> TSC.WorkbookItem:
    item = TSC.WorkbookItem(LUID, "Book", show_tabs=True)
    item.description, item.hidden_views, item.thumbnails_user_id = "All orders", ["Details"], LUID
    return item


def connection_item() -> TSC.ConnectionItem:
    item = TSC.ConnectionItem()
    item.server_address, item.server_port, item.username, item.password = "db.example.com", "443", "TIR", "secret"
    item.embed_password, item.auth_type, item.query_tagging = True, "auth-keypair", False
    return item


def schedules() -> list[TSC.ScheduleItem]:
    at = dt.time(3)
    intervals = [
        TSC.HourlyInterval(at, dt.time(23), 0.25),
        TSC.HourlyInterval(at, dt.time(23), 12),
        TSC.DailyInterval(at, 24),
        TSC.DailyInterval(at),
        TSC.WeeklyInterval(at, "Monday", "Sunday"),
        TSC.MonthlyInterval(at, "LastDay"),
        TSC.MonthlyInterval(at, 31),
    ]
    kind, order = TSC.ScheduleItem.Type.Extract, TSC.ScheduleItem.ExecutionOrder.Parallel
    return [TSC.ScheduleItem("Nightly", 50, kind, order, interval) for interval in intervals]


def task(schedule: TSC.ScheduleItem | None) -> TSC.TaskItem:
    return TSC.TaskItem(None, "FullRefresh", None, schedule_item=schedule, target=TSC.Target(LUID, "datasource"))


def subscription() -> TSC.SubscriptionItem:
    item = TSC.SubscriptionItem("Daily", LUID, LUID, TSC.Target(LUID, "Workbook"))
    item.attach_image, item.attach_pdf, item.message, item.send_if_view_empty = True, False, "Hello", True
    item.page_orientation, item.page_size_option = "Portrait", "A4"
    return item


def webhook(event: str) -> TSC.WebhookItem:
    item = TSC.WebhookItem()
    item.name, item.event, item.url = "Told", event, "https://hooks.example.com/x"
    return item


def published(credentials: TSC.ConnectionCredentials | None) -> bytes:
    return RequestFactory.Datasource._generate_xml(datasource_item(), credentials)


SENT: dict[str, Callable[[], list[bytes]]] = {
    "add_tags": lambda: [RequestFactory.Tag.add_req({"nightly", "a, b"})],
    "add_to_schedule": lambda: [RequestFactory.Schedule.add_datasource_req(LUID)],
    "append_upload": lambda: [b""],
    "cancel_job": lambda: [b""],
    "create_project": lambda: [
        RequestFactory.Project.create_req(TSC.ProjectItem("Sales", "Of all", "ManagedByOwner", LUID))
    ],
    "create_schedule": lambda: [RequestFactory.Schedule.create_req(item) for item in schedules()],
    "create_subscription": lambda: [RequestFactory.Subscription.create_req(subscription())],
    "create_task": lambda: [RequestFactory.Task.create_extract_req(task(item)) for item in [None, *schedules()]],
    "create_webhook": lambda: [RequestFactory.Webhook.create_req(webhook("datasource-refresh-succeeded"))],
    "publish": lambda: [published(None), published(TSC.ConnectionCredentials("TIR", "secret", oauth=True))],
    "publish_workbook": lambda: [
        RequestFactory.Workbook._generate_xml(workbook_item()),
        RequestFactory.Workbook._generate_xml(workbook_item(), [connection_item()]),
    ],
    "refresh": lambda: [
        b"",
        RequestFactory.Task.refresh_req(False, NEW_SERVER),
        RequestFactory.Task.refresh_req(True, NEW_SERVER),
    ],
    "run_task": lambda: [RequestFactory.Task.run_req(task(None))],
    "sign_in": lambda: [
        RequestFactory.Auth.signin_req(auth)
        for auth in (
            TSC.TableauAuth("user", "secret", "site", LUID),
            TSC.PersonalAccessTokenAuth("token", "secret", "site"),
            TSC.JWTAuth("header.claims.signature", site_id="site"),
        )
    ],
    "sign_out": lambda: [b""],
    "start_upload": lambda: [b""],
    "switch_site": lambda: [RequestFactory.Auth.switch_req("site")],
    "update_connection": lambda: [RequestFactory.Connection.update_req(connection_item())],
    "update_connections": lambda: [
        RequestFactory.Datasource.update_connections_req([LUID, LUID], "auth-keypair", "TIR", "secret", True)
    ],
    "update_datasource": lambda: [RequestFactory.Datasource.update_req(datasource_item())],
    "update_schedule": lambda: [RequestFactory.Schedule.update_req(item) for item in schedules()],
    # The client library has no call for it.
    "update_webhook": lambda: [b'<tsRequest><webhook isEnabled="true"/></tsRequest>'],
}


@pytest.mark.parametrize("operation", REQUESTS)
def test_what_the_client_library_sends_is_allowed(operation: str) -> None:
    for body in SENT[operation]():
        check_request(operation, read_request(body))


# What nobody may send


@pytest.mark.parametrize(
    ("operation", "inner", "problem"),
    [
        (
            "publish",
            DATASOURCE % '<connections><connection serverAddress="x"/></connections>',
            "unexpected element 'connections' in tsRequest/datasource",
        ),
        ("publish", DATASOURCE % ("<connectionCredentials/>" * 2), "'connectionCredentials' .* occurs 2 times"),
        ("publish", DATASOURCE % '<connectionCredentials user="x"/>', "unexpected attribute 'user'"),
        ("publish", '<datasource name="x"><project id="12"/></datasource>', "value of .*project@id is no luid"),
        ("publish", '<datasource name="x">words</datasource>', "unexpected text in tsRequest/datasource"),
        ("publish", '<datasource xmlns="urn:x" name="x"/>', "'datasource' of another namespace"),
        ("refresh", "<connection/>", "unexpected element 'connection' in tsRequest. Expected .*'extractRefresh'"),
        ("refresh", '<extractRefresh incremental="perhaps"/>', "is no boolean"),
        ("run_task", "<extractRefresh/>", "Expected elements are none"),
        ("list_jobs", "<job/>", "unexpected element 'job'"),
        ("add_tags", "<tags><tag/></tags>", "attribute 'label' of tsRequest/tags/tag is missing"),
        ("update_connection", '<connection authentication="x"/>', "unexpected attribute 'authentication'"),
        (
            "update_connections",
            "<connectionLUIDs><connectionLUID>12</connectionLUID></connectionLUIDs>",
            "connectionLUID is no luid",
        ),
        ("create_schedule", '<schedule name="x"><frequencyDetails start="3 am"/></schedule>', "start is no time"),
    ],
)
def test_what_the_schema_does_not_have_is_refused(operation: str, inner: str, problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as refused:
        check_request(operation, read_request(f"<tsRequest>{inner}</tsRequest>".encode()))
    assert refused.value.code == 400000


def test_a_wrong_value_is_not_repeated_in_the_answer() -> None:
    with pytest.raises(ApiError) as refused:
        check_request("refresh", read_request(b'<tsRequest><extractRefresh incremental="geheim"/></tsRequest>'))
    assert "geheim" not in str(refused.value)


def test_the_names_of_the_instance_namespace_are_always_allowed() -> None:
    xsi = 'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:schemaLocation="http://tableau.com/api x.xsd"'
    body = f'<tsRequest xmlns="http://tableau.com/api" {xsi}><!-- by hand --><extractRefresh/></tsRequest>'
    root: Any = read_request(body.encode())
    check_request("refresh", root)
