"""Requests no client should send: each is answered in Tableau's own form, and the store stays whole."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree as ET

import pytest
import requests

from tir_dagster_tests.sandbox.tableau.helpers import Publisher

BOMB = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><tsRequest><x>&b;</x></tsRequest>'
PAYLOAD = b"<tsRequest><datasource name='X'><project id='%s'/></datasource></tsRequest>"


def part(name: str, content: bytes, filename: str = "") -> bytes:
    head = f'--B\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n\r\n'
    return head.encode() + content + b"\r\n"


def send(publisher: Publisher, method: str, path: str, **more: Any) -> tuple[int, str]:
    """Status and error code."""
    server = publisher.server
    url = f"{server.server_address}{path}".replace("{S}", f"/api/3.26/sites/{server.site_id}")
    headers = {"x-tableau-auth": server.auth_token, **more.pop("headers", {})}
    answer = requests.request(method, url, headers=headers, timeout=30, **more)
    root = ET.fromstring(answer.content)
    error = root.find("{http://tableau.com/api}error")
    assert error is not None, answer.text
    assert error.find("{http://tableau.com/api}summary").text
    assert error.find("{http://tableau.com/api}detail").text
    return answer.status_code, error.get("code", "")


def still_whole(publisher: Publisher) -> None:
    datasource = publisher.publish_live("Afterwards")
    assert publisher.download(datasource).read_bytes()
    assert [item.name for item in publisher.server.datasources.filter(project_name=publisher.project.name)] == [
        "Afterwards"
    ]


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/api/9.99/serverInfo", (404, "404950")),
        ("GET", "/api/3.27/serverInfo", (404, "404950")),
        ("GET", "/api/latest/serverInfo", (404, "404950")),
        ("GET", "/api/3.26/nowhere", (404, "404950")),
        ("GET", "/nowhere", (404, "404950")),
        ("PATCH", "{S}/datasources", (405, "405000")),
        ("GET", "/api/3.26/sites/00000000-0000-4000-8000-000000000000/datasources", (404, "404000")),
        ("GET", "{S}/datasources/none", (404, "404004")),
        ("GET", "{S}/datasources/none/content", (404, "404004")),
        ("POST", "{S}/datasources/none/refresh", (404, "404004")),
        ("GET", "{S}/users/none", (404, "404002")),
        ("GET", "{S}/datasources?pageSize=none", (400, "400007")),
        ("GET", "{S}/datasources?pageSize=²", (400, "400007")),
        ("GET", f"{{S}}/datasources?pageSize={'9' * 5000}", (400, "400007")),
        ("GET", "{S}/datasources?pageNumber=0", (400, "400006")),
        ("GET", "{S}/datasources?pageNumber=٣", (400, "400006")),
        ("GET", f"{{S}}/datasources?pageNumber={'9' * 5000}", (400, "400006")),
        ("GET", "{S}/datasources/{D}/revisions/²/content", (400, "400000")),
        ("GET", "{S}/datasources/{D}/revisions/7/content", (404, "404004")),
        ("GET", f"{{S}}/datasources/{{D}}/revisions/{10**19}/content", (404, "404004")),
        ("GET", f"{{S}}/datasources/{{D}}/revisions/{'9' * 5000}/content", (404, "404004")),
        ("GET", "{S}/datasources?filter=colour:eq:red", (400, "400000")),
        ("GET", "{S}/datasources?sort=name:sideways", (400, "400000")),
        ("PUT", "{S}/fileUploads/7720:none-1:0", (400, "400000")),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_unknown_address_or_a_wrong_parameter_is_answered_in_xml(
    publisher: Publisher, method: str, path: str, expected: tuple[int, str]
) -> None:
    datasource = publisher.publish_live("Afterwards")
    assert send(publisher, method, path.replace("{D}", datasource.id)) == expected


@pytest.mark.parametrize("priority", ["²", "0", "101", "9" * 5000], ids=lambda text: text[:4])
def test_a_priority_is_a_number_up_to_100(publisher: Publisher, priority: str) -> None:
    body = f"<tsRequest><schedule name='x' type='Extract' frequency='Daily' priority='{priority}'/></tsRequest>"
    assert send(publisher, "POST", "/api/3.26/schedules", data=body.encode()) == (400, "400000")


@pytest.mark.parametrize(
    "body",
    [
        b"<tsRequest>",
        b"not xml",
        b"\xff\xfe\x00",
        BOMB,
        b"<other/>",
        b"<tsRequest/>",
        b"<tsRequest><project/></tsRequest>",
    ],
    ids=["open", "text", "bytes", "bomb", "root", "empty", "nameless"],
)
def test_broken_xml_is_a_bad_request(publisher: Publisher, body: bytes) -> None:
    assert send(publisher, "POST", "{S}/projects", data=body) == (400, "400000")
    still_whole(publisher)


def test_a_namespace_in_the_request_is_accepted(publisher: Publisher) -> None:
    server = publisher.server
    name = f"in {publisher.project.name}"
    answer = requests.post(
        f"{server.baseurl}/sites/{server.site_id}/projects",
        data=f'<tsRequest xmlns="http://tableau.com/api"><project name="{name}"/></tsRequest>',
        headers={"x-tableau-auth": server.auth_token},
        timeout=30,
    )
    assert answer.status_code == 201
    assert answer.content.find(b'xmlns="http://tableau.com/api"') > 0


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", "multipart/mixed; boundary=B"),
        (b"anything", "multipart/mixed; boundary=B"),
        (b"--B\r\n", "multipart/mixed; boundary=B"),
        (b"--B\r\nno header\r\n--B--", "multipart/mixed; boundary=B"),
        (part("request_payload", b"<tsRequest"), "multipart/mixed; boundary=B"),
        (part("request_payload", b"<tsRequest") + b"--B--", "multipart/mixed; boundary=B"),
        (part("tableau_datasource", b"x") + b"--B--", "multipart/mixed; boundary=B"),
        (part("request_payload", BOMB) + b"--B--", "multipart/mixed; boundary=B"),
        (b"x", "multipart/mixed"),
        (b"x", "text/xml"),
        (b"x", ""),
    ],
    ids=["empty", "text", "stub", "no header", "no end", "xml", "no payload", "bomb", "no boundary", "type", "none"],
)
def test_a_broken_multipart_request_is_a_bad_request(publisher: Publisher, body: bytes, content_type: str) -> None:
    headers = {"content-type": content_type}
    assert send(publisher, "POST", "{S}/datasources", data=body, headers=headers) == (400, "400000")
    still_whole(publisher)


def test_a_publish_without_a_file_is_a_bad_request(publisher: Publisher) -> None:
    body = part("request_payload", PAYLOAD % publisher.project.id.encode()) + b"--B--"
    headers = {"content-type": "multipart/mixed; boundary=B"}
    assert send(publisher, "POST", "{S}/datasources", data=body, headers=headers) == (400, "400000")
    upload = "{S}/datasources?uploadSessionId=7720:170fe6b1c1c7422dadff20f944d58a52-1:0"
    assert send(publisher, "POST", upload, data=body, headers=headers) == (404, "404015")
    workbook = "{S}/datasources?datasourceType=twbx"
    assert send(publisher, "POST", workbook, data=body, headers=headers) == (400, "400000")
    still_whole(publisher)


def test_a_request_that_is_too_large_is_refused(publisher: Publisher) -> None:
    assert send(publisher, "POST", "{S}/projects", data=b" " * (2 * 1024 * 1024)) == (413, "413000")


def test_a_client_that_hangs_up_leaves_nothing_behind(publisher: Publisher) -> None:
    server = publisher.server
    address = urlsplit(server.server_address)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        head = (
            f"POST /api/3.26/sites/{server.site_id}/datasources HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"
            f"X-Tableau-Auth: {server.auth_token}\r\nContent-Type: multipart/mixed; boundary=B\r\n\r\n--B\r\n"
        )
        connection.sendall(head.encode())
    still_whole(publisher)
    data = publisher.sandbox.home.data("tableau")
    assert not [path for path in (data / "scratch").iterdir() if path.is_file()]
