"""Snowflake through Spark: sessions, the data source, versions and pinned reads."""
