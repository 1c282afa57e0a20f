"""Downloads: exactly there, whole, or not at all."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau import transfer
from tir_dagster.tableau.client import TableauClient, Timeouts
from tir_dagster.tableau.datasources import FoundDatasource, FoundProject
from tir_dagster.tableau.publishing import publish
from tir_dagster.tableau.transfer import Fetching, NoExtractError, download, tell_progress
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import LIVE_ONLY, Admin, rewritten
from tir_dagster_tests.tableau.conftest import OTHERS_PACKAGE, Orders
from tir_dagster_tests.tableau.helpers import PASSING, Disk


def test_a_package_lands_at_exactly_the_path_asked_for(orders: Orders, tmp_path: Path) -> None:
    target, seen = tmp_path / "new" / "orders.v1.tdsx", []
    found = orders.create()
    assert download(orders.client, found, target, progress=lambda done, total: seen.append((done, total))) == target
    assert target.read_bytes() == (orders.packages / "ours.tdsx").read_bytes()
    assert [file.name for file in target.parent.iterdir()] == [target.name]
    assert seen[-1] == (target.stat().st_size, target.stat().st_size)


@pytest.mark.parametrize("fault", PASSING)
def test_a_download_survives_what_passes(orders: Orders, admin: Admin, tmp_path: Path, fault: dict[str, Any]) -> None:
    found = orders.create()
    admin.fault(path="/content$", **fault)
    target = download(orders.client, found, tmp_path / "orders.tdsx")
    assert target.read_bytes() == (orders.packages / "ours.tdsx").read_bytes()
    assert admin.faults() == []


@pytest.fixture
def large(orders: Orders, tmp_path_factory: pytest.TempPathFactory) -> tuple[FoundDatasource, bytes]:
    """A datasource of 6 MB, and its package."""
    image = random.Random(1).randbytes(6 * 2**20)
    file = tmp_path_factory.mktemp("large") / "large.tdsx"
    rewritten(orders.packages / "ours.tdsx", file, add=[("Image/logo.png", image)])
    found = publish(orders.client, file, project=orders.project, name="Orders")
    return found, file.read_bytes()


def downloads(admin: Admin) -> list[tuple[int, int]]:
    """Status and megabytes of each."""
    return [(call["status"], call["bytes_out"] // 2**20) for call in admin.calls() if "/content" in call["path"]]


def test_a_download_that_was_cut_goes_on_where_it_ended(
    orders: Orders, large: tuple[FoundDatasource, bytes], admin: Admin, tmp_path: Path
) -> None:
    admin.fault("cut", path="/content$", when="during")
    admin.forget_calls()
    target = download(orders.client, large[0], tmp_path / "orders.tdsx")
    assert target.read_bytes() == large[1]
    (first, _), (second, rest) = downloads(admin)
    assert (first, second) == (200, 206)
    assert rest < 6, "the first half came once"


def test_a_download_may_be_cut_more_often_than_a_call_is_tried_as_long_as_it_gets_on(
    orders: Orders,
    large: tuple[FoundDatasource, bytes],
    admin: Admin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "_GOOD_PART", 2**20)
    admin.fault("cut", path="/content$", when="during", times=orders.client.retry.tries + 1)
    target = download(orders.client, large[0], tmp_path / "orders.tdsx")
    assert (target.read_bytes() == large[1], admin.faults()) == (True, [])
    admin.fault("cut", path="/content$", when="before", times=99)
    with pytest.raises(DatasourceError, match="the connection broke"):
        download(orders.client, large[0], tmp_path / "never.tdsx")


class Meanwhile(TableauClient):
    """Something happens on the server between two tries of a download."""

    happens: Any

    def _once(self, action: Any) -> Any:
        try:
            return super()._once(action)
        except requests.RequestException:
            self.happens()
            raise


def test_two_versions_never_mix_in_one_file(
    orders: Orders, large: tuple[FoundDatasource, bytes], admin: Admin, tmp_path: Path
) -> None:
    admin.fault("cut", path="/content$", when="during")
    with Meanwhile(orders.client.access, retry=orders.client.retry) as client:
        client.happens = orders.publish_by_others
        target = download(client, large[0], tmp_path / "orders.tdsx")
    assert target.read_bytes() == (orders.packages / OTHERS_PACKAGE).read_bytes()


def test_a_server_that_gives_no_parts_is_asked_from_the_first_byte(tmp_path: Path) -> None:
    whole = random.Random(2).randbytes(4 * 2**20)
    answers = [Answer(whole[: 3 * 2**20], {}, cut=True), Answer(whole, {})]
    assert fetched(tmp_path, whole, answers) == [{}, {}], "no ETag: nothing to go on from"


@pytest.mark.parametrize(
    "part",
    [
        {"Content-Range": "bytes 0-4194303/4194304", "ETag": '"a"'},
        {"Content-Range": "bytes 3145728-4194303/4194305", "ETag": '"a"'},
        {"Content-Range": "bytes 3145728-4194303/4194304", "ETag": '"b"'},
        {"Content-Range": "nonsense", "ETag": '"a"'},
    ],
)
def test_a_part_that_does_not_fit_is_not_used(tmp_path: Path, part: dict[str, str]) -> None:
    whole = random.Random(2).randbytes(4 * 2**20)
    answers = [Answer(whole[: 3 * 2**20], {"ETag": '"a"'}, cut=True), Answer(b"x" * 2**20, part), Answer(whole, {})]
    asked = fetched(tmp_path, whole, answers)
    assert asked == [{}, {"Range": "bytes=3145728-", "If-Range": '"a"'}, {}]


@dataclass
class Answer:
    """What a server of another make might answer."""

    content: bytes
    more: dict[str, str]
    cut: bool = False
    total: int = 4 * 2**20

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Length": str(self.total), **self.more}

    def iter_content(self, size: int) -> Iterator[bytes]:
        for start in range(0, len(self.content), size):
            yield self.content[start : start + size]
        if self.cut:
            raise requests.ConnectionError("cut")

    def close(self) -> None: ...


def fetched(folder: Path, whole: bytes, answers: list[Answer]) -> list[dict[str, str]]:
    """The headers of each request until the whole file was there."""
    asked: list[dict[str, str]] = []

    class Endpoint:
        baseurl = "http://elsewhere"

        def get_request(self, _: str, *, parameters: dict[str, Any]) -> Answer:
            asked.append({name: value for name, value in parameters["headers"].items() if name != "Accept-Encoding"})
            return answers[len(asked) - 1]

    class Server:
        datasources = Endpoint()

    found = FoundDatasource(
        "1", "Orders", FoundProject("p", "p", "p"), "", frozenset(), "", False, "", None, True, 4, (), "", None
    )
    with (folder / "file").open("w+b") as out:
        fetching = Fetching(found, "content", out, folder, Timeouts())
        with suppress(requests.ConnectionError):
            fetching(Server())
        fetching(Server())
    assert (folder / "file").read_bytes() == whole
    return asked


def test_progress_is_told_every_few_seconds_and_not_at_all_for_what_is_done_at_once() -> None:
    lines: list[str] = []
    times = iter([0.0, 1.0, 5.0, 5.0, 9.9, 10.0, 10.0])
    tell = tell_progress(lines.append, "downloading", every=5, clock=lambda: next(times))
    for megabytes in (20, 120, 300, 1400):
        tell(megabytes * 1_000_000, 1_400_000_000)
    assert lines == ["downloading 120 of 1,400 MB", "downloading 1,400 of 1,400 MB"]


def test_a_download_that_keeps_breaking_leaves_the_old_file_and_nothing_else(
    orders: Orders, admin: Admin, tmp_path: Path
) -> None:
    found, target = orders.create(), tmp_path / "orders.tdsx"
    target.write_bytes(b"old")
    admin.fault("cut", path="/content$", when="during", times=9)
    with pytest.raises(DatasourceError, match=r"Could not download datasource 'Orders' .* the connection broke"):
        download(orders.client, found, target)
    assert target.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == [target.name]


def test_a_full_disk_is_told_before_a_byte_is_written(
    orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = orders.create()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk())
    with pytest.raises(DatasourceError, match=r"No room to download .* has 1 MB free\. Free some space"):
        download(orders.client, found, tmp_path / "orders.tdsx")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(orders: Orders, tmp_path: Path) -> None:
    found = orders.create()
    (tmp_path / "taken").touch()
    with pytest.raises(DatasourceError, match=r"Could not download .* to .*taken/orders\.tdsx: "):
        download(orders.client, found, tmp_path / "taken" / "orders.tdsx")


def test_a_disk_that_fills_up_meanwhile_is_told_and_left_clean(
    orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    found = orders.create()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DatasourceError, match=r"No space left on device\. Free some space"):
        download(orders.client, found, tmp_path / "orders.tdsx")
    assert list(tmp_path.iterdir()) == []


def test_a_datasource_without_an_extract_is_no_package(orders: Orders, tmp_path: Path) -> None:
    file = tmp_path / "live.tds"
    file.write_bytes(LIVE_ONLY)
    orders.others.datasources.publish(TSC.DatasourceItem(orders.project.id, "Orders"), str(file), "CreateNew")
    with pytest.raises(NoExtractError, match="it reads its source live"):
        download(orders.client, orders.now(), tmp_path / "orders.tdsx")


def test_the_page_of_a_proxy_is_not_taken_for_what_the_datasource_holds(
    orders: Orders, sandbox: Sandbox, tmp_path: Path
) -> None:
    folder = sandbox.home.data("tableau") / "packages"
    before, found = set(folder.iterdir()), orders.create()
    (stored,) = set(folder.iterdir()) - before
    page = b"<?xml version='1.0'?><html>Try again later.</html>"
    stored.write_bytes(page.ljust(stored.stat().st_size))
    with pytest.raises(DatasourceError, match="Check that no proxy answers in the server's place") as caught:
        download(orders.client, found, tmp_path / "orders.tdsx")
    assert not isinstance(caught.value, NoExtractError)


def test_a_deleted_datasource_cannot_be_downloaded(orders: Orders, tmp_path: Path) -> None:
    found = orders.create()
    orders.others.datasources.delete(found.id)
    with pytest.raises(DatasourceError, match=r"refused \(404004\).* Check that it still exists"):
        download(orders.client, found, tmp_path / "orders.tdsx")
