"""The text of a query: read word for word in Snowflake's dialect, the tables it names, and where something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sqlglot
from sqlglot import exp
from sqlglot.dialects.snowflake import Snowflake
from sqlglot.errors import ParseError, SqlglotError, TokenError
from sqlglot.generators.snowflake import SnowflakeGenerator
from sqlglot.optimizer.normalize_identifiers import normalize_identifiers
from sqlglot.parsers.snowflake import SnowflakeParser
from sqlglot.tokens import Token, TokenType

from tir_dagster.errors import SpecError
from tir_dagster.snowflake.names import TableName

SUPPORTED = (
    "An extract's query is one SELECT in Snowflake's SQL, with anything that a SELECT may have: joins, groups, windows, "
    "subqueries, WITH, UNION"
)
_STARTS = (TokenType.SELECT, TokenType.WITH, TokenType.L_PAREN)


class ViewError(SpecError):
    """A query that no extract can be made of. `line` and `column` say where in it, if that is known."""

    def __init__(self, problem: str, *, line: int | None = None, column: int | None = None) -> None:
        place = f", line {line}, column {column}" if line else ""
        super().__init__(f"`query`{place}: {problem}")
        self.line = line
        self.column = column


class NotTakenApart(Exception):  # noqa: N818 - an answer, not an error
    """Why a query is valid, but can only be read and compared as a whole."""


class _WordForWord(Snowflake):
    """Snowflake's dialect that leaves function calls as they are written.

    sqlglot knows many functions as its own and writes them back in another form: other names, other date formats.
    Here each call keeps its name and arguments, so that a function is judged by the name that Snowflake's documentation
    uses. What is written from a tree is compared and shown in messages; it is never sent to the warehouse.
    """

    class Parser(SnowflakeParser):
        FUNCTIONS: ClassVar[dict[str, Callable[..., Any]]] = {}
        FUNCTION_PARSERS: ClassVar[dict[str, Callable[..., Any]]] = {
            name: SnowflakeParser.FUNCTION_PARSERS[name] for name in ("CAST", "TRY_CAST", "EXTRACT")
        }

    class Generator(SnowflakeGenerator):
        # Snowflake's own would write F IS NOT TRUE as NOT F, which is another value where F is NULL.
        IS_BOOL_ALLOWED = True


DIALECT = _WordForWord()


@dataclass(frozen=True)
class Reference:
    """A place in the text where a table is named: from its first character to just behind its last."""

    table: TableName
    start: int
    end: int


@dataclass(frozen=True)
class Query:
    """A query's text, without a semicolon and comments around it, its tree, and the tables that it names."""

    text: str
    tree: exp.Query
    references: tuple[Reference, ...] = ()

    @property
    def tables(self) -> tuple[TableName, ...]:
        """Each table once, in the order in which the text names them."""
        return tuple(dict.fromkeys(reference.table for reference in self.references))

    def pieces(self, start: int = 0, end: int | None = None) -> Iterator[str | TableName]:
        """The text, or a part of it, in pieces, with a table in each place where one is named."""
        at, end = start, len(self.text) if end is None else end
        for reference in self.references:
            if start <= reference.start and reference.end <= end:
                yield self.text[at : reference.start]
                yield reference.table
                at = reference.end
        yield self.text[at:end]

    def error_at_table(self, table: TableName, problem: str) -> ViewError:
        """The error about a table, with the place where the query names it first."""
        starts = [reference.start for reference in self.references if reference.table == table]
        return self.error_at(starts[0], problem) if starts else ViewError(problem)

    def error(self, node: exp.Expr | None, problem: str) -> ViewError:
        """The error about a part of the query, with the place where that part begins."""
        starts = [part.meta["start"] for part in node.walk() if "start" in part.meta] if node else []
        return self.error_at(min(starts), problem) if starts else ViewError(problem)

    def error_at(self, start: int, problem: str) -> ViewError:
        before = self.text[:start]
        return ViewError(problem, line=before.count("\n") + 1, column=len(before) - before.rfind("\n"))


def too_deep() -> ViewError:
    return ViewError(
        "it is nested too deeply to be read. Split its long expressions, or make a view of it in Snowflake."
    )


def parse_query(sql: str) -> Query:
    """Read one SELECT; every table in it must be named in full and not be pinned by hand."""
    try:
        text = _statement(sql)
        query = Query(text, _tree(text))
        return Query(text, query.tree, tuple(sorted(_references(query), key=lambda reference: reference.start)))
    except RecursionError:
        raise too_deep() from None


def _statement(sql: str) -> str:
    """The one statement. A comment behind it would swallow whatever is later written after it on the same line."""
    try:
        tokens = list(DIALECT.tokenize(sql))
    except TokenError:
        raise ViewError("a quote or a comment is opened and never closed. Close it.") from None
    while tokens and tokens[-1].token_type == TokenType.SEMICOLON:
        tokens.pop()
    if not tokens:
        raise ViewError(f"it is empty. {SUPPORTED}.")
    # Blank lines and comments before it stay: the places in errors then agree with the text that the user sees.
    return sql[: tokens[-1].end + 1]


def _tree(text: str) -> exp.Query:
    try:
        statements = sqlglot.parse(text, dialect=DIALECT)
    except ParseError as failure:
        raise _unreadable(failure) from None
    if len(statements) != 1:
        raise ViewError(f"it has {len(statements)} statements. {SUPPORTED}.")
    tree = statements[0]
    starts = next(iter(DIALECT.tokenize(text))).token_type
    if not isinstance(tree, exp.Query) or starts not in _STARTS or tree.find(exp.Into):
        raise ViewError(f"it is not a SELECT. {SUPPORTED}.")
    keep_texts(tree, text)
    if filtered := tree.find(exp.Filter):
        raise Query(text, tree).error(
            filtered,
            "Snowflake has no FILTER clause for aggregates. Write SUM(IFF(condition, value, NULL)), or COUNT_IF(condition) "
            "for COUNT(*).",
        )
    return tree


def parse_expression(text: str) -> exp.Expr | None:
    """The tree of an expression that stands alone; None if the text is not one expression."""
    # Brackets, because some functions begin like a statement: INSERT(…), GET(…).
    sql = f"SELECT ({text})"
    try:
        tree = sqlglot.parse_one(sql, dialect=DIALECT)
    except SqlglotError:
        return None
    keep_texts(tree, sql)
    alone = isinstance(tree, exp.Select) and len(tree.expressions) == 1 and isinstance(tree.expressions[0], exp.Paren)
    return tree.expressions[0].this if alone else None


def _unreadable(failure: ParseError) -> ViewError:
    details = failure.errors[0] if failure.errors else {}
    near = f" near {details['highlight']!r}" if details.get("highlight") else ""
    line, end = details.get("line"), details.get("col")
    column = max(1, end - len(details.get("highlight") or "") + 1) if end else None
    return ViewError(
        f"this cannot be read as Snowflake's SQL{near}. Run the query in Snowflake to see what is wrong with it.",
        line=line,
        column=column,
    )


def keep_texts(tree: exp.Expr, text: str) -> None:
    r"""Let each string stand as the user wrote it: sqlglot does not know all escapes, and turns '\d' into '\\d'."""
    for string in list(tree.find_all(exp.Literal, exp.RawString)):
        if isinstance(string, exp.Literal) and not string.is_string:
            continue
        source = text[string.meta["start"] : string.meta["end"] + 1] if "start" in string.meta else ""
        if source[:1] in ("'", "$") and not isinstance(string.parent, exp.Interval):
            verbatim = exp.Var(this=source)
            verbatim.meta.update(string.meta)
            string.replace(verbatim)


def folded(identifier: exp.Expr) -> str:
    """A name as Snowflake stores it: in upper case unless it stands in quotes."""
    return identifier.name if identifier.args.get("quoted") else identifier.name.upper()


def written(node: exp.Expr) -> str:
    """A part of the query in one form, without its comments: to compare it, and to show it in a message."""
    return node.sql(dialect=DIALECT, comments=False)


def _references(query: Query) -> Iterator[Reference]:
    for table in query.tree.find_all(exp.Table):
        if table.args.get("when") or table.args.get("changes") or table.args.get("version"):
            raise query.error(
                table,
                f"{written(table.this)} has an AT, BEFORE or CHANGES clause. Remove it: each refresh sets its own.",
            )
        if not _is_local(table) and not _is_function(query, table):
            yield _reference(query, table)


def _reference(query: Query, table: exp.Table) -> Reference:
    parts = [table.args.get(part) for part in ("catalog", "db", "this")]
    identifiers = [part for part in parts if isinstance(part, exp.Identifier) and "start" in part.meta]
    if len(identifiers) != len(parts):
        name = ".".join(part.name for part in identifiers) or "what it reads from"
        raise query.error(
            table,
            f"{name} is not a full table name. Write it as DATABASE.SCHEMA.TABLE; a part with small letters goes into "
            'double quotes: DATABASE.SCHEMA."My Table".',
        )
    start, end = identifiers[0].meta["start"], identifiers[-1].meta["end"] + 1
    return Reference(TableName(*(folded(part) for part in identifiers)), start, end)


def _is_local(table: exp.Table) -> bool:
    """Whether the name is that of a CTE that can be seen from there: WITH recent AS (…) SELECT … FROM recent."""
    if table.args.get("db") or not isinstance(table.this, exp.Identifier):
        return False
    below: exp.Expr = table
    while (above := below.parent) is not None:
        if folded(table.this) in {folded(cte.args["alias"].this) for cte in _seen_ctes(above, below)}:
            return True
        below = above
    return False


def _seen_ctes(above: exp.Expr, below: exp.Expr) -> list[exp.Expr]:
    """The CTEs of a query that its own parts see; a CTE sees those before it and, where it can recur, itself.

    Without that a later CTE, or one that reads a table of its own name, would hide a table that nobody watches.
    """
    if isinstance(above, exp.With):
        ctes = list(above.expressions)
        before = ctes[: next(at for at, cte in enumerate(ctes) if cte is below)]
        return [*before, *([below] if isinstance(below.this, exp.SetOperation) else [])]
    with_ = above.args.get("with_")
    return list(with_.expressions) if with_ is not None and with_ is not below else []


def _is_function(query: Query, table: exp.Table) -> bool:
    """Whether it is TABLE(function(…)); TABLE('name') would be a table that is neither watched nor pinned."""
    if not isinstance(table.this, exp.Anonymous):
        return False
    inner = table.this.expressions
    if table.this.name.upper() != "TABLE" or not (len(inner) == 1 and isinstance(inner[0], exp.Anonymous)):
        raise query.error(
            table, f"{written(table.this)} hides which table it reads. Write DATABASE.SCHEMA.TABLE instead."
        )
    return True


def same_query(query: str, other_query: str) -> bool:
    """Whether two queries surely mean the same; another order of columns or conditions counts as different."""
    try:
        form, other_form = (
            written(normalize_identifiers(parse_query(sql).tree, dialect="snowflake")) for sql in (query, other_query)
        )
    except (ViewError, SqlglotError):
        return query.split() == other_query.split()
    return form == other_form


# From a character to just behind the last.
TextSpan = tuple[int, int]
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
    outputs = split_tokens(clauses[TokenType.SELECT], TokenType.COMMA)
    _mark(query, select.expressions, outputs)
    for name, clause in (("where", TokenType.WHERE), ("having", TokenType.HAVING)):
        if select.args.get(name):
            _mark(query, [select.args[name].this], [clauses.get(clause, [])])
    if (group := select.args.get("group")) and group.expressions:
        _mark(query, group.expressions, split_tokens(clauses.get(TokenType.GROUP_BY, []), TokenType.COMMA))
    conditions = [join.args["on"] for join in select.args.get("joins") or () if join.args.get("on")]
    _mark(query, conditions, _conditions(clauses[TokenType.FROM]))


def expression_span(node: exp.Expr) -> TextSpan | None:
    """Where an output, a condition or a group stands, once it is marked."""
    return node.meta.get(_SPAN)


def column_span(column: exp.Column) -> TextSpan:
    """Where a column stands, with its table."""
    parts = [part for part in column.parts if "start" in part.meta]
    if len(parts) != len(column.parts):
        raise NotTakenApart(f"the place of {column.name} in the text is not known")
    return parts[0].meta["start"], parts[-1].meta["end"] + 1


def _mark(query: Query, nodes: Sequence[exp.Expr], pieces: Sequence[Sequence[Token]]) -> None:
    if len(nodes) != len(pieces):
        raise NotTakenApart("its text cannot be taken apart with certainty")
    for node, tokens in zip(nodes, pieces, strict=True):
        if node.is_star:
            continue
        bare, own = (node.this, _without_alias(tokens)) if isinstance(node, exp.Alias) else (node, tokens)
        start, end = (own[0].start, own[-1].end + 1) if own else (0, 0)
        if parse_expression(query.text[start:end]) != bare or (bare.find(exp.Interval) and _has_odd_interval(own)):
            raise NotTakenApart(f"{query.text[start:end]} cannot be taken out of its text with certainty")
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
    for at, (token, level) in enumerate(token_levels(tokens)):
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
    for joined in split_tokens(tokens, TokenType.JOIN):
        condition = split_tokens(joined, TokenType.ON)[1:]
        pieces += [_without_join_words(condition_tokens) for condition_tokens in condition]
    return pieces


def _without_join_words(tokens: Sequence[Token]) -> Sequence[Token]:
    while tokens and tokens[-1].text.upper() in _BEFORE_JOIN and tokens[-1].token_type != TokenType.IDENTIFIER:
        tokens = tokens[:-1]
    return tokens


def split_tokens(tokens: Sequence[Token], at: TokenType) -> list[Sequence[Token]]:
    """The pieces between tokens of a type that stand in no brackets."""
    places = [
        place for place, (token, level) in enumerate(token_levels(tokens)) if level == 0 and token.token_type == at
    ]
    starts, ends = [0, *(place + 1 for place in places)], [*places, len(tokens)]
    return [tokens[start:end] for start, end in zip(starts, ends, strict=True)]


def token_levels(tokens: Sequence[Token]) -> list[tuple[Token, int]]:
    """Each token, and in how many brackets it stands."""
    level, levels = 0, []
    for token in tokens:
        level -= token.token_type in _CLOSED
        levels.append((token, level))
        level += token.token_type in _OPEN
    return levels
