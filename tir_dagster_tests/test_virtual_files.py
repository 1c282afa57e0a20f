"""Files that are sent without being written: any stretch of them, any number of times, and none that changed meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tir_dagster.errors import MachineError
from tir_dagster.files import FileRange, VirtualFile

CONTENT = os.urandom(2_500_000)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.hyper"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def virtual(file: Path) -> VirtualFile:
    return VirtualFile("w.tdsx", (b"header", FileRange.of(file), b"", FileRange.of(file, 10, 5), b"directory"))


EXPECTED = b"header" + CONTENT + CONTENT[10:15] + b"directory"


def test_it_is_read_in_order_and_its_size_is_known(virtual: VirtualFile) -> None:
    assert virtual.size == len(EXPECTED)
    assert b"".join(virtual.blocks()) == EXPECTED
    assert max(map(len, virtual.blocks())) <= 1024 * 1024
    assert virtual.kind == ".tdsx"


@pytest.mark.parametrize("start", [0, 3, 6, 7, 1_000_000, len(CONTENT) + 5, len(CONTENT) + 8, len(EXPECTED)])
@pytest.mark.parametrize("size", [0, 1, 4, 1_500_000, len(EXPECTED)])
def test_any_stretch_can_be_read_again(virtual: VirtualFile, start: int, size: int) -> None:
    size = min(size, len(EXPECTED) - start)

    for _ in range(2):
        assert b"".join(virtual.blocks(start, size)) == EXPECTED[start : start + size]


def test_it_can_be_written(virtual: VirtualFile, tmp_path: Path) -> None:
    assert virtual.write(tmp_path / "there.tdsx").read_bytes() == EXPECTED


def test_a_file_that_was_written_to_is_noticed(virtual: VirtualFile, file: Path) -> None:
    virtual.check()

    file.write_bytes(CONTENT[::-1])
    os.utime(file, ns=(1, 1))

    with pytest.raises(MachineError, match=r"rows\.hyper was written to while it was being sent"):
        virtual.check()


def test_a_file_that_became_shorter_is_noticed_while_it_is_read(virtual: VirtualFile, file: Path) -> None:
    file.write_bytes(b"short")

    with pytest.raises(MachineError, match="written to while it was being sent"):
        list(virtual.blocks())
