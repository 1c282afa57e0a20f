#!/bin/sh
# A wrong row put into a published extract by hand, and a wrong load: found, explained, mended, undone. See README.md.
set -eu
cd "$(dirname "$0")"
. ../sandbox.sh
export TIR_SPECS=extracts.yaml
# A run that was stopped half way may have left the hold.
tir release audited_orders >/dev/null
run python ../sql.py day1.sql
run tir refresh audited_orders --allow-empty
run python spoil.py audited_orders 525 99
fails tir verify audited_orders --server --rows --values
run tir why audited_orders --key 525 --column AMOUNT
fails tir status
run tir verify audited_orders --server --rows --repair
run python ../sql.py day2.sql
run tir refresh audited_orders
run tir why audited_orders --key 525 --column AMOUNT
run tir rollback audited_orders --to previous --dry-run
run tir rollback audited_orders --to previous --hold --reason ten-times-too-high
fails tir refresh audited_orders
run tir history audited_orders
run python ../sql.py day3.sql
run tir release audited_orders
run tir refresh audited_orders
run tir verify audited_orders --all-slices --server
run python heard.py 7
