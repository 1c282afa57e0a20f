"""A shop with sales and products, and an extract that joins them."""

from __future__ import annotations

from tir_dagster_tests.orchestration.shown import Shown

SALES = "ID NUMBER(38,0), DAY DATE, PRODUCT VARCHAR, QUANTITY NUMBER(38,0), SELLER VARCHAR"
PRODUCTS = "PRODUCT VARCHAR, COLOR VARCHAR, UNIT_PRICE FLOAT, REMARK VARCHAR"
TABLES = {"SALES": SALES, "PRODUCTS": PRODUCTS}
DETAIL = """
    SELECT s.ID, s.DAY, s.PRODUCT, s.QUANTITY, COALESCE(p.COLOR, 'N/A') AS COLOR
    FROM {s}.SALES s LEFT JOIN {s}.PRODUCTS p ON s.PRODUCT = p.PRODUCT
"""


def sell(
    shop: Shown, number: int, product: str, quantity: int, seller: str = "nobody", day: str = "2024-01-01"
) -> None:
    shop.sql(
        f"INSERT INTO {{s}}.SALES (ID, DAY, PRODUCT, QUANTITY, SELLER) SELECT {number}, '{day}'::DATE, '{product}', {quantity}, '{seller}'"
    )


def stock(shop: Shown, product: str, color: str, price: float) -> None:
    shop.sql(f"INSERT INTO {{s}}.PRODUCTS (PRODUCT, COLOR, UNIT_PRICE) SELECT '{product}', '{color}', {price}::FLOAT")
