"""The pages below docs/reference that are written from the code: the spec's fields, the commands, what `--json` prints."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

import click

from tir_dagster.cli.audit.history import History, Why
from tir_dagster.cli.audit.rollback import RollbackOutcome
from tir_dagster.cli.audit.verify import VerifyOutcome
from tir_dagster.cli.kept_revisions import RevisionList
from tir_dagster.cli.load import LoadOutcome
from tir_dagster.cli.main import CONTEXT, tir
from tir_dagster.cli.overview.status import Status
from tir_dagster.cli.refresh import RefreshOutcome
from tir_dagster.cli.setup.environment import VARIABLES
from tir_dagster.spec.reading import json_schema

_WRITTEN = "<!-- Written from the code by `make docs-tables`: edit it there. -->\n"
# The parts of a spec in the order of their use; the others follow by name.
_FIRST = (
    "Declared",
    "ExtractSpec",
    "Slices",
    "Changes",
    "JoinedChanges",
    "ExtractTable",
    "Relationship",
    "Datasource",
    "Credentials",
    "LoadSpec",
    "Files",
)
_TITLES = {
    "Declared": "A spec file",
    "ExtractSpec": "An extract",
    "LoadSpec": "A load",
    "JoinedChanges": "changes.tables",
}
_FIELD_OF = {
    "ServiceNowAlerts": "alerts.servicenow",
    "SlackAlerts": "alerts.slack",
    "Severity": "alerts.servicenow.by_cause",
}
_WIDTH = 100

JSON: Mapping[str, type] = {
    "tir refresh": RefreshOutcome,
    "tir load": LoadOutcome,
    "tir status": Status,
    "tir verify": VerifyOutcome,
    "tir history": History,
    "tir why": Why,
    "tir rollback": RollbackOutcome,
    "tir revisions": RevisionList,
}


def spec_page() -> str:
    schema = json_schema()
    parts = {"Declared": schema, **schema["$defs"]}
    order = [*_FIRST, *sorted(set(parts) - set(_FIRST))]
    titles = {name: _title(name, parts) for name in order}
    lines = [
        _WRITTEN,
        "# The spec file\n",
        "Every field of a YAML file with `extracts:` and `loads:`, and of the attributes of `TableauExtractComponent` and",
        "`FileLoadComponent`. `tir schema` prints the same as a JSON schema, by which [editors](../refresh.md#in-an-editor) complete",
        "and check; [extracts.schema.json](extracts.schema.json) is that file. Examples: [queries](../queries.md),",
        "[several tables](../star.md), [deliveries](../deliveries.md), [loads](../loading.md), [alerts](../alerts.md), [Dagster](../dagster.md).",
    ]
    for name in order:
        part = parts[name]
        lines += [
            f"\n## {titles[name]}\n",
            f"{part['description']}\n",
            "| field | value | default | meaning |",
            "|---|---|---|---|",
        ]
        required = part.get("required", ())
        for field, value in part["properties"].items():
            default = "required" if field in required else _default(value, parts)
            lines.append(f"| `{field}` | {_type(value, titles)} | {default} | {_meaning(value, parts)} |")
    return "\n".join(lines) + "\n"


def _title(name: str, parts: Mapping[str, Any]) -> str:
    if name in _TITLES:
        return _TITLES[name]
    if name in _FIELD_OF:
        return f"`{_FIELD_OF[name]}`"
    fields = [
        field for part in parts.values() for field, value in part["properties"].items() if name in _references(value)
    ]
    return f"`{fields[0]}`"


def _references(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts that a field's value may be, or that it contains."""
    if "$ref" in value:
        yield value["$ref"].rpartition("/")[2]
    for inner in (*value.get("anyOf", ()), *(value[key] for key in ("items", "additionalProperties") if key in value)):
        if isinstance(inner, Mapping):
            yield from _references(inner)


def _type(value: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    for name in _references(value):
        link = f"[{titles[name].strip('`').removeprefix('A ').removeprefix('An ')}](#{_anchor(titles[name])})"
        kind = "list of " if value.get("type") == "array" else "by name: " if "additionalProperties" in value else ""
        return f"{kind}{link}"
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "anyOf" in value:
        choices = [choice for choice in value["anyOf"] if choice.get("type") != "null"]
        if "examples" in value or any("examples" in choice for choice in choices):
            examples = value.get("examples") or choices[0]["examples"]
            return "such as " + ", ".join(f"`{example}`" for example in examples)
        kinds = [_type(choice, titles) for choice in choices]
        return "name or list of names" if kinds == ["text", "list"] else " or ".join(dict.fromkeys(kinds))
    words = {"string": "text", "number": "number", "integer": "number", "boolean": "true, false", "array": "list"}
    return words.get(value.get("type", ""), "`name: text`")


def _anchor(title: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _default(value: Mapping[str, Any], parts: Mapping[str, Any]) -> str:
    default = value.get("default")
    if default in (None, [], "", {}) or (isinstance(default, Mapping) and any(_references(value))):
        return ""
    durations = any("examples" in choice for choice in (value, *value.get("anyOf", ())))
    if durations and isinstance(default, float):
        for seconds, unit in ((3600, "hours"), (60, "minutes"), (1, "seconds")):
            if default % seconds == 0:
                return f"`{default / seconds:.0f} {unit}`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    text = (
        ", ".join(map(str, default))
        if isinstance(default, list)
        else f"{default:g}"
        if isinstance(default, float)
        else default
    )
    return f"`{text}`"


def _meaning(value: Mapping[str, Any], parts: Mapping[str, Any]) -> str:
    described = value.get("description") or next((parts[name]["description"] for name in _references(value)), "")
    assert described, f"a field without a text below it: {value}"
    return described.replace("|", "\\|")


def cli_page() -> str:
    lines = [
        _WRITTEN,
        "# Commands\n",
        "What each command's `--help` says. Exit codes: 0 done, 1 failed or not well, 2 wrong usage or spec, 130 Ctrl-C, 143 SIGTERM. If the",
        "exit code is not 0, standard error says why. Progress goes to standard error, results to standard output.\n",
        'Completion of commands and options: `eval "$(tir completion bash)"` in `~/.bashrc` (zsh likewise; fish: `tir completion fish | source`).',
    ]
    lines += [f"\n## `{name}`\n\n```text\n{text}\n```" for name, text in _helps(tir, "tir", None)]
    return "\n".join(lines) + "\n"


def _helps(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    context = click.Context(
        command, info_name=name.rsplit(maxsplit=1)[-1], parent=parent, **{**CONTEXT, "terminal_width": _WIDTH}
    )  # type: ignore[arg-type]
    yield name, command.get_help(context)
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            if not found.hidden:
                yield from _helps(found, f"{name} {inner}", context)


def json_page() -> str:
    lines = [
        _WRITTEN,
        "# What `--json` prints\n",
        "One object on standard output; if the command fails, nothing. Fields are added in later versions, never renamed or removed without",
        "a note in the [changelog](../../CHANGELOG.md). `tir plan`: see [audit](../audit.md#what-would-a-refresh-do); `tir schema`: the [schema](extracts.schema.json).",
        "`tir refresh --all` and `tir plan` without a name: an object with `extracts`, a list of what is printed of each, or of `extract` and `error`.",
    ]
    for command, kind in JSON.items():
        lines += [f"\n## `{command} --json`\n", f"{_first_line(kind)}\n", *_fields(kind)]
        lines += [
            line
            for inner in _inner(kind)
            for line in (f"\nEach `{inner.__name__}`: {_first_line(inner)}\n", *_fields(inner))
        ]
    return "\n".join(lines) + "\n"


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _fields(kind: type) -> list[str]:
    hints = get_type_hints(kind)
    rows = [f"| `{field.name}` | {_kind(hints[field.name])} |" for field in dataclasses.fields(kind)]
    return ["| field | value |", "|---|---|", *rows]


def _kind(hint: Any) -> str:
    words = {str: "text", int: "number", float: "number", bool: "true, false", type(None): "null", Any: "any"}
    if hint in words:
        return words[hint]
    if dataclasses.is_dataclass(hint):
        return f"`{hint.__name__}`"
    origin, arguments = getattr(hint, "__origin__", None), get_args(hint)
    if origin in (list, tuple):
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"object of {_kind(arguments[1])}"
    if arguments and all(isinstance(choice, str) for choice in arguments):
        return ", ".join(f"`{choice}`" for choice in arguments)
    return " or ".join(_kind(choice) for choice in arguments) or "text"


def _inner(kind: type) -> Iterator[type]:
    """The dataclasses within one, each once, in the order of its fields."""
    found: dict[type, None] = {}

    def look(hint: Any) -> None:
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and hint not in found:
            found[hint] = None
            for inner in get_type_hints(hint).values():
                look(inner)
        for argument in get_args(hint):
            look(argument)

    for hint in get_type_hints(kind).values():
        look(hint)
    yield from found


def environment_page() -> str:
    lines = [
        _WRITTEN,
        "# Environment variables",
        "",
        'The same variables configure the sandbox and real servers; nothing else differs. `eval "$(tir sandbox env)"` sets those of the',
        "sandbox, and `tir doctor --env` says which are set. Begin with a key pair for [Snowflake](../snowflake.md) and a personal access token for",
        "Tableau, or a connected app with [its scopes](../rest-calls.md#scopes-of-a-connected-app). Which Spark a run uses: [spark.md](../spark.md);",
        "who reads which certificates and proxies: [SECURITY.md](../../SECURITY.md#certificates-and-proxies). Do not put a user or a password into an",
        "address: addresses with credentials are refused. Values of secrets appear in no log, error or alert. A spec names the variables of its",
        "datasource's credentials itself.",
    ]
    for where, variables in itertools.groupby(VARIABLES, key=lambda variable: variable.where):
        rows = [f"| `{variable.name}` | {variable.used_for} |" for variable in variables]
        lines += ["", f"## {where[0].upper()}{where[1:]}", "", "| variable | what for |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "spec.md": spec_page,
    "cli.md": cli_page,
    "json.md": json_page,
    "environment.md": environment_page,
}
