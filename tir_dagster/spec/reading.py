"""Reads a spec file into the dataclasses of extracts and loads; reports every problem with its file and line."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from tir_dagster.errors import SpecError
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec, problems_between

T = TypeVar("T")
SPECS_VARIABLE = "TIR_SPECS"
_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)\s*(second|minute|hour|day)s?$")
_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB)$", re.IGNORECASE)


@dataclass(frozen=True)
class Declared:
    """What a spec file declares."""

    extracts: tuple[ExtractSpec, ...] = ()
    loads: tuple[LoadSpec, ...] = ()


def load_specs(path: str | os.PathLike[str] | None = None) -> tuple[ExtractSpec, ...]:
    """Return the extracts declared in a YAML file (default: the one TIR_SPECS names); raise SpecError with what to repair, and where."""
    return load_declared(path).extracts


def load_declared(path: str | os.PathLike[str] | None = None) -> Declared:
    """Return all that a YAML file declares (default: the one TIR_SPECS names); raise SpecError with what to repair, and where."""
    chosen = path or os.environ.get(SPECS_VARIABLE)
    if not chosen:
        return Declared()
    file = Path(chosen)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"{file}: {error.strerror or error}. Name the spec file with --specs or {SPECS_VARIABLE}."
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{file}: not text in UTF-8. Save the spec file as UTF-8.") from error
    return parse_declared(text, str(file))


def parse_specs(text: str, file: str) -> tuple[ExtractSpec, ...]:
    return parse_declared(text, file).extracts


def parse_declared(text: str, file: str) -> Declared:
    lines: dict[str, int] = {}
    twice: list[str] = []
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        document = _plain(tree, "", lines, twice) if tree is not None else None
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(_not_yaml(file, error)) from error
    except RecursionError as error:
        raise SpecError(f"{file}: an anchor contains itself, or values are nested too deep. Flatten it.") from error
    reader = _SpecReader(file, lines)
    for path in twice:
        reader.complain(path, "given twice; keep one")
    declared = reader.document(document)
    if reader.problems:
        raise SpecError("\n".join(reader.problems))
    return declared


def spec_from_mapping(value: Mapping[str, Any], where: str, *, lines: Mapping[str, int] | None = None) -> ExtractSpec:
    """The spec for attributes that come from elsewhere, such as a Dagster component; `lines` by field: `slices.by`."""
    reader = _SpecReader(where, lines or {})
    spec = reader.dataclass(ExtractSpec, dict(value), "")
    if spec is None or reader.problems:
        raise SpecError("\n".join(reader.problems))
    return spec


def _not_yaml(file: str, error: Exception) -> str:
    """The parser's message of many lines as one sentence."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{file}:{mark.line + 1}" if mark else file
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return f"{place}: not YAML: {' '.join(str(problem).split())}. Check indentation (spaces, no tabs), brackets and quotes there."


def _plain(node: yaml.Node, path: str, lines: dict[str, int], twice: list[str]) -> Any:
    """Return the node's value; record in `lines` the line of each field, in `twice` the repeated ones."""
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key, value in node.value:
            inner = f"{path}.{key.value}" if path else str(key.value)
            if str(key.value) in values:
                twice.append(inner)
            values[str(key.value)] = _plain(value, inner, lines, twice)
            lines[inner] = key.start_mark.line + 1
        return values
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, f"{path}[{at}]", lines, twice) for at, item in enumerate(node.value)]
    # Dates and sexagesimal numbers stay what the user wrote: `start: 2024-12` is text here.
    if node.tag in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:str"):
        return node.value
    return yaml.SafeLoader("").construct_object(node)


class _SpecReader:
    """Turns plain values into dataclasses and collects every problem, not only the first."""

    def __init__(self, file: str, lines: Mapping[str, int]) -> None:
        self.file = file
        self.lines = lines
        self.problems: list[str] = []

    def complain(self, path: str, message: str) -> None:
        line = self.lines.get(path) or self.lines.get(path.rpartition(".")[0])
        place = f"{self.file}:{line}" if line else self.file
        self.problems.append(f"{place}: {path or 'the file'}: {message}.")

    def document(self, document: Any) -> Declared:
        sections = ("extracts", "loads")
        if not isinstance(document, dict) or not any(isinstance(document.get(name), list) for name in sections):
            self.complain("", "start with `extracts:` and a list of extracts below it")
            return Declared()
        for unknown in [name for name in document if name not in sections]:
            self.complain(unknown, "unknown here; known are `extracts:` and `loads:`")
        names: set[str] = set()
        extracts = self.named(ExtractSpec, document.get("extracts", []), "extracts", names)
        self.own_datasources(extracts)
        loads = self.named(LoadSpec, document.get("loads", []), "loads", names)
        for message in problems_between(loads):
            self.complain("loads", message)
        return Declared(extracts, loads)

    def own_datasources(self, extracts: Sequence[ExtractSpec]) -> None:
        """Refuse two extracts on one datasource: each would take the other's publish for a foreign one, again and again."""
        owners: dict[tuple[str | None, ...], str] = {}
        for extract in extracts:
            place = extract.datasource
            owner = owners.setdefault((place.server, place.site, place.project.strip("/ "), place.name), extract.name)
            if owner != extract.name:
                self.complain(
                    "extracts",
                    f"{owner} and {extract.name} have the same datasource, {place.name!r} in project {place.project!r}; give each"
                    " extract its own",
                )

    def named(self, cls: type[T], items: Any, where: str, names: set[str]) -> tuple[T, ...]:
        """The list's items; a name is given once in the whole file, for it names assets."""
        if not isinstance(items, list):
            self.complain(where, "give a list")
            return ()
        specs = [self.dataclass(cls, item, f"{where}[{at}]") for at, item in enumerate(items)]
        for at, name in enumerate(getattr(spec, "name", None) for spec in specs):
            if name in names:
                self.complain(
                    f"{where}[{at}].name",
                    f"a second {where[:-1]} is named {name!r}; names are unique"
                    if where == "extracts"
                    else f"{name!r} is another's name; names are unique in the file",
                )
            names |= {name} if name else set()
        return tuple(spec for spec in specs if spec is not None)

    def dataclass(self, cls: type[T], value: Any, path: str) -> T | None:
        if not isinstance(value, Mapping):
            self.complain(path, "give fields and values, `field: value`")
            return None
        before = len(self.problems)
        fields = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        hints = typing.get_type_hints(cls)
        for unknown in [name for name in value if name not in fields]:
            matches = difflib.get_close_matches(str(unknown), fields, n=1)
            hint = f"did you mean `{matches[0]}`" if matches else f"known are {', '.join(fields)}"
            self.complain(_join(path, unknown), f"unknown field; {hint}")
        values: dict[str, Any] = {}
        for name, item in fields.items():
            if name in value:
                values[name] = self.value(hints[name], value[name], _join(path, name), item.metadata)
            elif item.metadata.get("unless") in value:
                values[name] = ""
            elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                self.complain(_join(path, name), "missing")
        if len(self.problems) > before:
            return None
        instance = cls(**values)
        for name, message in getattr(instance, "problems", lambda: ())():
            self.complain(_join(path, name), message)
        return instance

    def value(self, hint: Any, value: Any, path: str, metadata: Mapping[str, Any]) -> Any:
        if metadata.get("duration") and value is not None:
            return self.duration(value, path)
        if metadata.get("size") and value is not None:
            return self.size(value, path)
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            if value is None:
                return None
            return self.value(
                next(argument for argument in arguments if argument is not type(None)), value, path, metadata
            )
        if origin is Literal:
            return self.choice(arguments, value, path)
        if origin is tuple:
            return self.texts(value, path)
        if origin is collections.abc.Mapping:
            return self.mapping(arguments[1], value, path)
        if dataclasses.is_dataclass(hint):
            return self.dataclass(typing.cast("type[Any]", hint), value, path)
        return self.scalar(hint, value, path)

    def mapping(self, hint: Any, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self.complain(path, "give names and what belongs to them, `name: {…}`")
            return {}
        return {str(name): self.value(hint, inner, _join(path, name), {}) for name, inner in value.items()}

    def duration(self, value: Any, path: str) -> float:
        match = _DURATION.match(str(value).strip())
        if match:
            return float(match[1]) * _UNITS[match[2]]
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
            return float(value)
        self.complain(path, f"{value!r} is no duration; write one such as `30 seconds`, `10 minutes` or `1 day`")
        return 0.0

    def size(self, value: Any, path: str) -> int:
        if match := _SIZE.match(str(value).strip()):
            return int(float(match[1]) * _BYTES[match[2].upper()])
        self.complain(path, f"{value!r} is no size; write one such as `500 MB` or `20 GB`")
        return 0

    def choice(self, options: Sequence[str], value: Any, path: str) -> Any:
        # YAML 1.1 reads a bare `none` as text but `no` and `off` as false; nobody means that here.
        if value not in options:
            self.complain(path, f"{value!r} is not one of {', '.join(options)}")
        return value

    def texts(self, value: Any, path: str) -> tuple[str, ...]:
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in items):
            self.complain(path, "give a name or a list of names")
            return ()
        return tuple(items)

    def scalar(self, hint: type, value: Any, path: str) -> Any:
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
            kind = {str: "text", float: "a number", int: "a whole number", bool: "true or false"}[hint]
            self.complain(path, f"{value!r} is not {kind}")
        return value


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
