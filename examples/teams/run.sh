#!/bin/sh
# A dg project in which several teams declare extracts and a load: see README.md.
set -eu
cd "$(dirname "$0")"
. ../sandbox.sh
export TIR_SPECS=src/company/defs
export PYTHONPATH=src DAGSTER_HOME="$TIR_HOME/dagster"
run python ../sql.py day1.sql
run python day1.py
run tir load order_files
run dg check defs
run tir refresh sales_orders --allow-empty
run tir refresh finance_margins --allow-empty
