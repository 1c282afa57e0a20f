"""The channel in docs/alerts.md is a whole one: it is run as it stands there."""

from __future__ import annotations

import email
import email.policy
import re
import socket
import threading
from collections.abc import Iterator
from email.message import EmailMessage
from pathlib import Path
from textwrap import dedent

import pytest

from tir_dagster.alerts.messages import failure_event, success_event
from tir_dagster.alerts.retries import Persistence
from tir_dagster.alerts.sending import channels_of
from tir_dagster.alerts.servicenow import ServiceNowAccess
from tir_dagster.spec.alerts import Alerts, Cause, ServiceNowAlerts, SlackAlerts
from tir_dagster.spec.reading import parse_specs
from tir_dagster_tests.alerts.reports import failed, refreshed
from tir_dagster_tests.spec.sample import GOOD

DOCS = Path(__file__).parents[2] / "docs" / "alerts.md"


def block(beginning: str) -> str:
    """The indented block of the page that begins like this."""
    blocks = re.findall(r"(?:^    .*\n|^\n)+", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    (found,) = [one for one in blocks if dedent(one).lstrip("\n").startswith(beginning)]
    return dedent(found).strip("\n") + "\n"


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EmailMessage]]:
    """A mail server that keeps what it gets."""
    mails: list[EmailMessage] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("SMTP_HOST", "127.0.0.1")
        monkeypatch.setenv("SMTP_PORT", str(listener.getsockname()[1]))
        monkeypatch.setenv("ALERTS_TO", "people@example.com")
        threading.Thread(target=_serve, args=(listener, mails), daemon=True).start()
        yield mails


def _serve(listener: socket.socket, mails: list[EmailMessage]) -> None:
    connection, _ = listener.accept()
    with connection, connection.makefile("rwb", buffering=0) as wire:
        wire.write(b"220 ready\r\n")
        while line := wire.readline():
            word = line.split()[0].upper()
            if word == b"DATA":
                wire.write(b"354 go on\r\n")
                text = b"".join(iter(wire.readline, b".\r\n"))
                mails.append(email.message_from_bytes(text, policy=email.policy.default))
            wire.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")


def test_the_channel_of_the_docs_sends_a_mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mailbox):
    code = block("# my_alerts.py")
    assert (
        len([line for line in code.splitlines() if line.strip() and not line.startswith(("#", "import", "from"))]) <= 10
    )
    (tmp_path / "my_alerts.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    alerts = Alerts(channels=("my_alerts:Mail",))
    (make,) = channels_of(alerts, Persistence(), slack=None, servicenow=ServiceNowAccess("")).values()
    channel = make()
    channel.told(success_event(refreshed("run-1"), None))
    channel.told(failure_event("orders/refresh", [failed("run-2", sentence="The disk is full.")], None))
    (mail,) = mailbox
    assert (mail["Subject"], mail["To"]) == ("orders: the refresh failed", "people@example.com")
    assert "The disk is full." in mail.get_content()


def test_the_declaration_of_the_docs_is_one():
    alerts = block("extracts:").partition("    alerts:\n")[2]
    (spec,) = parse_specs(f"{GOOD}    alerts:\n{alerts}", "docs")
    assert spec.alerts == Alerts(slack=SlackAlerts("#mychannel"), servicenow=ServiceNowAlerts(group="mygroup"))


def test_the_docs_name_every_field_and_every_cause():
    text = DOCS.read_text(encoding="utf-8")
    for name in (
        *Alerts.__dataclass_fields__,
        *SlackAlerts.__dataclass_fields__,
        *ServiceNowAlerts.__dataclass_fields__,
    ):
        assert re.search(rf"`(\w+\.)?{name}`|`{name}\.", text), name
    for cause in Cause:
        assert f"`{cause.name.lower()}`" in text
