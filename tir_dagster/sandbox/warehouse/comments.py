"""Comments on columns: ALTER TABLE … ALTER column COMMENT 'text', …, with several columns in one statement."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sqlglot import exp
from sqlglot.dialects.snowflake import Snowflake
from sqlglot.tokens import Token, TokenType

from tir_dagster.sandbox.warehouse.errors import SnowflakeError, missing_object
from tir_dagster.sandbox.warehouse.names import TableName, folded, literal, quote, table_name

if TYPE_CHECKING:
    from tir_dagster.sandbox.warehouse.session import Session

# sqlglot reads a statement with one column only.
_SEVERAL = re.compile(
    r"""ALTER\s+(?P<kind>TABLE|VIEW)\s+(?P<exists>IF\s+EXISTS\s+)?(?P<name>(?:"(?:[^"]|"")+"|[\w$.])+)\s+(?:ALTER|MODIFY)\s+(?P<rest>.+)""",
    re.IGNORECASE | re.DOTALL,
)
_TEXTS = (TokenType.STRING, TokenType.RAW_STRING)


def run(session: Session, tree: exp.Expr) -> bool:
    """Keep the comments and return True if the statement sets comments on columns, and nothing else."""
    if isinstance(tree, exp.Alter):
        actions = tree.args.get("actions") or []
        if not actions or any(
            not isinstance(each, exp.AlterColumn) or not each.args.get("comment") for each in actions
        ):
            return False
        name = table_name(tree.this, session.database, session.schema)
        texts = {folded(each.this): str(each.args["comment"].this) for each in actions}
        _set(session, name, texts, exists=bool(tree.args.get("exists")))
        return True
    found = _SEVERAL.fullmatch(f"{tree.name} {tree.expression}") if isinstance(tree, exp.Command) else None
    if found is None or (several := _comments(found["rest"])) is None:
        return False
    name = table_name(exp.to_table(found["name"], dialect="snowflake"), session.database, session.schema)
    _set(session, name, several, exists=bool(found["exists"]))
    return True


def _comments(text: str) -> dict[str, str] | None:
    """The comment of each column in `[COLUMN] a COMMENT 'text', b COMMENT $$text$$`; None if there is anything else."""
    texts: dict[str, str] = {}
    tokens = [token for token in Snowflake().tokenize(text) if token.token_type is not TokenType.SEMICOLON]
    while tokens:
        if tokens[0].token_type is TokenType.COLUMN:
            tokens = tokens[1:]
        if len(tokens) < 3 or tokens[1].text.upper() != "COMMENT" or tokens[2].token_type not in _TEXTS:
            return None
        texts[_column(tokens[0])] = tokens[2].text
        if len(tokens) > 3 and (tokens[3].token_type is not TokenType.COMMA or len(tokens) == 4):
            return None
        tokens = tokens[4:]
    return texts or None


def _column(token: Token) -> str:
    return token.text if token.token_type is TokenType.IDENTIFIER else token.text.upper()


def _set(session: Session, name: TableName, texts: dict[str, str], *, exists: bool) -> None:
    view = session.lake.view(name)
    if view is None and session.lake.shape(name) is None:
        if exists:
            return
        raise missing_object("Table", name)
    described = session.duck.execute(f"DESCRIBE {name.quoted}").fetchall()
    if missing := texts.keys() - {row[0] for row in described}:
        raise SnowflakeError(904, "42000", f"SQL compilation error:\ninvalid identifier '{min(missing)}'")
    if view is not None:
        # DuckLake keeps no comments on the columns of a view.
        return
    session.transaction.commit()

    def comment() -> None:
        for column, text in texts.items():
            session.duck.execute(f"COMMENT ON COLUMN {name.quoted}.{quote(column)} IS {literal(text)}")

    session.transaction.run(comment, autocommit=True)
    session.lake.note_ddl(name)
