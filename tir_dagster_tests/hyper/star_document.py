"""A document of several logical tables in the shape of Tableau Desktop: orders, customers, and one table of dates in two boxes.

As Desktop writes them: names of stored tables with the source's name in brackets and 32 digits, a local name with its table
where another table has that name already, both readings of what old versions read differently, and one relationship whose
sides are the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence

from tir_dagster.hyper.package.matching import DeclaredRelationship, DeclaredTable, PhysicalTable
from tir_dagster.snowflake.names import TableName

DIGITS = "4F2A9C3E5B7D48F1A2C3D4E5F6071829"
STORED = {
    "ORDERS": f"ORDERS (PUBLIC.ORDERS)_{DIGITS}",
    "CUSTOMERS": f"CUSTOMERS (PUBLIC.CUSTOMERS)_{DIGITS[::-1]}",
    "Order Date": f"DATES (PUBLIC.DATES)_{DIGITS[8:] + DIGITS[:8]}",
    "Ship Date": f"DATES1_{DIGITS[16:] + DIGITS[:16]}",
}
# (Column in the source, local name, column in the Hyper file) by caption.
COLUMNS = {
    "ORDERS": (
        ("ORDER_ID", "ORDER_ID", "ORDER_ID"),
        ("CUSTOMER_ID", "CUSTOMER_ID", "CUSTOMER_ID"),
        ("ORDERED_ON", "ORDERED_ON", "ORDERED_ON"),
        ("SHIPPED_ON", "SHIPPED_ON", "SHIPPED_ON"),
        ("REGION", "REGION", "REGION"),
    ),
    "CUSTOMERS": (
        ("CUSTOMER_ID", "CUSTOMER_ID (CUSTOMERS)", "CUSTOMER_ID (CUSTOMERS)"),
        ("NAME", "NAME", "NAME"),
        ("REGION", "REGION (CUSTOMERS)", "REGION (CUSTOMERS)"),
    ),
    "Order Date": (("DAY", "DAY", "DAY"), ("WEEK", "WEEK", "WEEK")),
    "Ship Date": (("DAY", "DAY (DATES1)", "DAY1"), ("WEEK", "WEEK (DATES1)", "WEEK1")),
}
RELATION = {"ORDERS": "ORDERS", "CUSTOMERS": "CUSTOMERS", "Order Date": "DATES", "Ship Date": "DATES1"}
SOURCE = {"ORDERS": "ORDERS", "CUSTOMERS": "CUSTOMERS", "Order Date": "DATES", "Ship Date": "DATES"}
OBJECT_MODEL = "_.fcp.ObjectModelEncapsulateLegacy"


def _relation(caption: str, *, extract: bool = False) -> str:
    if extract:
        return f"<relation name='{STORED[caption]}' table='[Extract].[{STORED[caption]}]' type='table' />"
    return f"<relation connection='snowflake.1' name='{RELATION[caption]}' table='[PUBLIC].[{SOURCE[caption]}]' type='table' />"


def _records(*, extract: bool) -> str:
    return "".join(
        f"<metadata-record class='column'><remote-name>{stored if extract else source}</remote-name>"
        f"<local-name>[{local}]</local-name><parent-name>[{STORED[caption] if extract else RELATION[caption]}]</parent-name>"
        f"<local-type>string</local-type>"
        f"<{OBJECT_MODEL}.true...object-id>[{STORED[caption]}]</{OBJECT_MODEL}.true...object-id></metadata-record>\n"
        for caption, columns in COLUMNS.items()
        for source, local, stored in columns
    )


def _collection(*, extract: bool) -> str:
    tables = "".join(_relation(caption, extract=extract) for caption in STORED)
    first = _relation("ORDERS", extract=extract).removeprefix("<relation")
    return (
        f"<{OBJECT_MODEL}.false...relation{first}"
        f"<{OBJECT_MODEL}.true...relation type='collection'>{tables}</{OBJECT_MODEL}.true...relation>"
    )


def _objects() -> str:
    return "\n".join(
        f"<object caption='{caption}' id='{STORED[caption]}'>"
        f"<properties context=''>{_relation(caption)}</properties>"
        f"<properties context='extract'>{_relation(caption, extract=True)}</properties></object>"
        for caption in STORED
    )


def _related(first: str, second: str, condition: str, first_options: str = "", second_options: str = "") -> str:
    return (
        f"<relationship>{condition}<first-end-point object-id='{STORED[first]}'{first_options} />"
        f"<second-end-point object-id='{STORED[second]}'{second_options} /></relationship>"
    )


def equal(first: str, second: str) -> str:
    return f"<expression op='='><expression op='[{first}]' /><expression op='[{second}]' /></expression>"


BY_CUSTOMER = (
    f"<expression op='AND'>{equal('CUSTOMER_ID', 'CUSTOMER_ID (CUSTOMERS)')}"
    f"{equal('REGION (CUSTOMERS)', 'REGION')}</expression>"
)
RELATIONSHIPS = "\n".join(
    (
        _related("ORDERS", "CUSTOMERS", BY_CUSTOMER, " guaranteed-value='true'", " unique-key='true'"),
        _related("Order Date", "ORDERS", equal("DAY", "ORDERED_ON"), " is-db-set-unique-key='true'"),
        _related("ORDERS", "Ship Date", equal("SHIPPED_ON", "DAY (DATES1)")),
    )
)
STAR = f"""<?xml version='1.0' encoding='utf-8' ?>
<datasource formatted-name='federated.1' inline='true' version='18.1'>
<connection class='federated'>
<named-connections><named-connection caption='acme' name='snowflake.1'>
<connection class='snowflake' dbname='SHOP' schema='PUBLIC' server='acme.snowflakecomputing.com' username='TABLEAU' />
</named-connection></named-connections>
{_collection(extract=False)}
<cols><map key='[CUSTOMER_ID (CUSTOMERS)]' value='[CUSTOMERS].[CUSTOMER_ID]' /></cols>
<refresh increment-key='[ORDERED_ON]' incremental-updates='true' />
<metadata-records>{_records(extract=False)}</metadata-records>
</connection>
<extract _.fcp.ObjectModelExtractV2.true...object-id='{STORED["ORDERS"]}' count='-1' enabled='true' units='records'>
<connection class='hyper' dbname='Data/Extracts/Star.hyper' schema='Extract' update-time='12/27/2025 10:47:10 PM'>
{_collection(extract=True)}
<refresh increment-key='[ORDERED_ON]' incremental-updates='true'>
<refresh-event increment-value='#2025-01-01#' refresh-type='create' rows-inserted='9' timestamp-start='2025-01-02 03:04:05.678' />
</refresh>
<metadata-records>{_records(extract=True)}</metadata-records>
</connection>
</extract>
<{OBJECT_MODEL}.true...object-graph>
<objects>{_objects()}</objects>
<relationships>{RELATIONSHIPS}</relationships>
</{OBJECT_MODEL}.true...object-graph>
</datasource>
"""
# What a server makes for a plain Hyper file; the second with an object graph, which it has where the file declares keys.
HYPER_ONLY = """<datasource version='18.1'><connection class='federated'><named-connections><named-connection name='hyper.1'>
<connection class='hyper' dbname='Data/Extracts/x.hyper' extract-engine='true' schema='Extract' tablename='Extract'/></named-connection></named-connections>
<relation type='collection'><relation connection='hyper.1' name='orders' table='[Extract].[orders]' type='table'/>
<relation connection='hyper.1' name='customers' table='[Extract].[customers]' type='table'/></relation>%s</connection>%s</datasource>"""
HYPER_GRAPH = """<object-graph><objects>
<object caption='orders' id='orders_1'><properties context=''><relation connection='hyper.1' name='orders' table='[Extract].[orders]' type='table'/></properties></object>
<object caption='customers' id='customers_1'><properties context=''><relation connection='hyper.1' name='customers' table='[Extract].[customers]' type='table'/></properties></object>
</objects><relationships><relationship><expression op='='><expression op='[CUSTOMER_ID]'/>
<expression op='[CUSTOMER_ID (customers)]'/></expression><first-end-point object-id='orders_1'/>
<second-end-point object-id='customers_1' unique-key='true'/></relationship></relationships></object-graph>"""
HYPER_MAP = """<cols><map key='[CUSTOMER_ID]' value='[orders].[CUSTOMER_ID]'/>
<map key='[CUSTOMER_ID (customers)]' value='[customers].[CUSTOMER_ID]'/></cols>"""
HYPER_RECORDS = """<metadata-records><metadata-record class='column'><remote-name>CUSTOMER_ID</remote-name>
<local-name>[CUSTOMER_ID]</local-name><parent-name>[orders]</parent-name></metadata-record><metadata-record class='column'>
<remote-name>CUSTOMER_ID</remote-name><local-name>[CUSTOMER_ID (customers)]</local-name><parent-name>[customers]</parent-name>
</metadata-record></metadata-records>"""


def _declared(name: str, caption: str) -> DeclaredTable:
    columns = tuple(source for source, _, _ in COLUMNS[caption])
    return DeclaredTable(name, columns, TableName("SHOP", "PUBLIC", SOURCE[caption]), needed=columns[:1])


DECLARED = (
    _declared("orders", "ORDERS"),
    _declared("customers", "CUSTOMERS"),
    _declared("order_date", "Order Date"),
    _declared("ship_date", "Ship Date"),
)
RELATED = (
    DeclaredRelationship(
        "orders",
        "customers",
        (("CUSTOMER_ID", "CUSTOMER_ID"), ("REGION", "REGION")),
        cardinality="many_to_one",
        every_first_row_matches=True,
        every_second_row_matches=False,
    ),
    DeclaredRelationship("orders", "order_date", (("ORDERED_ON", "DAY"),), cardinality="many_to_one"),
    DeclaredRelationship("ship_date", "orders", (("DAY", "SHIPPED_ON"),)),
)
HYPER_TABLES: Sequence[PhysicalTable] = tuple(
    PhysicalTable("Extract", STORED[caption], tuple(stored for _, _, stored in columns))
    for caption, columns in COLUMNS.items()
)
