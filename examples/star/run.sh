#!/bin/sh
# Two extracts of joined tables, and what a changed product moves: see README.md.
set -eu
cd "$(dirname "$0")"
. ../sandbox.sh
export TIR_SPECS=extracts.yaml
run python ../sql.py day1.sql
run tir refresh sales_star --allow-empty
run tir refresh sales_by_color --allow-empty
run tir plan sales_star --explain
run python ../sql.py day2.sql
run tir refresh sales_star
run tir refresh sales_by_color
