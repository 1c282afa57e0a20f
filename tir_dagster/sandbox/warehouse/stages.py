"""Folders in internal stages: PUT into one, COPY a folder of Parquet files into any table, REMOVE it.

fakesnow knows stages without folders, and copies into permanent tables with plain names; everything else is done here.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fakesnow.transforms import stage as fakesnow_stage
from sqlglot import exp

from tir_dagster.sandbox.warehouse.errors import SnowflakeError, unsupported
from tir_dagster.sandbox.warehouse.names import folded, literal, quote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tir_dagster.sandbox.warehouse.limits import Limits
    from tir_dagster.sandbox.warehouse.session import Session

REPORT = (
    *("file", "status", "rows_parsed", "rows_loaded", "error_limit", "errors_seen", "first_error"),
    *("first_error_line", "first_error_character", "first_error_column_name"),
)
_KNOWN_OPTIONS = {"FILE_FORMAT", "MATCH_BY_COLUMN_NAME", "FORCE", "ON_ERROR"}


@dataclass(frozen=True)
class StagedFolder:
    """A stage, and the folder in it that a statement names."""

    stage: str
    folder: str
    root: Path

    @property
    def path(self) -> Path:
        return self.root / self.folder


def named_folder(session: Session, text: str) -> StagedFolder | None:
    """The folder that `@stage/folder` names; None for a whole stage, which is fakesnow's business."""
    _, slash, folder = text.strip("'").removeprefix("@").partition("/")
    return location(session, text) if slash and folder.strip("/") else None


def location(session: Session, text: str) -> StagedFolder:
    """The stage, or the folder in it, that `@stage` or `@stage/folder` names."""
    if not text.strip("'").startswith("@"):
        raise SnowflakeError(1003, "42000", f"SQL compilation error:\n{text} does not start with @")
    name, _, folder = text.strip("'").removeprefix("@").partition("/")
    if ".." in folder.split("/"):
        raise SnowflakeError(1011, "42601", f"SQL compilation error:\ninvalid URL prefix found in: {text}")
    table = exp.to_table(name, dialect="snowflake")
    parts = [
        folded(table.args.get("catalog")) or session.database or "",
        folded(table.args.get("db")) or session.schema or "",
        folded(table.this),
    ]
    known = session.duck.execute(
        "SELECT 1 FROM _fs_global._fs_information_schema._fs_stages WHERE database_name = ? AND schema_name = ? AND name = ?",
        parts,
    ).fetchone()
    stage = ".".join(parts)
    if known is None:
        raise SnowflakeError(
            2003, "02000", f"SQL compilation error:\nStage '{stage}' does not exist or not authorized."
        )
    root = Path(fakesnow_stage.LOCAL_BUCKET_PATH).joinpath(*parts)
    return StagedFolder(parts[-1].lower(), folder.strip("/"), root)


def put(session: Session, tree: exp.Expr, params: Any) -> dict[str, Any] | None:
    """What the connector needs to know to bring a file into a stage or a folder of it; None if this is not a PUT."""
    if not isinstance(tree, exp.Put):
        return None
    target = tree.args["target"].name
    if target == "?":
        if not params:
            raise SnowflakeError(2049, "42601", "SQL compilation error:\nBind variable ? not set.")
        target = str(params[0])
    folder = location(session, target)
    folder.path.mkdir(parents=True, exist_ok=True)
    options = {name.upper(): value for name, value in fakesnow_stage.put_options(tree).items()}
    return {
        "stageInfo": {"locationType": "LOCAL_FS", "location": f"{folder.path}/", "creds": {}},
        "src_locations": [tree.this.name.removeprefix("file://")],
        "parallel": 4,
        "autoCompress": options.get("AUTO_COMPRESS", True),
        "sourceCompression": "auto_detect",
        "overwrite": options.get("OVERWRITE", False),
        "command": "UPLOAD",
    }


def remove(session: Session, tree: exp.Expr) -> list[str] | None:
    """Remove a folder of a stage and name what went; None if this is not such a statement."""
    if not (isinstance(tree, exp.Command) and str(tree.this).upper() in ("REMOVE", "RM")):
        return None
    folder = named_folder(session, tree.expression.name.strip())
    if folder is None:
        raise unsupported("REMOVE of a whole stage")
    gone = sorted(f"{folder.stage}/{file.relative_to(folder.path.parent)}" for file in files(folder))
    shutil.rmtree(folder.path, ignore_errors=True)
    return gone


def copied_folder(session: Session, tree: exp.Expr) -> StagedFolder | None:
    """The folder that a COPY reads; None if it reads a whole stage or something else."""
    source = tree.args["files"][0].this if isinstance(tree, exp.Copy) else None
    if not isinstance(source, (exp.Var, exp.Literal)) or not source.name.startswith("@"):
        return None
    return named_folder(session, source.name)


def copy(session: Session, tree: exp.Expr, target: str, folder: StagedFolder, sizes: Limits) -> list[list[str | None]]:
    """Copy the folder's Parquet files into the table by the names of their columns; the report, a line for each file."""
    by_case = _matching(tree)
    columns = {row[0]: row[1] for row in session.duck.execute(f"DESCRIBE {target}").fetchall()}
    report: list[list[str | None]] = []
    for file in files(folder):
        session.check_cancelled()
        listed = _selected(session, file, columns, by_case=by_case)
        names = ", ".join(quote(name) for name in listed)
        casts = {name: f"CAST({quote(found)} AS {columns[name]})" for name, found in listed.items()}
        values = ", ".join(sizes[name].sql(cast) if name in sizes else cast for name, cast in casts.items())
        (rows,) = session.duck.execute(
            f"INSERT INTO {target} ({names}) SELECT {values} FROM read_parquet({literal(str(file))})"
        ).fetchall()[0]
        shown = f"{folder.stage}/{folder.folder}/{file.relative_to(folder.path)}"
        report.append([shown, "LOADED", str(rows), str(rows), "1", "0", None, None, None, None])
    return report


def files(folder: StagedFolder) -> list[Path]:
    """All files below the folder, in the order of their names."""
    return sorted(path for path in folder.path.rglob("*") if path.is_file())


def _matching(tree: exp.Expr) -> bool:
    """Whether names match with their case; a COPY of a folder that asks for more than this is refused."""
    options = {option.name.upper(): option for option in tree.args.get("params") or []}
    if unknown := options.keys() - _KNOWN_OPTIONS:
        raise unsupported(f"COPY of a folder with {', '.join(sorted(unknown))}")
    kinds = (
        [
            entry.args["value"].name.upper()
            for entry in options["FILE_FORMAT"].expressions
            if entry.name.upper() == "TYPE"
        ]
        if "FILE_FORMAT" in options
        else []
    )
    matching = options.get("MATCH_BY_COLUMN_NAME")
    if kinds != ["PARQUET"] or matching is None or matching.expression.name.upper() == "NONE":
        raise unsupported("COPY of a folder other than of Parquet with MATCH_BY_COLUMN_NAME")
    return bool(matching.expression.name.upper() == "CASE_SENSITIVE")


def _selected(session: Session, file: Path, columns: Mapping[str, str], *, by_case: bool) -> dict[str, str]:
    """The file's column for each of the table's that it has."""
    found = [
        row[0] for row in session.duck.execute(f"DESCRIBE SELECT * FROM read_parquet({literal(str(file))})").fetchall()
    ]
    known = {name if by_case else name.upper(): name for name in found}
    listed = {
        name: known[name if by_case else name.upper()]
        for name in columns
        if (name if by_case else name.upper()) in known
    }
    if not listed:
        raise SnowflakeError(100073, "22000", f"None of the columns of {file.name} is a column of the table.")
    return listed
