"""Downloads: exactly there, whole, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.datasource.transfer import download
from tir_dagster.errors import DatasourceError
from tir_dagster_tests.datasource.conftest import Orders
from tir_dagster_tests.datasource.test_find import PASSING
from tir_dagster_tests.sandbox.tableau.helpers import LIVE_ONLY, Admin


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


class Disk(NamedTuple):
    total: int = 10**9
    used: int = 10**9
    free: int = 1_000_000


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
    with pytest.raises(DatasourceError, match="it reads its source live"):
        download(orders.client, orders.now(), tmp_path / "orders.tdsx")


def test_a_deleted_datasource_cannot_be_downloaded(orders: Orders, tmp_path: Path) -> None:
    found = orders.create()
    orders.others.datasources.delete(found.id)
    with pytest.raises(DatasourceError, match=r"refused \(404004\).* Check that it still exists"):
        download(orders.client, found, tmp_path / "orders.tdsx")
