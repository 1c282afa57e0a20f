"""Copies of whole files: the same bytes by whichever way the file system offers."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from tir_dagster import files

CONTENT = os.urandom(3_000_001)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.hyper"
    path.write_bytes(CONTENT)
    return path


def test_a_copy_has_the_bytes_of_its_source_and_none_of_what_was_there(source: Path) -> None:
    target = source.with_name("target.hyper")
    target.write_bytes(CONTENT * 2)

    files.copy_file(source, target)

    assert target.read_bytes() == CONTENT
    target.write_bytes(b"another")
    assert source.read_bytes() == CONTENT, "they share no byte that is written"


def test_an_empty_file_is_copied(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    files.copy_file(tmp_path / "empty", tmp_path / "copy")

    assert (tmp_path / "copy").read_bytes() == b""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one way only")
def test_the_kernel_copies_where_blocks_cannot_be_shared(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_share_blocks", lambda *_: False)
    monkeypatch.setattr(files, "_AT_ONCE", 1_000_000)
    monkeypatch.delattr(files.shutil, "copyfile")

    files.copy_file(source, source.with_name("target.hyper"))

    assert source.with_name("target.hyper").read_bytes() == CONTENT


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one way only")
def test_a_kernel_that_gives_up_half_way_leaves_a_whole_copy(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def break_off(from_file: int, to_file: int, count: int, from_offset: int, to_offset: int) -> int:
        if begun:
            raise OSError(errno.EXDEV, "not across devices")
        begun.append(count)
        return os.pwrite(to_file, os.pread(from_file, 1_000_000, from_offset), to_offset)

    monkeypatch.setattr(files, "_share_blocks", lambda *_: False)
    monkeypatch.setattr(os, "copy_file_range", break_off)

    files.copy_file(source, source.with_name("target.hyper"))

    assert begun
    assert source.with_name("target.hyper").read_bytes() == CONTENT


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one way only")
def test_a_full_disk_is_told_and_not_tried_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(files, "_share_blocks", lambda *_: False)
    monkeypatch.setattr(os, "copy_file_range", refuse)

    with pytest.raises(OSError, match="no space left"):
        files.copy_file(source, source.with_name("target.hyper"))
