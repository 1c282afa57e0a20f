#!/bin/sh
# Row-level security by a table of entitlements, and what of it moves when they change: see README.md.
set -eu
cd "$(dirname "$0")"
. ../sandbox.sh
export TIR_SPECS=extracts.yaml
run python ../sql.py day1.sql
run tir refresh secured_sales --allow-empty
run python ../sql.py day2.sql
run tir plan secured_sales
run tir refresh secured_sales
run tir why secured_sales --table ENTITLEMENTS --key north
run python ../sql.py day3.sql
run tir refresh secured_sales
run tir verify secured_sales --all-slices
