#!/bin/sh
# A job outside of Dagster changes a table and says what it changed: see README.md.
set -eu
cd "$(dirname "$0")"
. ../sandbox.sh
export TIR_SPECS=extracts.yaml
run python ../sql.py day1.sql
run tir refresh hinted_orders --allow-empty
run python etl.py
run tir refresh hinted_orders --hint "@$TIR_HOME/hint.json"
