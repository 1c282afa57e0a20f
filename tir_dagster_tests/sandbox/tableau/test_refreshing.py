"""Refreshes that really read the warehouse: full ones, incremental ones, and the ones that cannot."""

from __future__ import annotations

import datetime as dt
import re
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import Connection, CreateMode, Date, Timestamp

from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster_tests.sandbox.tableau.helpers import OVERWRITE, Admin, Looker, Publisher, Source, rewritten

ID = Column("ID", "NUMBER(38,0)")
SUCCESS, FAILED = TSC.JobItem.FinishCode.Success, TSC.JobItem.FinishCode.Failed


def published(publisher: Publisher, package: Path, **more: Any) -> Any:
    return publisher.publish(package, connection_credentials=publisher.credentials, **more)


def refreshed(publisher: Publisher, datasource: Any, *, incremental: bool = False) -> Path:
    """The package after a refresh that succeeded."""
    job = publisher.refresh(datasource, incremental=incremental)
    assert job.finish_code == SUCCESS, job.notes
    assert job.datasource_id == datasource.id
    return publisher.download(datasource)


def test_a_full_refresh_reads_the_source_again(publisher: Publisher, source: Source, look: Looker) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0))")
    source.sql("INSERT INTO {t} VALUES (1), (2)")
    datasource = published(publisher, source.package(ID))
    assert look.rows(refreshed(publisher, datasource)) == [[1], [2]]
    source.sql("DELETE FROM {t} WHERE ID = 1")
    source.sql("INSERT INTO {t} VALUES (3)")
    assert look.rows(refreshed(publisher, datasource)) == [[2], [3]]


def test_every_type_arrives_in_the_extract(publisher: Publisher, source: Source, look: Looker) -> None:
    source.sql(
        "CREATE TABLE {t} (ID NUMBER(38,0), AMOUNT NUMBER(12,2), WIDE NUMBER(30,5), REAL_ONE FLOAT, NAME VARCHAR,"
        " FLAG BOOLEAN, DAY DATE, MOMENT TIMESTAMP_NTZ, ZONED TIMESTAMP_TZ, CLOCK TIME, DOC VARIANT, RAW BINARY)"
    )
    source.sql(
        "INSERT INTO {t} SELECT 1, 1.25, 2.5, 0.5, 'é', TRUE, '2023-01-02'::DATE, '2023-01-02 03:04:05.000006',"
        " '2023-01-02 03:04:05 +02:00'::TIMESTAMP_TZ, '03:04:05'::TIME, PARSE_JSON('{\"a\":1}'), TO_BINARY('ab', 'utf-8')"
    )
    source.sql("INSERT INTO {t} (ID) VALUES (2)")
    package = refreshed(publisher, published(publisher, source.package(ID)))
    day, moment = Date(2023, 1, 2), Timestamp(2023, 1, 2, 3, 4, 5, 6)
    zoned, clock = Timestamp(2023, 1, 2, 1, 4, 5), dt.time(3, 4, 5)
    assert look.rows(package) == [
        [1, Decimal("1.25"), 2.5, 0.5, "é", True, day, moment, zoned, clock, '{"a":1}'],
        [2, *[None] * 10],
    ]
    # The document describes exactly these columns, so that the package can be published again.
    publisher.publish(package, mode=OVERWRITE)


def test_a_full_refresh_writes_one_create_event_with_the_greatest_key(
    publisher: Publisher, source: Source, look: Looker
) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0), DAY DATE)")
    source.sql("INSERT INTO {t} VALUES (1, '2023-01-01'), (2, '2023-01-03'), (3, NULL)")
    datasource = published(publisher, source.package(ID, Column("DAY", "DATE"), increment_key="DAY"))
    for _ in range(2):
        assert look.events(refreshed(publisher, datasource)) == [("create", "#2023-01-03#", "3")]
    source.sql("DELETE FROM {t}")
    assert look.events(refreshed(publisher, datasource)) == [("create", "%null%", "0")]


def test_without_an_increment_key_the_event_has_no_value(publisher: Publisher, source: Source, look: Looker) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0))")
    source.sql("INSERT INTO {t} VALUES (1)")
    package = refreshed(publisher, published(publisher, source.package(ID)))
    assert look.events(package) == [("create", "%null%", "1")]


@pytest.mark.parametrize(
    "case",
    [
        ("DATE", "'2023-01-01'", "'2023-01-02'", "#2023-01-01#", "#2023-01-02#"),
        (
            "TIMESTAMP_NTZ",
            "'2023-01-01 10:00:00'",
            "'2023-01-01 10:00:00.500000'",
            "#2023-01-01 10:00:00#",
            "#2023-01-01 10:00:00.500000#",
        ),
        (
            "TIMESTAMP_TZ",
            "'2023-01-01 10:00:00 +02:00'::TIMESTAMP_TZ",
            "'2023-01-01 09:00:00 +00:00'::TIMESTAMP_TZ",
            "#2023-01-01 08:00:00#",
            "#2023-01-01 09:00:00#",
        ),
        ("NUMBER(38,0)", "41", "42", "41", "42"),
    ],
    ids=["date", "datetime", "zoned datetime", "integer"],
)
def test_an_increment_appends_exactly_the_rows_beyond_the_last_value(
    publisher: Publisher, source: Source, look: Looker, case: tuple[str, str, str, str, str]
) -> None:
    declared, old, new, old_value, new_value = case
    source.sql(f"CREATE TABLE {{t}} (ID NUMBER(38,0), K {declared})")
    source.sql(f"INSERT INTO {{t}} SELECT 1, {old}")
    datasource = published(publisher, source.package(ID, Column("K", declared), increment_key="K"))
    refreshed(publisher, datasource)
    # 1 changes behind the increment's back, 2 is not beyond the value, 3 is, 4 has no key.
    source.sql("DELETE FROM {t}")
    source.sql(f"INSERT INTO {{t}} SELECT 2, {old}")
    source.sql(f"INSERT INTO {{t}} SELECT 3, {new}")
    source.sql("INSERT INTO {t} SELECT 4, NULL")
    package = refreshed(publisher, datasource, incremental=True)
    assert [row[0] for row in look.rows(package)] == [1, 3]
    assert look.events(package) == [("create", old_value, "1"), ("increment", new_value, "1")]
    package = refreshed(publisher, datasource, incremental=True)
    assert [row[0] for row in look.rows(package)] == [1, 3]
    assert look.events(package)[2:] == [("increment", new_value, "0")]


def test_the_key_is_followed_through_its_names(publisher: Publisher, source: Source, look: Looker) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0), DAY DATE)")
    source.sql("INSERT INTO {t} VALUES (1, '2023-01-01')")
    key = Column("DAY", "DATE", local_name="Order Day", extract_name="day (orders)", caption="The day")
    datasource = published(publisher, source.package(ID, key, increment_key="DAY"))
    refreshed(publisher, datasource)
    source.sql("INSERT INTO {t} VALUES (2, '2023-01-05')")
    package = refreshed(publisher, datasource, incremental=True)
    rows = look.rows(package, 'SELECT "ID", "day (orders)" FROM "Extract"."Extract" ORDER BY 1')
    assert rows == [[1, Date(2023, 1, 1)], [2, Date(2023, 1, 5)]]
    assert look.events(package)[1:] == [("increment", "#2023-01-05#", "1")]


def test_the_value_in_the_document_decides_not_the_data(publisher: Publisher, source: Source, look: Looker) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0), DAY DATE)")
    source.sql("INSERT INTO {t} VALUES (1, '2023-01-01'), (2, '2023-01-02')")
    datasource = published(publisher, source.package(ID, Column("DAY", "DATE"), increment_key="DAY"))
    package = refreshed(publisher, datasource)
    set_back = rewritten(
        package, package.with_name("back.tdsx"), edit=lambda text: text.replace("#2023-01-02#", "#2023-01-01#")
    )
    published(publisher, set_back, mode=OVERWRITE)
    package = refreshed(publisher, datasource, incremental=True)
    assert [row[0] for row in look.rows(package)] == [1, 2, 2]


@pytest.mark.parametrize(("reads", "expected"), [("after", [1, 2, 4]), ("from", [1, 3, 4]), ("again", [1, 2, 3, 4])])
def test_which_rows_of_the_last_value_an_increment_reads_is_a_setting(
    publisher: Publisher, source: Source, look: Looker, admin: Admin, reads: str, expected: list[int]
) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0), DAY DATE)")
    source.sql("INSERT INTO {t} VALUES (1, '2023-01-01'), (2, '2023-01-02')")
    datasource = published(publisher, source.package(ID, Column("DAY", "DATE"), increment_key="DAY"))
    refreshed(publisher, datasource)
    source.sql("DELETE FROM {t} WHERE ID = 2")
    source.sql("INSERT INTO {t} VALUES (3, '2023-01-02'), (4, '2023-01-03')")
    admin.set(increment_reads=reads)
    package = refreshed(publisher, datasource, incremental=True)
    assert [row[0] for row in look.rows(package)] == expected


def test_an_increment_without_earlier_events_is_a_full_refresh(
    publisher: Publisher, source: Source, look: Looker
) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0), DAY DATE)")
    datasource = published(publisher, source.package(ID, Column("DAY", "DATE"), increment_key="DAY"))
    assert look.events(refreshed(publisher, datasource, incremental=True)) == [("create", "%null%", "0")]
    source.sql("INSERT INTO {t} VALUES (1, '2023-01-01')")
    assert look.events(refreshed(publisher, datasource, incremental=True)) == [("create", "#2023-01-01#", "1")]


def test_an_extract_without_increments_is_refreshed_in_full(publisher: Publisher, source: Source, look: Looker) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0))")
    datasource = published(publisher, source.package(ID))
    job = publisher.refresh(datasource, incremental=True)
    assert job.finish_code == SUCCESS
    assert "not configured for incremental refresh" in job.notes[0]


def test_before_3_25_an_increment_cannot_be_asked_for(
    publisher: Publisher, source: Source, look: Looker, admin: Admin
) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0), DAY DATE)")
    source.sql("INSERT INTO {t} VALUES (1, '2023-01-01')")
    datasource = published(publisher, source.package(ID, Column("DAY", "DATE"), increment_key="DAY"))
    refreshed(publisher, datasource)
    admin.set(rest_version="3.4", product_version="2019.2.0")
    old = TSC.Server(publisher.sandbox.tableau_url)
    old.use_server_version()
    assert old.version == "3.4"
    old.auth.sign_in(TSC.PersonalAccessTokenAuth(*publisher.sandbox.new_token(), publisher.sandbox.identity.site))
    with pytest.raises(ValueError, match=r"3\.25"):
        old.datasources.refresh(datasource, incremental=True)
    # A client that sends the attribute all the same gets a full refresh.
    body = '<tsRequest><extractRefresh incremental="true"/></tsRequest>'
    url = f"{old.datasources.baseurl}/{datasource.id}/refresh"
    answer = requests.post(url, data=body, headers={"x-tableau-auth": old.auth_token}, timeout=30)
    assert answer.status_code == 202
    veteran = Publisher(publisher.sandbox, old, publisher.project, publisher.folder)
    veteran.finished(re.search(r'job id="([^"]+)"', answer.text)[1])
    assert look.events(veteran.download(datasource)) == [("create", "#2023-01-01#", "1")]


def test_custom_sql_is_read_as_written(publisher: Publisher, source: Source, look: Looker) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0))")
    source.sql("INSERT INTO {t} VALUES (1), (2), (3)")
    sql = f"SELECT ID, ID * 2 AS DOUBLED FROM {source.database}.{source.schema}.T WHERE ID > 1 AND ID < 3;"
    datasource = published(publisher, source.package(ID, table="", custom_sql=sql))
    package = refreshed(publisher, datasource)
    assert look.rows(package) == [[2, 4]]


def test_a_refresh_changes_the_extract_and_nothing_else(publisher: Publisher, source: Source, look: Looker) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0), DAY DATE)")
    source.sql("INSERT INTO {t} VALUES (1, '2023-01-01')")
    package = source.package(ID, Column("DAY", "DATE"), increment_key="DAY")
    package = rewritten(
        package,
        package.with_name("more.tdsx"),
        edit=lambda text: text.replace("<aliases", "<!-- mine --><unknown-to-us a='&quot;&lt;1&gt;&#10;'/><aliases"),
        add=[("Image/logo.png", b"\x89PNG"), ("notes.txt", b"hello")],
    )
    datasource = published(publisher, package)
    after = refreshed(publisher, datasource)
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(after) as new:
        assert new.namelist() == old.namelist()
        assert new.read("Image/logo.png") == b"\x89PNG"
        before_text, after_text = old.read("Orders.tds").decode(), new.read("Orders.tds").decode()
    assert "<!-- mine -->" in after_text
    assert look.document(after).find("unknown-to-us").get("a") == '"<1>\n'

    def without_extract(text: str) -> list[str]:
        lines = re.sub(r"<extract .*?</extract>", "", text, flags=re.DOTALL).replace('"', "'").split("<")
        return [line.strip() for line in lines]

    assert without_extract(after_text) == without_extract(before_text.replace("a='&quot;", 'a="&quot;'))


def test_a_refresh_is_no_revision_but_moves_the_time(publisher: Publisher, source: Source) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0))")
    datasource = published(publisher, source.package(ID))
    refreshed(publisher, datasource)
    after = publisher.server.datasources.get_by_id(datasource.id)
    assert after.updated_at >= datasource.updated_at
    publisher.server.datasources.populate_revisions(after)
    assert [entry.revision_number for entry in after.revisions] == ["1"]


TWO_TABLES = """<datasource formatted-name='federated.two' version='18.1'>
 <connection class='federated'>
  <named-connections><named-connection caption='w' name='snowflake.w'>
   <connection class='snowflake' dbname='{database}' schema='{schema}' server='sandbox.snowflakecomputing.com'/>
  </named-connection></named-connections>
  <_.fcp.ObjectModelEncapsulateLegacy.true...relation type='collection'>
   <relation connection='snowflake.w' name='A' table='[{schema}].[A]' type='table'/>
   <relation connection='snowflake.w' name='B' table='[{database}].[{schema}].[B]' type='table'/>
  </_.fcp.ObjectModelEncapsulateLegacy.true...relation>
  <refresh/>
 </connection>
 <extract count='-1' enabled='true' units='records'>
  <connection class='hyper' dbname='Data/two.hyper' schema='Extract'>
   <_.fcp.ObjectModelEncapsulateLegacy.true...relation type='collection'>
    <relation name='A_1' table='[Extract].[A_1]' type='table'/>
    <relation name='B_2' table='[Extract].[B_2]' type='table'/>
   </_.fcp.ObjectModelEncapsulateLegacy.true...relation>
   <refresh/>
   <metadata-records>
    <metadata-record class='column'><remote-name>X</remote-name><remote-type>20</remote-type>
     <local-name>[X]</local-name><parent-name>[A_1]</parent-name><object-id>[A_1]</object-id></metadata-record>
    <metadata-record class='column'><remote-name>Y</remote-name><remote-type>20</remote-type>
     <local-name>[Y]</local-name><parent-name>[B_2]</parent-name><object-id>[B_2]</object-id></metadata-record>
   </metadata-records>
  </connection>
 </extract>
 <_.fcp.ObjectModelEncapsulateLegacy.true...object-graph><objects>
  <object caption='A' id='A_1'>
   <properties context=''><relation connection='snowflake.w' name='A' table='[{schema}].[A]' type='table'/></properties>
   <properties context='extract'><relation name='A_1' table='[Extract].[A_1]' type='table'/></properties>
  </object>
  <object caption='B' id='B_2'>
   <properties context=''>
    <relation connection='snowflake.w' name='B' table='[{database}].[{schema}].[B]' type='table'/></properties>
   <properties context='extract'><relation name='B_2' table='[Extract].[B_2]' type='table'/></properties>
  </object>
 </objects>
 <relationships><relationship>
  <expression op='='><expression op='[X]'/><expression op='[Y]'/></expression>
  <first-end-point object-id='A_1'/><second-end-point object-id='B_2'/>
 </relationship></relationships></_.fcp.ObjectModelEncapsulateLegacy.true...object-graph>
</datasource>"""


def test_several_logical_tables_are_refreshed_together(
    publisher: Publisher, source: Source, look: Looker, hyper: Any
) -> None:
    place = f"{source.database}.{source.schema}"
    for table, column in (("A", "X"), ("B", "Y")):
        source.sql(f"CREATE TABLE {place}.{table} AS SELECT 7 AS {column}, 'new' AS MORE_{table}")
    extract, package = source.folder / "two.hyper", source.folder / "two.tdsx"
    with Connection(hyper, extract, CreateMode.CREATE) as connection:
        connection.execute_command('CREATE SCHEMA "Extract"')
        connection.execute_command('CREATE TABLE "Extract"."A_1" ("X" BIGINT)')
        connection.execute_command('CREATE TABLE "Extract"."B_2" ("Y" BIGINT)')
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("two.tds", TWO_TABLES.format(database=source.database, schema=source.schema))
        archive.write(extract, "Data/two.hyper")
    datasource = published(publisher, package)
    after = refreshed(publisher, datasource)
    assert look.rows(after, 'SELECT * FROM "Extract"."A_1"') == [[7, "new"]]
    assert look.rows(after, 'SELECT * FROM "Extract"."B_2"') == [[7, "new"]]
    assert look.events(after) == [("create", "%null%", "2")]
    published(publisher, after, mode=OVERWRITE)


def failing_note(publisher: Publisher, datasource: Any) -> str:
    job = publisher.refresh(datasource)
    assert job.finish_code == FAILED
    return job.notes[0]


def test_a_refresh_without_embedded_credentials_fails(publisher: Publisher, source: Source) -> None:
    datasource = publisher.publish(source.package(ID))
    assert "no embedded credentials" in failing_note(publisher, datasource)


def test_a_refresh_with_a_wrong_password_fails(publisher: Publisher, source: Source) -> None:
    wrong = TSC.ConnectionCredentials(publisher.sandbox.identity.snowflake_user, "wrong", embed=True)
    datasource = publisher.publish(source.package(ID), connection_credentials=wrong)
    assert "Unable to connect" in failing_note(publisher, datasource)


def test_a_refresh_from_an_unknown_host_fails(publisher: Publisher, source: Source) -> None:
    datasource = published(publisher, source.package(ID, server="elsewhere.snowflakecomputing.com"))
    assert "unknown host" in failing_note(publisher, datasource)


def test_a_refresh_of_a_missing_table_fails_with_the_warehouses_words(publisher: Publisher, source: Source) -> None:
    datasource = published(publisher, source.package(ID, table="GONE"))
    assert "GONE" in failing_note(publisher, datasource)


def test_a_refresh_of_a_live_datasource_fails(publisher: Publisher) -> None:
    assert "has no extract" in failing_note(publisher, publisher.publish_live("Live"))


def test_an_increment_after_a_change_of_columns_fails(publisher: Publisher, source: Source) -> None:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0), DAY DATE)")
    source.sql("INSERT INTO {t} VALUES (1, '2023-01-01')")
    datasource = published(publisher, source.package(ID, Column("DAY", "DATE"), increment_key="DAY"))
    refreshed(publisher, datasource)
    source.sql("ALTER TABLE {t} ADD COLUMN EXTRA VARCHAR")
    job = publisher.refresh(datasource, incremental=True)
    assert job.finish_code == FAILED
    assert "columns of the source have changed" in job.notes[0]
    refreshed(publisher, datasource)


def test_a_logical_table_that_is_kept_as_several_physical_ones_is_published_and_not_refreshed(
    publisher: Publisher, source: Source
) -> None:
    table = '<relation name="Extract" table="[Extract].[Extract]" type="table"/>'
    package = rewritten(
        source.package(ID),
        source.folder / "physical.tdsx",
        edit=lambda text: text.replace(table, f'<relation join="inner" type="join">{table}</relation>'),
    )
    assert "keeps a logical table as several physical tables" in failing_note(publisher, published(publisher, package))
