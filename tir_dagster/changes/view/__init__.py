"""What an extract's query means: pure analysis of its SQL. Nothing here reads a table."""

from tir_dagster.changes.view.analysis import analyse as analyse
from tir_dagster.changes.view.analysis import tables_of as tables_of
from tir_dagster.changes.view.explain import explain as explain
from tir_dagster.changes.view.model import JoinKey as JoinKey
from tir_dagster.changes.view.model import View as View
from tir_dagster.changes.view.model import ViewColumn as ViewColumn
from tir_dagster.changes.view.model import ViewTable as ViewTable
from tir_dagster.changes.view.same import same_query as same_query
from tir_dagster.changes.view.sql import BaseSelect as BaseSelect
from tir_dagster.changes.view.sql import base_sql as base_sql
from tir_dagster.changes.view.sql import view_sql as view_sql
from tir_dagster.changes.view.text import ViewError as ViewError
from tir_dagster.changes.view.text import parse_query as parse_query
