"""Limits of the analysis: shapes and functions because of which a query is not taken apart into joins and groups."""

from __future__ import annotations

from sqlglot import exp

from tir_dagster.snowflake.query.text import NotTakenApart, written

_CLAUSES = {"expressions", "distinct", "from_", "joins", "where", "group", "having", "order"}
# What a clause means for a refresh by key; others are only named.
_CLAUSE_REASONS = {
    "with_": "it has a WITH clause",
    "qualify": "QUALIFY keeps a row for what other rows are",
    "windows": "a window lets one row depend on others",
    "limit": "LIMIT or TOP keeps a row for what other rows are",
    "offset": "OFFSET keeps a row for what other rows are",
    "sample": "SAMPLE takes other rows each time",
    "laterals": "it joins a table function",
    "pivots": "PIVOT makes columns of rows",
}
PLAIN_PARTS = (
    exp.Select, exp.From, exp.Join, exp.Table, exp.TableAlias, exp.Identifier, exp.Alias, exp.Column, exp.Star,
    exp.Where, exp.Group, exp.Having, exp.Distinct, exp.Order, exp.Ordered, exp.WithinGroup, exp.Anonymous,
    exp.Literal, exp.RawString, exp.Boolean, exp.Null, exp.Var, exp.Paren, exp.Tuple, exp.Case, exp.If, exp.Cast,
    exp.DataType, exp.DataTypeParam, exp.Extract, exp.Interval, exp.And, exp.Or, exp.Not, exp.EQ, exp.NEQ, exp.GT,
    exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ, exp.NullSafeNEQ, exp.Between, exp.In, exp.Is, exp.Like, exp.ILike,
    exp.Any, exp.All, exp.Escape, exp.RegexpLike, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.DPipe, exp.Neg,
    exp.Bracket, exp.JSONExtract, exp.JSONPath, exp.JSONPathRoot, exp.JSONPathKey, exp.JSONPathSubscript,
)  # fmt: skip
_SESSION_PARTS = (exp.CurrentUser, exp.CurrentRole)
_CLOCK_PARTS = (exp.CurrentDate, exp.CurrentTime, exp.CurrentTimestamp, exp.Localtime, exp.Localtimestamp)


def is_aggregate(node: exp.Expr) -> bool:
    """Whether it is the call of an aggregate function."""
    return isinstance(node, exp.Anonymous) and node.name.upper() in PLAIN_AGGREGATES | ORDERED_AGGREGATES


def is_sum(node: exp.Expr) -> bool:
    """Whether it is the call of an aggregate function that adds up: floats, in any order."""
    return is_aggregate(node) and node.name.upper() not in EXACT_AGGREGATES


def is_restless(tree: exp.Expr) -> bool:
    """Whether anything in it depends on the clock, on chance or on the user."""
    names = (call.name.upper() for call in tree.find_all(exp.Anonymous))
    by_name = any(name in CLOCK | CHANCE or name.startswith("CURRENT_") for name in names)
    return by_name or tree.find(*_CLOCK_PARTS, *_SESSION_PARTS, exp.TableSample) is not None


def check_shape(tree: exp.Query) -> exp.Select:
    """Return the one SELECT over plain tables; raise NotTakenApart with the reason if there is none."""
    if not isinstance(tree, exp.Select):
        raise NotTakenApart("it puts several SELECTs together")
    for clause, reason in _CLAUSE_REASONS.items():
        if clause in {"with_", "laterals", "pivots"} and tree.args.get(clause):
            raise NotTakenApart(reason)
    if sum(1 for _ in tree.find_all(exp.Query)) > 1:
        raise NotTakenApart("it has a subquery")
    sources = [tree.args["from_"].this] if tree.args.get("from_") else []
    for source in (*sources, *(join.this for join in tree.args.get("joins") or ())):
        check_source(source)
    if not sources:
        raise NotTakenApart("it has no FROM clause")
    return tree


def check_source(source: exp.Expr) -> None:
    if not isinstance(source, exp.Table) or not isinstance(source.this, exp.Identifier):
        raise NotTakenApart("it reads from something other than a table: joins in brackets, VALUES or a table function")
    odd = {name for name, value in source.args.items() if value} - {"this", "db", "catalog", "alias"}
    if odd & {"sample"}:
        raise NotTakenApart(_CLAUSE_REASONS["sample"])
    if odd:
        raise NotTakenApart(f"{written(source)} is more than a table")
    if source.args.get("alias") and source.args["alias"].args.get("columns"):
        raise NotTakenApart(f"{source.alias} gives a table's columns other names")


def check_parts(select: exp.Select) -> None:
    """Raise NotTakenApart for a clause or expression whose meaning for a refresh by key is not known."""
    for clause, value in select.args.items():
        if value and clause not in _CLAUSES:
            raise NotTakenApart(_CLAUSE_REASONS.get(clause, f"its {clause.strip('_').upper()} clause is not analysed"))
    distinct, group = select.args.get("distinct"), select.args.get("group")
    if distinct and distinct.args.get("on"):
        raise NotTakenApart("DISTINCT ON keeps one of several rows")
    if group and any(group.args.get(name) for name in ("grouping_sets", "cube", "rollup", "totals")):
        raise NotTakenApart("GROUPING SETS, ROLLUP and CUBE put one row into several groups")
    for clause in _CLAUSES - {"order"}:
        for part in _listed(select.args.get(clause)):
            for node in part.walk():
                _check_part(node)


def _listed(value: object) -> list[exp.Expr]:
    return [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, exp.Expr)]


def _check_part(node: exp.Expr) -> None:
    if isinstance(node, exp.Window):
        raise NotTakenApart("a window function lets one row depend on others")
    if why := unsteady_part(node):
        raise NotTakenApart(why)
    if not isinstance(node, PLAIN_PARTS):
        raise NotTakenApart(f"{shortened(node)} is not analysed")
    if isinstance(node, exp.Anonymous) and (why := unsteady_function(node)):
        raise NotTakenApart(why)
    whole = node.this if isinstance(node, exp.Column) else node
    if isinstance(whole, exp.Star) and not _is_listed_star(node):
        raise NotTakenApart("a * inside an expression reads columns that are not named")


def _is_listed_star(star: exp.Expr) -> bool:
    above = star.parent
    if isinstance(star, exp.Star) and isinstance(above, exp.Column):
        star, above = above, above.parent
    counted = isinstance(above, exp.Anonymous) and above.name.upper() == "COUNT" and isinstance(star, exp.Star)
    return counted or isinstance(above, exp.Select)


def unsteady_part(node: exp.Expr) -> str | None:
    """Return why a keyword may give another value each time the query runs; None if it does not."""
    if isinstance(node, _CLOCK_PARTS):
        return f"{written(node)} is another value at each refresh"
    return f"{written(node)} depends on who asks" if isinstance(node, _SESSION_PARTS) else None


def unsteady_function(call: exp.Anonymous) -> str | None:
    """Return why a function may give another value each time for the same arguments; None if it does not."""
    name = function_name(call)
    if name in CLOCK:
        return f"{name} is another value at each refresh"
    if name in CHANCE:
        return f"{name} gives other values each time"
    if name.startswith("CURRENT_"):
        return f"{name} depends on who asks"
    if name in ORDERED_AGGREGATES and not isinstance(call.parent, exp.WithinGroup):
        return f"{name} without WITHIN GROUP (ORDER BY …) takes the rows in any order"
    if name in LOOSE_AGGREGATES:
        return f"{name} may give another value for the same rows"
    if name not in SCALARS | PLAIN_AGGREGATES | ORDERED_AGGREGATES:
        return (
            f"{shortened(call)}: the function is not known to give the same value for the same row "
            "(what a function of your own reads elsewhere is not watched)"
        )
    return None


def function_name(call: exp.Anonymous) -> str:
    """The function's name; empty for one in quotes, which is somebody's own."""
    return "" if isinstance(call.this, exp.Identifier) else call.name.upper()


def shortened(node: exp.Expr, most: int = 40) -> str:
    """A part of the query for a message."""
    text = written(node)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CLOCK = _names("CURRENT_DATE CURRENT_TIME CURRENT_TIMESTAMP GETDATE LOCALTIME LOCALTIMESTAMP SYSDATE SYSTIMESTAMP")
CHANCE = _names("NORMAL RANDOM RANDSTR SEQ1 SEQ2 SEQ4 SEQ8 UNIFORM UUID_STRING ZIPF")

# Aggregates whose result depends on nothing but the rows of the group.
PLAIN_AGGREGATES = _names(
    """AVG BITAND_AGG BITOR_AGG BITXOR_AGG BOOLAND_AGG BOOLOR_AGG BOOLXOR_AGG CORR COUNT COUNT_IF COVAR_POP COVAR_SAMP
    HASH_AGG KURTOSIS MAX MEDIAN MIN OBJECT_AGG PERCENTILE_CONT PERCENTILE_DISC REGR_AVGX REGR_AVGY REGR_COUNT
    REGR_INTERCEPT REGR_R2 REGR_SLOPE REGR_SXX REGR_SXY REGR_SYY SKEW STDDEV STDDEV_POP STDDEV_SAMP SUM VARIANCE
    VARIANCE_POP VARIANCE_SAMP VAR_POP VAR_SAMP"""
)
# Of these, the ones that are the same to the last digit in whichever order rows come.
EXACT_AGGREGATES = _names(
    """BITAND_AGG BITOR_AGG BITXOR_AGG BOOLAND_AGG BOOLOR_AGG BOOLXOR_AGG COUNT COUNT_IF HASH_AGG MAX MEDIAN MIN
    PERCENTILE_DISC REGR_COUNT"""
)
# These need WITHIN GROUP (ORDER BY …).
ORDERED_AGGREGATES = _names("ARRAYAGG ARRAY_AGG LISTAGG")
# Estimates, and picks among rows that tie: two runs over the same rows may differ.
LOOSE_AGGREGATES = _names(
    """ANY_VALUE APPROXIMATE_JACCARD_INDEX APPROXIMATE_SIMILARITY APPROX_COUNT_DISTINCT APPROX_PERCENTILE
    APPROX_PERCENTILE_ACCUMULATE APPROX_PERCENTILE_COMBINE APPROX_TOP_K APPROX_TOP_K_ACCUMULATE APPROX_TOP_K_COMBINE
    ARRAY_UNION_AGG ARRAY_UNIQUE_AGG HLL HLL_ACCUMULATE HLL_COMBINE MAX_BY MINHASH MINHASH_COMBINE MIN_BY MODE"""
)

# Functions of their arguments alone (and of session settings, which are the same for every refresh).
SCALARS = _names(
    """ABS ACOS ACOSH ADD_MONTHS ARRAY_APPEND ARRAY_CAT ARRAY_COMPACT ARRAY_CONSTRUCT ARRAY_CONSTRUCT_COMPACT
    ARRAY_CONTAINS ARRAY_POSITION ARRAY_PREPEND ARRAY_SIZE ARRAY_SLICE ARRAY_SORT ARRAY_TO_STRING ASCII ASIN ASINH
    AS_ARRAY AS_BINARY AS_BOOLEAN AS_CHAR AS_DATE AS_DECIMAL AS_DOUBLE AS_INTEGER AS_NUMBER AS_OBJECT AS_REAL AS_TIME
    AS_TIMESTAMP_LTZ AS_TIMESTAMP_NTZ AS_TIMESTAMP_TZ AS_VARCHAR ATAN ATAN2 ATANH BASE64_DECODE_BINARY
    BASE64_DECODE_STRING BASE64_ENCODE BITAND BITNOT BITOR BITSHIFTLEFT BITSHIFTRIGHT BITXOR BIT_AND BIT_LENGTH BIT_NOT
    BIT_OR BIT_SHIFTLEFT BIT_SHIFTRIGHT BIT_XOR BOOLAND BOOLNOT BOOLOR BOOLXOR CBRT CEIL CEILING CHAR CHARINDEX
    CHARACTER_LENGTH CHAR_LENGTH CHECK_JSON CHR COALESCE COLLATE COLLATION CONCAT CONCAT_WS CONTAINS CONVERT_TIMEZONE COS
    COSH COT DATE DATEADD DATEDIFF DATEFROMPARTS DATE_FROM_PARTS DATE_PART DATE_TRUNC DAY DAYNAME DAYOFMONTH DAYOFWEEK
    DAYOFWEEKISO DAYOFYEAR DECODE DEGREES DIV0 DIV0NULL EDITDISTANCE ENDSWITH EQUAL_NULL EXP FACTORIAL FLOOR GET
    GET_IGNORE_CASE GET_PATH GREATEST GREATEST_IGNORE_NULLS HASH HAVERSINE HEX_DECODE_BINARY HEX_DECODE_STRING HEX_ENCODE
    HOUR IFF IFNULL INITCAP INSERT IS_ARRAY IS_BINARY IS_BOOLEAN IS_CHAR IS_DATE IS_DECIMAL IS_DOUBLE IS_INTEGER
    IS_NULL_VALUE IS_OBJECT IS_REAL IS_TIME IS_VARCHAR JAROWINKLER_SIMILARITY JSON_EXTRACT_PATH_TEXT LAST_DAY LCASE LEAST
    LEAST_IGNORE_NULLS LEFT LEN LENGTH LN LOG LOWER LPAD LTRIM MD5 MD5_BINARY MD5_HEX MD5_NUMBER_LOWER64
    MD5_NUMBER_UPPER64 MINUTE MOD MONTH MONTHNAME MONTHS_BETWEEN NEXT_DAY NULLIF NULLIFZERO NVL NVL2 OBJECT_CONSTRUCT
    OBJECT_CONSTRUCT_KEEP_NULL OBJECT_DELETE OBJECT_INSERT OBJECT_PICK OCTET_LENGTH PARSE_IP PARSE_JSON PARSE_URL PI
    POSITION POW POWER PREVIOUS_DAY QUARTER RADIANS REGEXP REGEXP_COUNT REGEXP_INSTR REGEXP_LIKE REGEXP_REPLACE
    REGEXP_SUBSTR REGEXP_SUBSTR_ALL REGR_VALX REGR_VALY REPEAT REPLACE REVERSE RIGHT RLIKE ROUND RPAD RTRIM
    RTRIMMED_LENGTH SECOND SHA1 SHA1_BINARY SHA1_HEX SHA2 SHA2_BINARY SHA2_HEX SIGN SIN SINH SOUNDEX SPACE SPLIT
    SPLIT_PART SQRT SQUARE STARTSWITH STRIP_NULL_VALUE STRTOK STRTOK_TO_ARRAY SUBSTR SUBSTRING TAN TANH TIME TIMEADD
    TIMEDIFF TIMEFROMPARTS TIMESTAMPADD TIMESTAMPDIFF TIMESTAMPFROMPARTS TIMESTAMP_FROM_PARTS TIMESTAMP_LTZ_FROM_PARTS
    TIMESTAMP_NTZ_FROM_PARTS TIMESTAMP_TZ_FROM_PARTS TIME_FROM_PARTS TIME_SLICE TO_ARRAY TO_BINARY TO_BOOLEAN TO_CHAR
    TO_DATE TO_DECIMAL TO_DOUBLE TO_JSON TO_NUMBER TO_NUMERIC TO_OBJECT TO_TIME TO_TIMESTAMP TO_TIMESTAMP_LTZ
    TO_TIMESTAMP_NTZ TO_TIMESTAMP_TZ TO_VARCHAR TO_VARIANT TO_XML TRANSLATE TRIM TRUNC TRUNCATE TRY_BASE64_DECODE_BINARY
    TRY_BASE64_DECODE_STRING TRY_HEX_DECODE_BINARY TRY_HEX_DECODE_STRING TRY_PARSE_JSON TRY_TO_BINARY TRY_TO_BOOLEAN
    TRY_TO_DATE TRY_TO_DECIMAL TRY_TO_DOUBLE TRY_TO_NUMBER TRY_TO_NUMERIC TRY_TO_TIME TRY_TO_TIMESTAMP
    TRY_TO_TIMESTAMP_LTZ TRY_TO_TIMESTAMP_NTZ TRY_TO_TIMESTAMP_TZ TYPEOF UCASE UNICODE UPPER WEEK WEEKISO WEEKOFYEAR
    WIDTH_BUCKET YEAR YEAROFWEEK YEAROFWEEKISO ZEROIFNULL"""
)

# Functions that take a date part as a bare word, and which of their arguments it is.
TAKES_PART = {
    "DATEADD": 0, "DATEDIFF": 0, "DATE_PART": 0, "DATE_TRUNC": 0, "TIMEADD": 0, "TIMEDIFF": 0, "TIMESTAMPADD": 0,
    "TIMESTAMPDIFF": 0, "LAST_DAY": 1, "TRUNC": 1, "TRUNCATE": 1,
}  # fmt: skip
# These take a date part with a date, and a number of digits, which may be a column, with a number.
TAKES_PART_OR_DIGITS = _names("TRUNC TRUNCATE")
DATE_PARTS = _names(
    """D DAY DAYOFMONTH DAYOFWEEK DAYOFWEEKISO DAYOFWEEK_ISO DAYOFYEAR DAYS DD DOW DOY DW DY EPOCH EPOCH_MICROSECOND
    EPOCH_MICROSECONDS EPOCH_MILLISECOND EPOCH_MILLISECONDS EPOCH_NANOSECOND EPOCH_NANOSECONDS EPOCH_SECOND EPOCH_SECONDS H
    HH HOUR HOURS HR HRS M MI MICROSEC MICROSECOND MICROSECONDS MILLISECOND MILLISECONDS MIN MINUTE MINUTES MINS MM MON
    MONS MONTH MONTHS MS MSEC NANOSEC NANOSECOND NANOSECONDS NS NSEC NSECOND Q QTR QTRS QUARTER QUARTERS S SEC SECOND
    SECONDS SECS TIMEZONE_HOUR TIMEZONE_MINUTE TZH TZM US USEC W WEEK WEEKDAY WEEKDAY_ISO WEEKISO WEEKOFYEAR
    WEEKOFYEARISO WEEKOFYEAR_ISO WEEK_ISO WK WOY WY Y YEAR YEARDAY YEAROFWEEK YEAROFWEEKISO YEARS YR YRS YY YYY
    YYYY"""
)
