"""Over HTTPS, as every real server is spoken to: a connection that is cut is no refusal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tir_dagster.retries import RetryPolicy
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.publishing import publish
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.tableau.conftest import Orders
from tir_dagster_tests.tunnel import Tunnel, self_signed, tunnelled


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return self_signed(tmp_path)


@pytest.fixture
def tunnel(sandbox: Sandbox, certificate: Path) -> Iterator[Tunnel]:
    with tunnelled(sandbox.tableau_url, certificate) as made:
        yield made


def test_only_the_piece_that_was_cut_is_sent_again(
    tunnel: Tunnel,
    certificate: Path,
    access: TableauAccess,
    quick: RetryPolicy,
    orders: Orders,
    admin: Admin,
    large: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    tunnel.cut_piece = 2
    admin.forget_calls()
    with TableauClient(replace(access, server_url=tunnel.url), retry=quick) as client:
        publish(client, large, project=orders.project, name="Orders")
    assert tunnel.pieces > 3, "the second piece was sent again"
    assert sum(call["route"] == "start_upload" for call in admin.calls()) == 1, "and the first one was not"
    assert orders.content() == large.read_bytes()
