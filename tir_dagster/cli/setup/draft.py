"""Writes a proposal as a commented spec file or a component's defs.yaml; never over a file unless told to."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tir_dagster.changes.relation import relation_of
from tir_dagster.cli.setup.proposal import Place, Proposal, extract_name, propose
from tir_dagster.cli.setup.published import DatasourceLook, look_at_datasource
from tir_dagster.cli.setup.source import look_at_source
from tir_dagster.errors import DatasourceError, SpecError, TirError
from tir_dagster.files import replaced_file
from tir_dagster.refresh.deliveries.agreement import check_agreement, check_query_agreement
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query import ViewError
from tir_dagster.snowflake.versions import column_names
from tir_dagster.spec.extract import ExtractSpec, needed_columns
from tir_dagster.spec.reading import json_schema, parse_declared, spec_from_mapping
from tir_dagster.tableau.client import TableauClient

COMPONENT = "tir_dagster.TableauExtractComponent"
_WIDTH = 118
# What is given up if the spec does not fit after all, in this order.
_GIVEN_UP = ("changes", "slices", "row_key")


@dataclass(frozen=True)
class Draft:
    """A valid spec as text: one item of `extracts`, without indentation."""

    proposal: Proposal
    spec: ExtractSpec
    source: str

    @property
    def name(self) -> str:
        return self.spec.name


def draft(
    access: SnowflakeAccess,
    *,
    table: TableName | None = None,
    query: str | None = None,
    project: str,
    datasource: str,
    client: TableauClient | None,
    name: str | None = None,
    count: bool | None = None,
    tell: Callable[[str], None],
    env: Mapping[str, str] = os.environ,
) -> Draft:
    """Look at the source and the datasource, decide, and prove that the result is a spec that fits both."""
    look: DatasourceLook | None = None
    if client is not None:
        tell(f"looking at datasource {datasource!r} in project {project!r}")
        look = look_at_datasource(client, project, datasource)
        if look.datasource is not None and look.package is None:
            raise SpecError(f"{look.problem} Or name a datasource that does not exist yet: a refresh creates it.")
    tell(f"looking at {table or 'the query'}")
    try:
        columns = look.columns if look is not None and query is None else None
        source = look_at_source(access, table=table, query=query, columns=columns, count=count, tell=tell)
    except ViewError as error:
        raise SpecError(str(error)) from None
    place = Place(project.strip(), datasource, look)
    proposal = propose(name or extract_name(datasource), source, place, env=env)
    proposal, spec = _fitting(proposal, access, look, source.shown)
    return Draft(proposal, spec, source.shown)


def _fitting(
    proposal: Proposal, access: SnowflakeAccess, look: DatasourceLook | None, shown: str
) -> tuple[Proposal, ExtractSpec]:
    """Return the proposal as a spec that fits its source and its datasource; what does not fit is given up with the reason."""
    for field in (*_GIVEN_UP, ""):
        try:
            spec = spec_from_mapping(proposal.mapping, "the draft")
            columns = (
                [] if spec.delivery == "trigger" else [column.name for column in relation_of(spec, access).columns]
            )
        except SpecError as error:
            if not field:
                raise SpecError(f"No spec could be written for {shown}: {error}") from None
            if field in proposal.mapping:
                proposal = proposal.without(field, f"{field} was left out, because: {error}")
        else:
            if look is not None and spec.delivery != "trigger":
                _check_datasource(spec, access, look, columns)
            return proposal, spec
    raise AssertionError("the last round returns or raises")


def _check_datasource(spec: ExtractSpec, access: SnowflakeAccess, look: DatasourceLook, columns: list[str]) -> None:
    """Raise SpecError if the datasource that people made shows something else than the spec."""
    if look.package is None or look.package.is_bare or look.datasource is None:
        return
    shown = look.datasource.shown
    try:
        if spec.query is not None:
            check_query_agreement(look.package, datasource=shown, query=spec.query, columns=columns)
            return
        table = TableName.parse(spec.source)
        check_agreement(
            look.package,
            datasource=shown,
            table=table,
            source_columns=column_names(access, table),
            needed=needed_columns(spec),
            only=spec.columns,
        )
    except DatasourceError as error:
        raise SpecError(str(error)) from None


# As text


def item_lines(made: Draft) -> list[str]:
    """Return the spec's fields as YAML with their reasons above them."""
    lines: list[str] = []
    for part in made.proposal.parts:
        comments = [line for reason in part.reasons for line in _comment(reason)]
        comments += [line for todo in part.todo for line in _comment(f"TO DO: {todo}")]
        lines += [*comments, *(_field(part.name, part.value) if part.value is not None else ())]
    return lines


def _comment(text: str) -> Iterator[str]:
    plain = " ".join(text.split())
    yield from textwrap.wrap(
        plain, _WIDTH - 6, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )


def _field(name: str, value: Any) -> list[str]:
    if isinstance(value, str) and "\n" in value:
        # The first line may be indented, which YAML would take as the indentation of all.
        block = [f"{name}: |2-", *(f"  {line}" if line else "" for line in value.splitlines())]
        # A tab or blanks at the end of a line may be inside a literal: quoted, they stay.
        return block if _reads_as(block, {name: value}) else [f"{name}: {_flow(value)}"]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
        return [f"{name}:", *(f"  {inner}: {_flow(held)}" for inner, held in value.items())]
    return [f"{name}: {_flow(value)}"]


def _reads_as(lines: list[str], value: Any) -> bool:
    # Comments and fields are indented later, and blanks at the end are cut then.
    try:
        read = yaml.safe_load("\n".join(line.rstrip() for line in lines))
    except yaml.YAMLError:
        return False
    return bool(read == value)


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def spec_file_text(drafts: list[Draft], schema: str) -> str:
    """Return a whole spec file."""
    lines = [f"# yaml-language-server: $schema={schema}", *_head(drafts), "extracts:"]
    for made in drafts:
        lines += _as_item(made)
    return "\n".join(lines) + "\n"


def defs_text(made: Draft) -> str:
    """Return a component's defs.yaml."""
    body = [f"  {line}".rstrip() for line in item_lines(made)]
    return "\n".join([*_head([made]), f"type: {COMPONENT}", "attributes:", *body]) + "\n"


def _head(drafts: list[Draft]) -> list[str]:
    shown = ", ".join(made.source for made in drafts)
    return [
        *_comment(f"Drafted by tir on {datetime.now(UTC):%Y-%m-%d} from {shown}. Lines with TO DO need your decision.")
    ]


def _as_item(made: Draft) -> list[str]:
    lines = item_lines(made)
    # The first line names the extract: a list's item begins with it.
    return [f"  - {lines[0]}", *(f"    {line}".rstrip() for line in lines[1:])]


def appended(text: str, drafts: list[Draft], file: Path) -> str:
    """Return a spec file's text with more extracts; raise SpecError unless `extracts:` is its last part, item by item."""
    before = parse_declared(text, str(file))
    result = text.rstrip("\n") + "\n" + "".join(f"{line}\n" for made in drafts for line in _as_item(made))
    problem = f"{file}: its extracts are not written as `  - name: …` at the end of the file"
    try:
        after = parse_declared(result, str(file))
    except SpecError as error:
        problem = str(error)
        after = None
    expected = (*before.extracts, *(made.spec for made in drafts))
    if after is None or after.extracts != expected or after.loads != before.loads:
        raise SpecError(
            f"{problem}: nothing was appended. Write to another file with --to, or paste this:\n"
            + "\n".join(line for made in drafts for line in _as_item(made))
        )
    return result


def write_new(file: Path, text: str, *, force: bool) -> None:
    """Write the file; refuse to replace one unless forced."""
    if file.exists() and not force:
        raise SpecError(
            f"{file} exists. Name another file with --to, add to it with --append, or replace it with --force."
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replaced_file(file) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TirError(f"{file} cannot be written: {error.strerror or error}. Name another file with --to.") from error


def schema_file(beside: Path) -> Path:
    """Return where the JSON schema lies for the spec files of a folder."""
    return beside.parent / "extracts.schema.json"


def write_schema(beside: Path) -> None:
    """Write the JSON schema of this version, by which editors check and complete the spec file."""
    schema_file(beside).write_text(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_schema_file(file: Path) -> None:
    """Raise SpecError if something else than a schema of ours has its name."""
    if file.exists() and f'"title": "{json_schema()["title"]}"' not in file.read_text(encoding="utf-8"):
        raise SpecError(
            f"{file} is not tir_dagster's schema, and the spec file needs one of this name beside it. Rename it, or choose another folder with --to."
        )


def write_spec_file(file: Path, drafts: list[Draft], *, append: bool, force: bool) -> None:
    """Write the drafts to a spec file and the schema beside it; the file is read back before it is there."""
    if append and file.exists():
        text = appended(file.read_text(encoding="utf-8"), drafts, file)
        force = True
    else:
        text = spec_file_text(drafts, f"./{schema_file(file).name}")
    if not append and parse_declared(text, str(file)).extracts != tuple(made.spec for made in drafts):
        raise SpecError(
            f"{file} would not say what was checked, so it was not written. Write it by hand: docs/refresh.md."
        )
    _check_schema_file(schema_file(file))
    write_new(file, text, force=force)
    write_schema(file)
