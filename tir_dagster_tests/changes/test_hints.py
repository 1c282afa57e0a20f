"""Hints: what JSON says is what Python and SQL mean by it, NULLs included, and what is doubtful is refused."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from random import Random
from typing import Any

import duckdb
import pandas as pd
import pytest
import sqlglot
from hypothesis import given, settings
from hypothesis import strategies as st

from tir_dagster.changes.hints import (
    MAX_CONDITIONS,
    MAX_DEPTH,
    MAX_VALUES,
    All,
    And,
    Between,
    ChangeType,
    Equal,
    Hint,
    HintError,
    In,
    KeyList,
    Not,
    Or,
    Resolution,
    Scope,
    Unknown,
    check_hint,
    condition_sql,
    hint_to_json,
    parse_hint,
    parse_hints,
    partial_warning,
    type_warnings,
)
from tir_dagster.errors import SpecError
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.names import TableName

SALES = TableName("MYDB", "MYSCHEMA", "SALES")
COLUMNS = {
    column.name: column
    for column in (
        Column("ORDER_ID", Kind.INTEGER, 38),
        Column("PRICE", Kind.DECIMAL, 20, 8),
        Column("WEIGHT", Kind.FLOAT),
        Column("PAID", Kind.BOOLEAN),
        Column("PRODUCT", Kind.TEXT),
        Column('odd "name', Kind.TEXT),
        Column("ORDER_DATE", Kind.DATE),
        Column("AT_TIME", Kind.TIME),
        Column("MADE_AT", Kind.TIMESTAMP),
        Column("SEEN_AT", Kind.INSTANT),
        Column("DETAILS", Kind.JSON),
    )
}
TEXTS = (
    "P1",
    "p1",
    "",
    "it's",
    "back\\slash",
    "\\",
    "'; DROP TABLE x; --",
    '"',
    "%",
    "ü",
    "line\nbreak",
    "NULL",
    "\\'",
)
# Few values, so that conditions and rows meet; some look alike but differ.
POOLS: dict[str, tuple[Any, ...]] = {
    "ORDER_ID": (0, 1, 2, 17, -3, 10**30),
    "PRICE": (Decimal(0), Decimal("1.5"), Decimal("-2.25"), Decimal("0.00000001"), Decimal(100)),
    "WEIGHT": (0.0, 0.1, 0.30000000000000004, -1.5, 1e300, 1e-300),
    "PAID": (True, False),
    "PRODUCT": TEXTS,
    'odd "name': TEXTS[:4],
    "ORDER_DATE": (date(2025, 3, 1), date(2025, 3, 31), date(2024, 2, 29), date(1900, 1, 1)),
    "AT_TIME": (time(0, 0), time(12, 30), time(23, 59, 59, 999999)),
    "MADE_AT": (datetime(2025, 3, 1), datetime(2025, 3, 1, 0, 0, 0, 1), datetime(2025, 3, 30, 2, 30)),  # noqa: DTZ001
    "SEEN_AT": (datetime(2025, 3, 1, tzinfo=UTC), datetime(2025, 3, 1, 1, tzinfo=timezone(timedelta(hours=2)))),
}
TYPES = {
    "ORDER_ID": "HUGEINT",
    "PRICE": "DECIMAL(20, 8)",
    "WEIGHT": "DOUBLE",
    "PAID": "BOOLEAN",
    "PRODUCT": "VARCHAR",
    'odd "name': "VARCHAR",
    "ORDER_DATE": "DATE",
    "AT_TIME": "TIME",
    "MADE_AT": "TIMESTAMP",
    "SEEN_AT": "TIMESTAMPTZ",
}
NAMES = tuple(POOLS)


def sales(scope: Scope, change: ChangeType = ChangeType.MIXED_CHANGES) -> Hint:
    return Hint(SALES, change, scope)


def parsed(scope: Any) -> Scope:
    return parse_hint({"table": str(SALES), "type": "MIXED_CHANGES", "scope": scope}, "here").scope


def checked(scope: Any) -> Scope:
    return check_hint(sales(parsed(scope)), COLUMNS).scope


# The forms


def test_the_forms_people_write_by_hand():
    text = '{"table": "MYDB.MYSCHEMA.SALES", "type": "ADD_ROWS", "scope": {"equal": {"PRODUCT": "P1"}}}'
    assert parse_hint(text, "here") == Hint(SALES, ChangeType.ADD_ROWS, Equal("PRODUCT", "P1"))

    ranged = {
        "and": [
            {"between": {"ORDER_DATE": ["2025-03-01", "2025-03-31"]}},
            {"not": {"in": {"PRODUCT": ["google", None]}}},
        ]
    }
    assert parsed(ranged) == And(
        (Between("ORDER_DATE", "2025-03-01", "2025-03-31"), Not(In("PRODUCT", ("google", None))))
    )
    assert parsed({"keys": [{"ORDER_ID": 17}, {"ORDER_ID": None}]}) == KeyList(("ORDER_ID",), ((17,), (None,)))
    assert parsed({"keys": [{"A": 1, "B": 2}, {"B": 4, "A": 3}]}) == KeyList(("A", "B"), ((1, 2), (3, 4)))
    assert parsed({"or": [{"equal": {"A": True}}]}) == Or((Equal("A", True),))
    assert parsed("all") == All()
    assert parsed("unknown") == parsed(None) == Unknown()


def test_a_scope_left_out_is_unknown_and_words_may_be_in_any_case():
    assert parse_hint({"table": "mydb.myschema.sales", "type": "mixed_changes"}, "here") == sales(Unknown())
    assert parsed("ALL") == All()


def test_several_columns_in_one_condition_must_all_be_met():
    assert parsed({"equal": {"A": 1, "B": 2}}) == And((Equal("A", 1), Equal("B", 2)))
    assert parsed({"in": {"A": [1], "B": [2]}}) == And((In("A", (1,)), In("B", (2,))))


def test_a_list_of_hints_may_stand_where_one_may():
    hint = {"table": str(SALES), "type": "ADD_ROWS", "scope": "all"}
    other = {"table": "A.B.C", "type": "REMOVE_ROWS"}
    both = (sales(All(), ChangeType.ADD_ROWS), Hint(TableName("A", "B", "C"), ChangeType.REMOVE_ROWS, Unknown()))
    assert parse_hints(hint, "here") == both[:1]
    assert parse_hints([hint, json.dumps(other)], "here") == both
    assert parse_hints(json.dumps([hint, other]), "here") == both
    assert parse_hints([], "here") == ()
    with pytest.raises(HintError, match=r"here: \[1\].type: 'ADDED_ROWS' is unknown \(did you mean ADD_ROWS\?\)"):
        parse_hints([hint, {**hint, "type": "ADDED_ROWS"}], "here")


def test_numbers_keep_the_digits_that_were_written():
    assert parse_hint('{"table": "A.B.C", "type": "ADD_ROWS", "scope": {"equal": {"P": 0.1}}}', "here").scope == Equal(
        "P", Decimal("0.1")
    )
    assert parsed({"equal": {"P": 0.1}}) == Equal("P", Decimal("0.1"))
    precise = Equal("P", Decimal("0.12345678901234567890123456789"))
    assert hint_to_json(sales(precise))["scope"] == {"equal": {"P": {"number": "0.12345678901234567890123456789"}}}
    assert parsed({"equal": {"P": {"number": "0.12345678901234567890123456789"}}}) == precise


# Fitting


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"equal": {"product": "P1"}}, Equal("PRODUCT", "P1")),
        ({"equal": {'odd "name': "x"}}, Equal('odd "name', "x")),
        ({"equal": {"order_id": 17.0}}, Equal("ORDER_ID", 17)),
        ({"in": {"PRICE": [1, 1.50, None]}}, In("PRICE", (Decimal(1), Decimal("1.5"), None))),
        ({"equal": {"WEIGHT": 1}}, Equal("WEIGHT", 1.0)),
        ({"equal": {"PAID": False}}, Equal("PAID", False)),
        (
            {"between": {"ORDER_DATE": ["2025-03-01", "2025-03-01"]}},
            Between("ORDER_DATE", date(2025, 3, 1), date(2025, 3, 1)),
        ),
        ({"equal": {"AT_TIME": "12:30"}}, Equal("AT_TIME", time(12, 30))),
        ({"equal": {"MADE_AT": "2025-03-01 12:30:00.5"}}, Equal("MADE_AT", datetime(2025, 3, 1, 12, 30, 0, 500000))),  # noqa: DTZ001
        ({"equal": {"SEEN_AT": "2025-03-01T01:00:00+02:00"}}, Equal("SEEN_AT", datetime(2025, 2, 28, 23, tzinfo=UTC))),
        ({"equal": {"SEEN_AT": "2025-03-01T01:00:00Z"}}, Equal("SEEN_AT", datetime(2025, 3, 1, 1, tzinfo=UTC))),
        (
            {"keys": [{"order_id": 1, "order_date": None}]},
            KeyList(("ORDER_ID", "ORDER_DATE"), ((1, None),)),
        ),
        ("all", All()),
    ],
)
def test_a_checked_hint_has_stored_names_and_python_values(written, meant):
    scope = checked(written)
    assert scope == meant
    assert [type(value) for value in values_in(scope)] == [type(value) for value in values_in(meant)]


def values_in(scope: Scope) -> list[Any]:
    match scope:
        case Equal(_, value):
            return [value]
        case In(_, values):
            return list(values)
        case Between(_, low, high):
            return [low, high]
        case KeyList(_, keys):
            return [value for key in keys for value in key]
    return []


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ({"equal": {"ORDER_ID": 17.5}}, "give a whole number"),
        ({"equal": {"ORDER_ID": True}}, r"cannot be true: give a whole number"),
        ({"equal": {"ORDER_ID": 10**38}}, "at most 38 digits"),
        ({"in": {"PRICE": [1, "2"]}}, r"PRICE \(decimal\) cannot be '2': give a number with at most 8 decimals"),
        ({"equal": {"PRICE": 0.000000001}}, "at most 8 decimals"),
        ({"equal": {"WEIGHT": True}}, "give a number that a double holds"),
        ({"equal": {"WEIGHT": 10**399}}, "give a number that a double holds"),
        ({"equal": {"PAID": "true"}}, "give true or false"),
        ({"between": {"PAID": [False, True]}}, "cannot order"),
        ({"equal": {"PRODUCT": 1}}, "give a text, in quotes"),
        ({"equal": {"ORDER_DATE": "20250301"}}, "give a date as YYYY-MM-DD"),
        ({"equal": {"ORDER_DATE": "2025-02-30"}}, "give a date as YYYY-MM-DD"),
        ({"equal": {"ORDER_DATE": "2025-03-01T00:00:00"}}, "give a date as YYYY-MM-DD"),
        ({"equal": {"ORDER_DATE": "\u0662\u0660\u0662\u0665-03-01"}}, "give a date as YYYY-MM-DD"),
        ({"equal": {"AT_TIME": "25:00:00"}}, "give a time of day"),
        ({"between": {"MADE_AT": ["2025-03-01", "2025-03-31"]}}, "a date alone is not enough"),
        ({"equal": {"MADE_AT": "2025-03-01T00:00:00Z"}}, "without a zone"),
        ({"equal": {"SEEN_AT": "0001-01-01T00:00:00+10:00"}}, "with its zone"),
        ({"equal": {"SEEN_AT": "2025-03-01T00:00:00.0000001Z"}}, "with its zone"),
        ({"equal": {"MADE_AT": pd.NaT}}, "NaT is not a value"),
        ({"equal": {"DETAILS": "{}"}}, "DETAILS holds JSON"),
        ({"equal": {"DETAILS": None}}, "DETAILS holds JSON"),
        ({"between": {"PRODUCT": ["b", "a"]}}, "reversed"),
        ({"between": {"SEEN_AT": ["2025-03-01T00:00:00Z", "2025-03-01T01:00:00+02:00"]}}, "reversed"),
        ({"equal": {"product": "P1", "PRODUCT": "P2"}}, "PRODUCT cannot be 'P1' and 'P2' at once"),
        ({"keys": [{"order_id": 1, "ORDER_ID": 2}]}, "name a column twice"),
        ({"not": {"or": [{"equal": {"PRODUCT": "P1"}}, {"equal": {"PAID": "x"}}]}}, "give true or false"),
    ],
)
def test_what_does_not_fit_the_table_is_refused_with_its_table_column_and_value(written, complaint):
    with pytest.raises(HintError, match=complaint) as raised:
        checked(written)
    assert isinstance(raised.value, SpecError)
    assert "here: " in str(raised.value) or str(raised.value).startswith("A hint for MYDB.MYSCHEMA.SALES: ")


# Refusals while reading


@pytest.mark.parametrize(
    ("scope", "complaint"),
    [
        ("unknow", r"did you mean unknown\?"),
        (17, "here: scope: 17; supported are"),
        ([], "a list; supported are"),
        ({}, "a dict; supported are"),
        ({"equal": {"A": 1}, "in": {"B": [1]}}, "put them into a list under `and`"),
        ({"equal": {}}, "name the column"),
        ({"equal": "A"}, "name the column"),
        ({"equal": {"": 1}}, "not a column's name"),
        ({"equal": {5: 1}}, "5 is not a column's name"),
        ({"equal": {"x" * 300: 1}}, "not a column's name"),
        ({"equal": {"A\0": 1}}, "not a column's name"),
        ({"equal": {"A": {"b": 1}}}, "a dict is not a value; supported are texts, numbers, true, false and null"),
        ({"equal": {"A": {"number": "1; DROP TABLE x"}}}, "a dict is not a value"),
        ({"equal": {"A": b"x"}}, "a bytes is not a value"),
        ({"equal": {"A": float("nan")}}, "NaN is not supported"),
        ({"equal": {"A": float("-inf")}}, "-Infinity is not supported"),
        ({"equal": {"A": Decimal("sNaN")}}, "sNaN is not supported"),
        ({"equal": {"A": Decimal("1e999999999")}}, "out of range"),
        ({"equal": {"A": 10**5000}}, "a number of more than 400 digits is out of range"),
        ({"equal": {"A": "x\0y"}}, "NUL character"),
        ({"equal": {"A": "\ud800"}}, "half a character"),
        ({"in": {"A": "abc"}}, "'abc' is not a list of values"),
        ({"in": {"A": range(3)}}, "a range is not a list"),
        ({"in": {"A": [1, [2]]}}, r"scope.in.A\[1\]: a list is not a value"),
        ({"between": {"A": [1]}}, "two bounds"),
        ({"between": {"A": "ab"}}, "two bounds"),
        ({"between": {"A": [1, None]}}, "cannot be null"),
        ({"between": {"A": [2, 1.5]}}, r"reversed; write \[1.5, 2\]"),
        ({"and": []}, "list of conditions is empty"),
        ({"and": {"equal": {"A": 1}}}, "a dict is not a list of conditions"),
        ({"or": [{"equal": {"A": 1}}, "all"]}, r"scope.or\[1\]: 'all'; supported are"),
        ({"not": [{"equal": {"A": 1}}]}, "scope.not: a list; supported are"),
        ({"not": {"keys": [{"A": 1}]}}, "a list of keys stands alone, use `in`"),
        ({"keys": []}, "list of keys is empty"),
        ({"keys": [17]}, "write every key as"),
        ({"keys": [{}]}, "write every key as"),
        ({"keys": [{"A": 1}, {"A": 1, "B": 1}]}, "columns of the first one"),
        ({"in": {"A": list(range(MAX_VALUES + 1))}}, "more than 100,000 values"),
        ({"keys": [{"A": at, "B": 1} for at in range(MAX_VALUES // 2 + 1)]}, "more than 100,000 values"),
        ({"or": [{"equal": {"A": 1}}] * (MAX_CONDITIONS + 1)}, "more than 1,000 conditions"),
    ],
)
def test_a_scope_of_the_wrong_shape_is_refused_with_its_place(scope, complaint):
    with pytest.raises(HintError, match=complaint) as raised:
        parsed(scope)
    assert str(raised.value).startswith("here: scope")
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize(
    ("hint", "complaint"),
    [
        ("", "here: not JSON: "),
        ("null", "null is not a hint"),
        ('"x"', "'x' is not a hint"),
        ('{"table": "A.B.C", "type": "ADD_ROWS", "scope": {"equal": {"A": NaN}}}', "NaN is not supported"),
        ('{"table": "A.B.C", "type": "ADD_ROWS", "scope": {"equal": {"A": -Infinity}}}', "-Infinity is not supported"),
        ('{"table": "A.B.C", "type": "ADD_ROWS", "scope": {"equal": {"A": 1, "A": 2}}}', "'A' is given twice"),
        ('{"table": "A.B.C", "type": "ADD_ROWS", "type": "ADD_ROWS"}', "'type' is given twice"),
        ('{"table": "A.B.C", "type": "ADD_ROWS", "scope": {"equal": {"A": 1e99999999999999999999}}}', "here: "),
        ('{"table": "A.B.C", "type": "ADD_ROWS", "scope": {"equal": {"A": 1e-9999}}}', "out of range"),
        ('{"table": "A.B.C", "type": "ADD_ROWS", "scope": {"equal": {"A": ' + "9" * 5000 + "}}}", "not JSON"),
        ('{"table": "A.B.C", "type": "ADD_ROWS", "scope": {"equal": {"A": "\\ud800"}}}', "half a character"),
        ("[" * 200_000, "nested too deeply|not JSON"),
        ('{"not":' * 200_000 + "1" + "}" * 200_000, "nested too deeply"),
        ({"table": "A.B.C; DROP TABLE X", "type": "ADD_ROWS"}, "not a full table name"),
        ({"table": 'A.B."C\0"', "type": "ADD_ROWS"}, "NUL character"),
        ({"table": ["A", "B", "C"], "type": "ADD_ROWS"}, "table: a list is not a value"),
        ({"table": "A.B.C", "type": ["ADD_ROWS"]}, "type: a list is unknown"),
        ({"table": "A.B.C", "type": "ADD_ROWS", 5: "all"}, "unknown field 5"),
    ],
)
def test_what_is_not_a_hint_is_refused(hint, complaint):
    with pytest.raises(HintError, match=complaint) as raised:
        parse_hint(hint, "here")
    assert len(str(raised.value)) < 700


def nested(depth: int) -> dict[str, Any]:
    scope: dict[str, Any] = {"equal": {"PRODUCT": "P1"}}
    for _ in range(depth):
        scope = {"not": scope}
    return scope


def test_conditions_go_only_so_deep():
    assert check_hint(sales(parsed(nested(MAX_DEPTH))), COLUMNS)
    with pytest.raises(HintError, match="nested more than 32 deep"):
        parsed(nested(MAX_DEPTH + 1))
    with pytest.raises(HintError, match="nested more than 32 deep"):
        parsed(nested(100_000))
    endless: dict[str, Any] = {}
    endless["not"] = endless
    with pytest.raises(HintError, match="nested more than 32 deep"):
        parsed(endless)
    handmade: Scope = Equal("PRODUCT", "P1")
    for _ in range(5_000):
        handmade = Not(handmade)
    with pytest.raises(HintError, match="nested more than 32 deep"):
        condition_sql(handmade, COLUMNS)


def test_several_columns_count_as_one_level_so_that_the_round_trip_works_at_the_greatest_depth():
    scope: dict[str, Any] = {"equal": {"A": 1, "B": 2}}
    for _ in range(MAX_DEPTH - 1):
        scope = {"not": scope}
    hint = sales(parsed(scope))
    assert parse_hint(hint_to_json(hint), "again") == hint
    with pytest.raises(HintError, match="nested more than 32 deep"):
        parsed({"not": scope})


def test_as_many_values_as_are_supported_pass():
    most = checked({"in": {"ORDER_ID": list(range(MAX_VALUES))}})
    assert condition_sql(most, COLUMNS).count(" IN (") == 7, "lists stay below the length that Snowflake takes"


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates() | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["equal", "in", "between", "and", "or", "not", "keys", "number", "table", "type", "scope", "A"]
            )
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(junk, st.booleans())
@settings(deadline=None, max_examples=200)
def test_anything_at_all_is_a_hint_or_a_hint_error(value, whole):
    given_value = value if whole else {"table": "A.B.C", "type": "ADD_ROWS", "scope": value}
    try:
        hints = parse_hints(given_value, "here")
        for hint in hints:
            condition_sql(check_hint(hint, COLUMNS).scope, COLUMNS)
    except HintError as error:
        assert str(error)[:4] in ("here", "A hi")  # noqa: PT017


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=100)
def test_any_text_is_a_hint_or_a_hint_error(text):
    with pytest.raises(HintError, match="here: "):
        parse_hint(text, "here")


# Meaning


def meets(scope: Scope, row: dict[str, Any]) -> bool:
    """Whether the row is in the scope: what `condition_sql` must mean. A NULL equals NULL, and nothing else."""
    match scope:
        case KeyList(columns, keys):
            return tuple(row[name] for name in columns) in keys
        case Equal(column, value):
            return row[column] == value
        case In(column, values):
            return row[column] in values
        case Between(column, low, high):
            return row[column] is not None and low <= row[column] <= high
        case Not(condition):
            return not meets(condition, row)
        case And(conditions):
            return all(meets(condition, row) for condition in conditions)
        case Or(conditions):
            return any(meets(condition, row) for condition in conditions)
    return True


@st.composite
def leaves(draw: st.DrawFn) -> Scope:
    name = draw(st.sampled_from(NAMES))
    values = st.sampled_from(POOLS[name])
    match draw(st.sampled_from(["equal", "in", "between"])):
        case "equal":
            return Equal(name, draw(st.none() | values))
        case "between" if name != "PAID":
            low, high = sorted([draw(values), draw(values)])
            return Between(name, low, high)
    return In(name, tuple(draw(st.lists(st.none() | values, min_size=1, max_size=4))))


conditions = st.recursive(
    leaves(),
    lambda inner: (
        st.builds(Not, inner)
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: Or(tuple(parts)))
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: And(tuple(parts)))
    ),
    max_leaves=8,
)


@st.composite
def key_lists(draw: st.DrawFn) -> KeyList:
    names = tuple(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)))
    key = st.tuples(*(st.none() | st.sampled_from(POOLS[name][:2]) for name in names))
    return KeyList(names, tuple(draw(st.lists(key, min_size=1, max_size=6))))


scopes = conditions | key_lists() | st.sampled_from([All(), Unknown()])


def fitted(scope: Scope) -> Scope | None:
    """The checked scope; None for an `and` that asks one column for two values, which is refused elsewhere."""
    try:
        return check_hint(sales(scope), COLUMNS).scope
    except HintError as error:
        assert "at once" in str(error)  # noqa: PT017
        return None


def sample_rows() -> list[dict[str, Any]]:
    """Rows of few values and many NULLs, one of nothing else; a float may be NaN."""
    random = Random(7)
    pools = {name: (*pool, None, None) for name, pool in POOLS.items()} | {
        "WEIGHT": (*POOLS["WEIGHT"], None, float("nan"), float("inf"))
    }
    rows = [{name: random.choice(pool) for name, pool in pools.items()} for _ in range(60)]
    return [*rows, dict.fromkeys(NAMES)]


ROWS = sample_rows()


@pytest.fixture(scope="module")
def duck():
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        columns = ", ".join(f'"{name.replace(chr(34), chr(34) * 2)}" {kind}' for name, kind in TYPES.items())
        connection.execute(f"CREATE TABLE sales (n INTEGER, {columns})")
        marks = ", ".join("?" for _ in range(len(TYPES) + 1))
        connection.executemany(
            f"INSERT INTO sales VALUES ({marks})", [(at, *row.values()) for at, row in enumerate(ROWS)]
        )
        yield connection


def answers(duck, condition: str) -> list[bool | None]:
    """What the condition says of each row."""
    [sql] = sqlglot.transpile(f"SELECT {condition} FROM sales ORDER BY n", read="snowflake", write="duckdb")
    return [answer for (answer,) in duck.execute(sql).fetchall()]


@given(scope=scopes)
@settings(deadline=None, max_examples=200)
def test_python_and_sql_mean_the_same_by_a_scope(duck, scope):
    scope = fitted(scope)
    if scope is None:
        return
    sql_answers = answers(duck, condition_sql(scope, COLUMNS))
    assert sql_answers == [meets(scope, row) for row in ROWS], "and no answer is NULL"


@given(scope=scopes)
@settings(deadline=None, max_examples=150)
def test_json_and_back_is_the_same_hint(scope):
    scope = fitted(scope)
    if scope is None:
        return
    hint = sales(scope, ChangeType.UPDATE_ROWS)
    text = json.dumps(hint_to_json(hint), allow_nan=False)
    again = parse_hint(text, "again")
    assert check_hint(again, COLUMNS) == hint
    assert parse_hint(hint_to_json(again), "again") == again, "also before it met its table"
    assert parse_hint(json.loads(text), "again") == again, "also through a library that knows only floats"


@pytest.mark.parametrize(
    ("scope", "row", "expected"),
    [
        (Equal("A", None), None, True),
        (Equal("A", None), 1, False),
        (Equal("A", 1), None, False),
        (Not(Equal("A", 1)), None, True),
        (Not(Equal("A", None)), None, False),
        (In("A", (1, 2)), None, False),
        (In("A", (1, None)), None, True),
        (In("A", (1, None)), 2, False),
        (Not(In("A", (1, 2))), None, True),
        (Not(In("A", (1, None))), None, False),
        (Between("A", 1, 3), None, False),
        (Not(Between("A", 1, 3)), None, True),
        (Between("A", 1, 3), 1, True),
        (Between("A", 1, 3), 3, True),
        (Between("A", 1, 3), 4, False),
        (KeyList(("A",), ((None,),)), None, True),
        (KeyList(("A",), ((1,),)), None, False),
        (All(), None, True),
        (Unknown(), None, True),
    ],
)
def test_a_null_meets_only_what_names_it_and_what_is_not(duck, scope, row, expected):
    assert meets(scope, {"A": row}) is expected
    value = "NULL" if row is None else row
    sql = condition_sql(scope, {"A": Column("A", Kind.INTEGER)}, alias="s")
    assert duck.execute(f'SELECT {sql} FROM (SELECT {value} AS "A") AS s').fetchall() == [(expected,)]


def test_keys_of_several_columns_match_null_safely_in_one_list_per_place_of_nulls():
    scope = checked(
        {
            "keys": [
                {"ORDER_ID": at, "ORDER_DATE": day, "PRODUCT": "P1"}
                for at in (1, 2, None)
                for day in ("2025-03-01", None)
            ]
        }
    )
    sql = condition_sql(scope, COLUMNS, alias="f")
    assert sql.count(" IN (") == 4
    assert (
        'f."ORDER_ID" IS NOT NULL AND f."ORDER_DATE" IS NULL AND f."PRODUCT" IS NOT NULL AND '
        "(f.\"ORDER_ID\", f.\"PRODUCT\") IN ((1, 'P1'), (2, 'P1'))"
    ) in sql


def test_the_sql_has_typed_literals_and_can_prune():
    scope = checked({"and": [{"between": {"ORDER_DATE": ["2025-03-01", "2025-03-31"]}}, {"equal": {"PRICE": 1e-8}}]})
    assert condition_sql(scope, COLUMNS) == (
        "((\"ORDER_DATE\" IS NOT NULL AND \"ORDER_DATE\" BETWEEN '2025-03-01'::DATE AND '2025-03-31'::DATE)"
        ' AND ("PRICE" IS NOT NULL AND "PRICE" IN (0.00000001)))'
    )
    assert condition_sql(All(), COLUMNS) == condition_sql(Unknown(), COLUMNS) == "TRUE"


@pytest.mark.parametrize(
    "column", ["ORDER_ID", "PRICE", "WEIGHT", "PAID", "ORDER_DATE", "AT_TIME", "MADE_AT", "SEEN_AT"]
)
def test_a_text_never_gets_into_sql_as_another_type(column):
    """Even for a scope that nobody checked before."""
    for scope in (Equal(column, "1) OR (1=1"), In(column, ("1) OR (1=1",)), KeyList((column,), (("0 OR TRUE",),))):
        with pytest.raises(HintError, match=column):
            condition_sql(scope, COLUMNS)
    with pytest.raises(HintError, match="no column"):
        condition_sql(Equal(f'{column}" = 1 OR "{column}', 1), COLUMNS)


@given(text=st.text(alphabet=st.sampled_from("'\"\\;-/*x\n%$ü"), max_size=12))
@settings(deadline=None, max_examples=150)
def test_any_text_stays_one_literal(duck, text):
    condition = condition_sql(Equal("PRODUCT", text), COLUMNS)
    [statement] = sqlglot.parse(f"SELECT 1 WHERE {condition}", read="snowflake")
    assert statement is not None
    assert [node.this for node in statement.find_all(sqlglot.exp.Literal) if node.is_string] == [text]
    assert answers(duck, condition) == [row["PRODUCT"] == text for row in ROWS]


# Checks on the declared type


def test_rows_said_to_be_added_that_were_there_before_are_named():
    """The hint ADD_ROWS product='P1' where sale 1 has been in the extract since long."""
    [warning] = type_warnings(
        sales(Equal("PRODUCT", "P1"), ChangeType.ADD_ROWS), old_keys=[(1,)], new_keys=[(1,), (3,)]
    )
    assert "says ADD_ROWS, but its scope hits 1 key (1) that the extract has already" in warning
    assert type_warnings(sales(All(), ChangeType.ADD_ROWS), old_keys=[], new_keys=[(1,)]) == ()


def test_rows_said_to_be_removed_that_the_source_still_has_are_named():
    [warning] = type_warnings(sales(All(), ChangeType.REMOVE_ROWS), old_keys=[], new_keys=[("b",), (None,), ("a",)])
    assert "the source still has 3 keys ('a', 'b', NULL) in its scope" in warning
    assert type_warnings(sales(All(), ChangeType.REMOVE_ROWS), old_keys=[(1,)], new_keys=[]) == ()


def test_an_update_keeps_the_keys_of_its_scope():
    hint = sales(All(), ChangeType.UPDATE_ROWS)
    assert type_warnings(hint, old_keys=[(1,), (None,)], new_keys=[(None,), (1,), (1,)]) == ()
    for old, new in ([(1,)], []), ([], [(1,)]):
        assert len(type_warnings(hint, old_keys=old, new_keys=new)) == 1
    [warning] = type_warnings(hint, old_keys=[(1, "x"), (2, None)], new_keys=[(1, "x"), (10, "y"), (9, "y")])
    assert "2 keys ((9, 'y'), (10, 'y')) in the source but not in the extract and " in warning
    assert "1 key ((2, NULL)) in the extract but not in the source" in warning


def test_a_type_that_claims_nothing_and_a_scope_that_says_nothing_cannot_be_wrong():
    assert type_warnings(sales(All()), old_keys=[(1,)], new_keys=[(2,)]) == ()
    for change in ChangeType:
        assert type_warnings(sales(Unknown(), change), old_keys=[(1,)], new_keys=[(2,)]) == ()


def test_only_the_first_keys_are_shown_whatever_their_types():
    odd = [(value,) for value in (7, None, "x", date(2025, 1, 1), float("nan"), 3, Decimal("4.5"), True)]
    [warning] = type_warnings(sales(All(), ChangeType.ADD_ROWS), old_keys=odd, new_keys=[])
    assert "8 keys (3, 4.5, 7, " in warning
    assert ", …)" in warning


def test_a_resolution_is_the_union_of_both_sides_with_its_warnings():
    resolution = Resolution(sales(All(), ChangeType.ADD_ROWS), frozenset({(1,)}), frozenset({(2,)}))
    assert resolution.keys == {(1,), (2,)}
    assert len(resolution.warnings) == 1


def test_changes_found_beside_the_described_ones_make_the_hints_partial():
    hints = [sales(All()), sales(Equal("PRODUCT", "P1")), Hint(TableName("A", "B", "prices"), ChangeType.ADD_ROWS)]
    warning = partial_warning(hints, detected=12, described=10, missed=[(18,), (17,)])
    assert warning is not None
    assert warning.startswith(
        'The hints for MYDB.MYSCHEMA.SALES, A.B."prices" were partial: 12 changed keys were found, 10 were described, '
        "and 2 keys (17, 18) in no hint are refreshed as well."
    )
    assert partial_warning(hints, detected=12, described=40, missed=[]) is None
    assert partial_warning([], detected=12, described=0, missed=[(1,)]) is None, "without hints nothing was promised"
