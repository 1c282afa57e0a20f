"""SELECTs that ask the warehouse whether rows tie in the order of a window; built from the query's own text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokens import Token, TokenType

from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query.text import (
    DIALECT,
    Query,
    TextSpan,
    keep_texts,
    parse_expression,
    split_tokens,
    token_levels,
)

_SETS = (TokenType.UNION, TokenType.EXCEPT, TokenType.INTERSECT)
_AFTER_WHERE = (
    TokenType.GROUP_BY, TokenType.HAVING, TokenType.QUALIFY, TokenType.WINDOW, TokenType.ORDER_BY, TokenType.LIMIT,
    TokenType.OFFSET, TokenType.FETCH, *_SETS,
)  # fmt: skip
_OPEN = TokenType.L_PAREN
_FRAMES = ("ROWS", "RANGE", "GROUPS")
_DIRECTIONS = ("ASC", "DESC", "NULLS", "FIRST", "LAST")


def tie_probe(query: Query, select: exp.Select, window: exp.Window) -> tuple[str | TableName, ...]:
    """A SELECT that gives a row if any rows tie in the window's order; nothing where none can be made with certainty."""
    if not _stands_alone(select):
        return ()
    tokens = list(DIALECT.tokenize(query.text))
    levels = [level for _, level in token_levels(tokens)]
    try:
        keys = _window_keys(query, tokens, levels, window)
        place = _place_of(window)
        rows_span = _rows_span(query, tokens, levels, select, place)
        ctes = _ctes_before(tokens, levels, place)
    except _NoPlaceError:
        return ()
    listed = ", ".join(f"({query.text[start:end]}) AS TIR_{at}" for at, (start, end) in enumerate(keys))
    names = ", ".join(f"TIR_{at}" for at in range(len(keys)))
    pieces: list[str | TableName] = []
    for at, (start, end) in enumerate(ctes):
        pieces += ["WITH " if at == 0 else ", ", *query.pieces(start, end)]
    pieces += [f"{' ' if ctes else ''}SELECT COUNT(*) AS TIR_N FROM (SELECT {listed} ", *query.pieces(*rows_span)]
    pieces += [f") AS TIR_ROWS GROUP BY {names} HAVING COUNT(*) > 1 LIMIT 1"]
    return tuple(pieces)


class _NoPlaceError(Exception):
    """The place of something in the text is not known with certainty."""


def _stands_alone(select: exp.Select) -> bool:
    """Whether it can be asked by itself: nothing around it is referred to, as in a subquery of a condition."""
    node: exp.Expr = select
    while (above := node.parent) is not None:
        if isinstance(above, exp.With) and above.recursive:
            return False
        if isinstance(above, exp.Subquery):
            if above.parent is not None and not isinstance(
                above.parent, (exp.From, exp.Join, exp.SetOperation, exp.Subquery, exp.CTE)
            ):
                return False
        elif not isinstance(above, (exp.From, exp.Join, exp.Select, exp.SetOperation, exp.CTE, exp.With)):
            return False
        node = above
    return True


def _place_of(window: exp.Window) -> int:
    """Where a name in the window's order stands."""
    order = window.args["order"]
    starts = [part.meta["start"] for part in order.walk() if "start" in part.meta]
    if not starts:
        raise _NoPlaceError
    return min(starts)


def _window_keys(query: Query, tokens: Sequence[Token], levels: Sequence[int], window: exp.Window) -> list[TextSpan]:
    """The places of what the window's rows are parted and ordered by."""
    first, last = _brackets(tokens, levels, _place_of(window))
    if tokens[first - 1].text.upper() != "OVER":
        raise _NoPlaceError
    parted: list[Token] = []
    ordered: list[Token] = []
    part: list[Token] = []
    for token, level in token_levels(tokens[first + 1 : last]):
        if level == 0 and token.token_type in (TokenType.PARTITION_BY, TokenType.ORDER_BY):
            part = parted if token.token_type == TokenType.PARTITION_BY else ordered
        elif level == 0 and token.text.upper() in _FRAMES and token.token_type != TokenType.IDENTIFIER:
            break
        else:
            part.append(token)
    nodes = [*(window.args.get("partition_by") or ()), *(term.this for term in window.args["order"].expressions)]
    places = [
        *(_span(term) for term in (split_tokens(parted, TokenType.COMMA) if parted else ())),
        *(_span(_undirected(term)) for term in split_tokens(ordered, TokenType.COMMA)),
    ]
    if len(places) != len(nodes) or any(
        parse_expression(query.text[start:end]) != node for (start, end), node in zip(places, nodes, strict=True)
    ):
        raise _NoPlaceError
    return places


def _undirected(tokens: Sequence[Token]) -> Sequence[Token]:
    while tokens and tokens[-1].text.upper() in _DIRECTIONS and tokens[-1].token_type != TokenType.IDENTIFIER:
        tokens = tokens[:-1]
    return tokens


def _span(tokens: Sequence[Token]) -> TextSpan:
    if not tokens:
        raise _NoPlaceError
    return tokens[0].start, tokens[-1].end + 1


def _rows_span(
    query: Query, tokens: Sequence[Token], levels: Sequence[int], select: exp.Select, place: int
) -> TextSpan:
    """From FROM to the end of WHERE: the rows that the window goes over."""
    scope = next(scope for scope in _scopes(tokens, levels, place))
    inside = [at for at in range(scope.first, scope.last) if levels[at] == scope.level]
    begins = [at for at in inside if tokens[at].token_type == TokenType.SELECT and tokens[at].start < place]
    froms = [
        at
        for at in inside
        if begins
        and at > begins[-1]
        and tokens[at].token_type == TokenType.FROM
        and tokens[at - 1].token_type != TokenType.DISTINCT
    ]
    if not froms:
        raise _NoPlaceError
    ends = [at for at in inside if at > froms[0] and tokens[at].token_type in _AFTER_WHERE]
    span = tokens[froms[0]].start, tokens[(ends[0] if ends else scope.last) - 1].end + 1
    if not _reads_the_same(query.text[slice(*span)], select):
        raise _NoPlaceError
    return span


def _reads_the_same(text: str, select: exp.Select) -> bool:
    sql = f"SELECT 1 {text}"
    try:
        tree = sqlglot.parse_one(sql, dialect=DIALECT)
    except SqlglotError:
        return False
    keep_texts(tree, sql)
    return all(
        (tree.args.get(name) or None) == (select.args.get(name) or None)
        for name in ("from_", "joins", "laterals", "where")
    )


@dataclass(frozen=True)
class _QueryTokens:
    """A query's tokens: the whole text, or what stands in brackets; from the first to just behind the last."""

    first: int
    last: int
    level: int


def _scopes(tokens: Sequence[Token], levels: Sequence[int], place: int) -> Iterator[_QueryTokens]:
    """The queries around a place, the innermost first."""
    opened = [
        (at, _closing(levels, at))
        for at, token in enumerate(tokens)
        if token.token_type == _OPEN and token.start < place
    ]
    around = [(at, close) for at, close in opened if tokens[close].start > place]
    for at, close in reversed(around):
        if tokens[at + 1].token_type in (TokenType.SELECT, TokenType.WITH, _OPEN):
            yield _QueryTokens(at + 1, close, levels[at] + 1)
    yield _QueryTokens(0, len(tokens), 0)


def _brackets(tokens: Sequence[Token], levels: Sequence[int], place: int) -> tuple[int, int]:
    """The brackets right behind OVER that are closest around a place."""
    pairs = [
        (at, close)
        for at, token in enumerate(tokens)
        if token.token_type == _OPEN
        and at
        and tokens[at - 1].text.upper() == "OVER"
        and token.start < place
        and tokens[close := _closing(levels, at)].start > place
    ]
    if not pairs:
        raise _NoPlaceError
    return pairs[-1]


def _closing(levels: Sequence[int], opening: int) -> int:
    """The bracket that closes another one: the next token on its level."""
    return next((at for at in range(opening + 1, len(levels)) if levels[at] == levels[opening]), len(levels) - 1)


def _ctes_before(tokens: Sequence[Token], levels: Sequence[int], place: int) -> list[TextSpan]:
    """The places of all CTEs that can be referred to from there, the outermost first."""
    spans: list[TextSpan] = []
    for scope in reversed(list(_scopes(tokens, levels, place))):
        if tokens[scope.first].token_type != TokenType.WITH:
            continue
        begins = [
            at
            for at in range(scope.first, scope.last)
            if levels[at] == scope.level and tokens[at].token_type == TokenType.SELECT
        ]
        if not begins or tokens[scope.first + 1].token_type == TokenType.RECURSIVE:
            raise _NoPlaceError
        pieces = [
            _span(cte_tokens) for cte_tokens in split_tokens(tokens[scope.first + 1 : begins[0]], TokenType.COMMA)
        ]
        spans += [piece for piece in pieces if piece[1] <= place]
    return spans
