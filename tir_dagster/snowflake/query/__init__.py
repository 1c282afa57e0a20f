"""Pure analysis of an extract's query: its tables, joins, outputs and groups. No table is read here."""

from tir_dagster.snowflake.query.analysis import analyse as analyse
from tir_dagster.snowflake.query.analysis import tables_of as tables_of
from tir_dagster.snowflake.query.explain import explain as explain
from tir_dagster.snowflake.query.model import JoinKey as JoinKey
from tir_dagster.snowflake.query.model import OpenOrder as OpenOrder
from tir_dagster.snowflake.query.model import View as View
from tir_dagster.snowflake.query.model import ViewColumn as ViewColumn
from tir_dagster.snowflake.query.model import ViewTable as ViewTable
from tir_dagster.snowflake.query.sql import BaseSelect as BaseSelect
from tir_dagster.snowflake.query.sql import base_sql as base_sql
from tir_dagster.snowflake.query.sql import pinned_text as pinned_text
from tir_dagster.snowflake.query.sql import view_sql as view_sql
from tir_dagster.snowflake.query.text import ViewError as ViewError
from tir_dagster.snowflake.query.text import parse_query as parse_query
from tir_dagster.snowflake.query.text import same_query as same_query
