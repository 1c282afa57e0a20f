"""Where the expressions of a SELECT stand in its text, so that they can be sent as the user wrote them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp
from sqlglot.tokens import Token, TokenType

from tir_dagster.snowflake.query.text import DIALECT, NotIncremental, Query, parse_expression

# From a character to just behind the last.
Span = tuple[int, int]
_SPAN = "span"
_CLAUSES = (
    TokenType.SELECT, TokenType.FROM, TokenType.WHERE, TokenType.GROUP_BY, TokenType.HAVING, TokenType.ORDER_BY,
)  # fmt: skip
_OPEN = (TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE)
_CLOSED = (TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE)
_TEXTS = (TokenType.STRING, TokenType.RAW_STRING)
_BEFORE_JOIN = ("LEFT", "OUTER", "INNER", "DIRECTED")


def mark_spans(query: Query, select: exp.Select) -> None:
    """Let each output, condition and group of a SELECT without subqueries know where it stands in the text.

    Each piece of the text is read once more, alone: where it does not give the same tree, the query is not taken apart.
    """
    clauses = _clauses(query.text)
    outputs = _split(clauses[TokenType.SELECT], TokenType.COMMA)
    _mark(query, select.expressions, outputs)
    for name, clause in (("where", TokenType.WHERE), ("having", TokenType.HAVING)):
        if select.args.get(name):
            _mark(query, [select.args[name].this], [clauses.get(clause, [])])
    if (group := select.args.get("group")) and group.expressions:
        _mark(query, group.expressions, _split(clauses.get(TokenType.GROUP_BY, []), TokenType.COMMA))
    conditions = [join.args["on"] for join in select.args.get("joins") or () if join.args.get("on")]
    _mark(query, conditions, _conditions(clauses[TokenType.FROM]))


def expression_span(node: exp.Expr) -> Span | None:
    """Where an output, a condition or a group stands, once it is marked."""
    return node.meta.get(_SPAN)


def column_span(column: exp.Column) -> Span:
    """Where a column stands, with its table."""
    parts = [part for part in column.parts if "start" in part.meta]
    if len(parts) != len(column.parts):
        raise NotIncremental(f"the place of {column.name} in the text is not known")
    return parts[0].meta["start"], parts[-1].meta["end"] + 1


def _mark(query: Query, nodes: Sequence[exp.Expr], pieces: Sequence[Sequence[Token]]) -> None:
    if len(nodes) != len(pieces):
        raise NotIncremental("its text cannot be taken apart with certainty")
    for node, tokens in zip(nodes, pieces, strict=True):
        if node.is_star:
            continue
        bare, own = (node.this, _without_alias(tokens)) if isinstance(node, exp.Alias) else (node, tokens)
        start, end = (own[0].start, own[-1].end + 1) if own else (0, 0)
        if parse_expression(query.text[start:end]) != bare or (bare.find(exp.Interval) and _has_odd_interval(own)):
            raise NotIncremental(f"{query.text[start:end]} cannot be taken out of its text with certainty")
        bare.meta[_SPAN] = start, end


def _has_odd_interval(tokens: Sequence[Token]) -> bool:
    """Whether an INTERVAL has no text behind it: in INTERVAL + 1 it is a column, which sqlglot does not see."""
    followed = [*tokens[1:], None]
    return any(
        token.token_type == TokenType.INTERVAL and (behind is None or behind.token_type not in _TEXTS)
        for token, behind in zip(tokens, followed, strict=True)
    )


def _without_alias(tokens: Sequence[Token]) -> Sequence[Token]:
    own = tokens[:-1]
    return own[:-1] if own and own[-1].token_type == TokenType.ALIAS else own


def _clauses(text: str) -> dict[TokenType, list[Token]]:
    """The tokens of each clause, without the words that begin it."""
    clauses: dict[TokenType, list[Token]] = {}
    tokens = list(DIALECT.tokenize(text))
    for at, (token, level) in enumerate(_levels(tokens)):
        # IS DISTINCT FROM is no clause.
        compares = token.token_type == TokenType.FROM and tokens[at - 1].token_type == TokenType.DISTINCT
        if level == 0 and token.token_type in _CLAUSES and not compares:
            clause = clauses.setdefault(token.token_type, [])
        else:
            clause.append(token)
    outputs = clauses[TokenType.SELECT]
    if outputs and outputs[0].token_type in (TokenType.DISTINCT, TokenType.ALL):
        outputs.pop(0)
    return clauses


def _conditions(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    """What stands between each ON and the next join."""
    pieces: list[Sequence[Token]] = []
    for joined in _split(tokens, TokenType.JOIN):
        condition = _split(joined, TokenType.ON)[1:]
        pieces += [_without_join_words(one) for one in condition]
    return pieces


def _without_join_words(tokens: Sequence[Token]) -> Sequence[Token]:
    while tokens and tokens[-1].text.upper() in _BEFORE_JOIN and tokens[-1].token_type != TokenType.IDENTIFIER:
        tokens = tokens[:-1]
    return tokens


def _split(tokens: Sequence[Token], at: TokenType) -> list[Sequence[Token]]:
    """The pieces between tokens of a type that stand in no brackets."""
    places = [place for place, (token, level) in enumerate(_levels(tokens)) if level == 0 and token.token_type == at]
    starts, ends = [0, *(place + 1 for place in places)], [*places, len(tokens)]
    return [tokens[start:end] for start, end in zip(starts, ends, strict=True)]


def _levels(tokens: Sequence[Token]) -> list[tuple[Token, int]]:
    """Each token, and in how many brackets it stands."""
    level, levels = 0, []
    for token in tokens:
        level -= token.token_type in _CLOSED
        levels.append((token, level))
        level += token.token_type in _OPEN
    return levels
