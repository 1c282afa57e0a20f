"""Spark: sessions, reading Snowflake in parallel, staging rows as Parquet."""
