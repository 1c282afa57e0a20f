"""Replacement in extracts of one table, as tests write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.hyper.purge import Applied, by_key, by_slice, replace_rows
from tir_dagster.hyper.replace import ExtractShape, StagedChange


def replace_keys(
    base: Path, target: Path, *, key: Any, keys: Any, rows: Any, columns: Any, names: Any = None
) -> Applied:
    return replace_rows(base, target, [by_key(key, keys, rows, columns, names=names)])[0]


def replace_slices(base: Path, target: Path, *, ranges: Any, rows: Any, columns: Any, names: Any = None) -> Applied:
    return replace_rows(base, target, [by_slice(ranges, rows, columns, names=names)])[0]


def replace_change(base: Path, target: Path, change_set: ChangeSet, folder: Path, shape: ExtractShape) -> Applied:
    return replace_rows(base, target, [StagedChange(change_set, folder, shape).as_rows()])[0]
