"""Snowflake, Tableau, Spark and the state folder by environment variables, once for all teams."""

import dagster as dg

import tir_dagster

defs = dg.Definitions(resources=tir_dagster.environment_resources())
