#!/bin/sh
# A table of orders, a day of changes, and what of it moves: see README.md.
set -eu
cd "$(dirname "$0")"
. ../sandbox.sh
export TIR_SPECS=extracts.yaml
run python ../sql.py day1.sql
run tir refresh all_orders --allow-empty
run python ../sql.py day2.sql
run tir plan all_orders
run tir refresh all_orders
run tir verify all_orders --all-slices
run tir why all_orders --key 400 --column AMOUNT
run tir refresh all_orders
run tir status
