"""Our webhooks on the stand-in: there once whatever happened before, and errors that say what is missing and no secret."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.retries import RetryPolicy
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.webhooks import (
    FAILED,
    SUCCEEDED,
    BadEventError,
    our_webhooks,
    read_event,
    receiver_url,
    register_webhooks,
    remove_webhooks,
    webhook_secret,
)
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import Admin

SECRET = "s" * 40
URL = f"https://hooks.example.com/tir/{SECRET}"


@pytest.fixture
def label(client: TableauClient) -> Iterator[str]:
    """A name of one's own: the site is everybody's."""
    name = uuid.uuid4().hex[:8]
    yield name
    remove_webhooks(client, name)


def test_one_webhook_per_event_is_registered_listed_and_removed(client: TableauClient, label: str) -> None:
    made = register_webhooks(client, label, URL)
    assert {(hook.event, hook.url, hook.enabled) for hook in made} == {(SUCCEEDED, URL, True), (FAILED, URL, True)}
    assert our_webhooks(client, label) == made
    assert remove_webhooks(client, label) == made
    assert our_webhooks(client, label) == []


def test_registering_again_changes_nothing_and_another_address_replaces(client: TableauClient, label: str) -> None:
    made = register_webhooks(client, label, URL)
    assert register_webhooks(client, label, URL) == made
    elsewhere = f"https://other.example.com/{SECRET}"
    moved = register_webhooks(client, label, elsewhere)
    assert [hook.url for hook in our_webhooks(client, label)] == [elsewhere, elsewhere]
    assert not {hook.id for hook in moved} & {hook.id for hook in made}


def test_what_the_server_disabled_is_shown_and_made_anew(client: TableauClient, label: str, others: TSC.Server) -> None:
    first, _ = register_webhooks(client, label, URL)
    body = '<tsRequest><webhook isEnabled="false" statusChangeReason="Nobody answered."/></tsRequest>'
    headers = {"x-tableau-auth": others.auth_token}
    requests.put(f"{others.webhooks.baseurl}/{first.id}", body, headers=headers, timeout=30).raise_for_status()
    (shown,) = [hook for hook in our_webhooks(client, label) if hook.id == first.id]
    assert (shown.enabled, shown.reason) == (False, "Nobody answered.")
    assert all(hook.enabled for hook in register_webhooks(client, label, URL))
    assert len(our_webhooks(client, label)) == 2


def test_the_webhooks_of_others_are_left_alone(client: TableauClient, label: str) -> None:
    theirs = f"{label}-of-others"
    try:
        register_webhooks(client, theirs, URL)
        register_webhooks(client, label, URL)
        remove_webhooks(client, label)
        assert len(our_webhooks(client, theirs)) == 2
    finally:
        remove_webhooks(client, theirs)


def test_a_lost_answer_leaves_two_webhooks_after_the_next_registration(
    client: TableauClient, label: str, admin: Admin
) -> None:
    admin.fault("cut", when="after", method="POST", path="/webhooks$")
    with pytest.raises(DatasourceError, match="run again"):
        register_webhooks(client, label, URL)
    register_webhooks(client, label, URL)
    assert sorted(hook.event for hook in our_webhooks(client, label)) == [FAILED, SUCCEEDED]


def test_no_text_shows_the_secret(client: TableauClient, label: str) -> None:
    made = register_webhooks(client, label, URL)
    assert SECRET not in f"{made}{[hook.shown_url for hook in made]}"
    assert made[0].shown_url == "https://hooks.example.com/tir/***"
    with pytest.raises(DatasourceError, match="must be https") as caught:
        # The address as it is, which the server refuses and quotes.
        register_webhooks(client, label, f"http://hooks.example.com/{SECRET}")
    assert SECRET not in str(caught.value)


def test_somebody_who_is_no_administrator_is_told(sandbox: Sandbox, quick: RetryPolicy) -> None:
    token = TableauToken(*sandbox.new_token(sandbox.identity.reader_user))
    with (
        TableauClient(TableauAccess(sandbox.tableau_url, sandbox.identity.site, token), retry=quick) as client,
        pytest.raises(DatasourceError, match="Only administrators of the site use webhooks"),
    ):
        our_webhooks(client, "anybody")


def test_a_server_too_old_for_webhooks_is_told(access: TableauAccess, admin: Admin) -> None:
    admin.set(rest_version="3.5")
    with TableauClient(access) as client, pytest.raises(DatasourceError, match=r"REST 3\.5.* came with 3\.6"):
        our_webhooks(client, "anybody")


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("http://hooks.example.com/tir", "is not https"),
        ("https://", "is not an address"),
        ("hooks.example.com", "is not an address"),
        ("https://[::1", "is not an address"),
        ("https://hooks.example.com/?a=b", "without user, query or fragment"),
        ("https://ann:pass@hooks.example.com/", "without user, query or fragment"),
    ],
)
def test_an_address_that_tableau_cannot_call_is_refused(address: str, told: str) -> None:
    with pytest.raises(DatasourceError, match=told) as caught:
        receiver_url(address, SECRET)
    assert "pass@" not in str(caught.value)


def test_the_secret_is_the_last_part_of_the_address() -> None:
    assert receiver_url("https://hooks.example.com/tir/", SECRET) == URL
    assert receiver_url("http://127.0.0.1:8642", SECRET) == f"http://127.0.0.1:8642/{SECRET}"


@pytest.mark.parametrize("secret", [None, "", "short", "x" * 31, f"{'x' * 40}/..", f"{'x' * 40}?"])
def test_a_missing_or_weak_secret_is_refused_with_the_way_to_make_one(secret: str | None) -> None:
    with pytest.raises(DatasourceError, match="openssl rand -hex 32") as caught:
        webhook_secret({} if secret is None else {"TIR_WEBHOOK_SECRET": secret})
    assert "xxx" not in str(caught.value)


# What a webhook brings


def event(**more: Any) -> bytes:
    known = {
        "event_type": SUCCEEDED,
        "resource_name": "Orders",
        "resource_luid": "1",
        "created_at": "2026-01-02T03:04:05Z",
    }
    return json.dumps({**known, **more}).encode()


def test_a_refresh_is_read_with_its_time_in_utc() -> None:
    read = read_event(event(created_at="2026-01-02T05:04:05.250+02:00", more="whatever"))
    assert read is not None
    assert (read.kind, read.datasource_id, read.name, read.succeeded) == (SUCCEEDED, "1", "Orders", True)
    assert read.at.isoformat() == "2026-01-02T03:04:05.250000+00:00"


@pytest.mark.parametrize(
    "body", [b"{}", event(event_type="WorkbookRefreshFailed"), event(event_type="DatasourceDeleted")]
)
def test_a_test_and_other_events_are_nothing_to_note(body: bytes) -> None:
    assert read_event(body) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        b'"text"',
        event(event_type=None),
        event(resource_luid=["1"]),
        event(resource_luid="x" * 301),
        event(created_at="yesterday"),
        event(created_at="0001-01-01T00:00:00+23:00"),
    ],
    ids=range(11),
)
def test_what_tableau_would_not_send_is_refused(body: bytes) -> None:
    with pytest.raises(BadEventError):
        read_event(body)
