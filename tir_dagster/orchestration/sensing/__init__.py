"""Sensors and their inputs: changes of the source, reported hints, upstream assets, webhooks."""
