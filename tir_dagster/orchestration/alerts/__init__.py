"""Alerts about Dagster's runs."""
