"""What all parts of a spec share: how pydantic reads and describes them, durations and sizes, the sentences about mistakes."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)\s*(second|minute|hour|day)s?$")
_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB)$", re.IGNORECASE)
_PROBLEM = "problem"
_DESCRIBED_FIELD = re.compile(r'^    (\w+): .*\n    """([^"]+)"""', re.MULTILINE)


class Declaration:
    """A part of a spec: a plain frozen dataclass in Python, which pydantic reads from a mapping and describes in a JSON schema.

    A text below a field is its description in the schema.
    """

    # Strict: a number in quotes is not a number.
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    # Required fields that are empty where another one is given, each with that one.
    replaceable: ClassVar[tuple[tuple[str, str], ...]] = ()

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield field and sentence for each value that cannot work although it has the right type."""
        yield from ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Strict are the values in it: a strict dataclass takes no mapping.
        schema: Any = {**handler.resolve_ref_schema(handler(source)), "strict": False}
        return core_schema.no_info_wrap_validator_function(cls.read, schema, ref=schema.pop("ref"))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = handler(schema)
        described = handler.resolve_ref_schema(json_schema)
        for name in dict(cls.replaceable):
            others = [other for replaced, other in cls.replaceable if replaced == name]
            described["required"].remove(name)
            described["anyOf"] = [{"required": [alternative]} for alternative in (name, *others)]
        # Pydantic can read the texts, too, but then does so for every read of a spec, which takes four times as long.
        with suppress(OSError):  # an installation without sources
            for base in (base for base in cls.__mro__ if issubclass(base, Declaration)):
                for name, text in _DESCRIBED_FIELD.findall(inspect.getsource(base)):
                    described["properties"][name].setdefault("description", " ".join(text.split()))
        return json_schema

    @classmethod
    def read(cls, value: Any, handler: core_schema.ValidatorFunctionWrapHandler) -> Self:
        """Return the declaration in a mapping; raise ValidationError with a sentence for every problem."""
        if isinstance(value, Mapping):
            value = {name: "" for name, other in cls.replaceable if other in value} | dict(value)
        try:
            declaration: Self = handler(value)
        except ValidationError as error:
            known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
            raise _all_problems((one["loc"], _sentence(one, known)) for one in error.errors()) from None
        if problems := [((path,), sentence) for path, sentence in declaration.problems()]:
            raise _all_problems(problems)
        return declaration


def _all_problems(problems: Iterable[tuple[tuple[int | str, ...], str]]) -> ValidationError:
    details = [InitErrorDetails(type=_problem(sentence), loc=place, input=None) for place, sentence in problems]
    return ValidationError.from_exception_data("spec", details)


def _problem(sentence: str) -> PydanticCustomError:
    return PydanticCustomError(_PROBLEM, sentence)


_KINDS = {
    "string_type": "text",
    "string_unicode": "text",
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
}
_SHAPES = {
    "missing": "missing; add it",
    "dataclass_type": "give fields and values, `field: value`",
    "dict_type": "give names and what belongs to them, `name: {…}`",
    "tuple_type": "give a list",
}


def _sentence(error: Any, known: Iterable[str]) -> str:
    """What pydantic found, in the words of this project; `known` are the fields of the part that it is in."""
    kind, value = error["type"], error["input"]
    if kind == "unexpected_keyword_argument":
        matches = difflib.get_close_matches(error["loc"][-1], known, n=1)
        hint = f"did you mean `{matches[0]}`?" if matches else f"known are {', '.join(known)}"
        return f"unknown field; {hint}"
    if kind == "literal_error":
        # Pydantic lists them as 'a', 'b' or 'c'.
        options = error["ctx"]["expected"].split("'")[1::2]
        return f"{value!r} is not one of {', '.join(options)}"
    if kind in _KINDS:
        written = str(value).lower() if isinstance(value, bool) else repr(value)
        return f"{written} is not {_KINDS[kind]}; write {_KINDS[kind]} here"
    return error["msg"] if kind == _PROBLEM else _SHAPES.get(kind, f"{value!r} cannot be used here")


def _seconds(value: Any) -> float:
    if match := _DURATION.match(str(value).strip()):
        return float(match[1]) * _UNITS[match[2]]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)
    raise _problem(f"{value!r} is no duration; write one such as `30 seconds`, `10 minutes` or `1 day`")


def _bytes(value: Any) -> int:
    if match := _SIZE.match(str(value).strip()):
        return int(float(match[1]) * _BYTES[match[2].upper()])
    raise _problem(f"{value!r} is no size; write one such as `500 MB` or `20 GB`")


def _texts(value: Any) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in items):
        raise _problem("give a name or a list of names")
    return tuple(items)


# Seconds, which people write as numbers or as texts.
Duration = Annotated[
    float, BeforeValidator(_seconds, json_schema_input_type=float | str), Field(examples=["30 seconds", "10 minutes"])
]
# Bytes.
Size = Annotated[int, BeforeValidator(_bytes, json_schema_input_type=str), Field(examples=["500 MB", "20 GB"])]
# One text, or a list of texts.
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts, json_schema_input_type=str | list[str])]
