#!/bin/sh
# dbt builds a table on the sandbox, a day of changes follows, and tir brings each of them to Tableau: see README.md.
set -eu
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
TIR_HOME=${TIR_HOME:-$root/.tir}
TIR_SPECS=$PWD/extracts.yaml
JAVA_HOME=$("$root/scripts/find-java")
export TIR_HOME TIR_SPECS JAVA_HOME
tir=${TIR:-$root/.venv/bin/tir}
if [ ! -x "$tir" ]; then
  echo "There is no $tir: run make setup first, or make example, which does both." >&2
  exit 1
fi
# dbt has an environment of its own. dbt-core 1.12 downloads a parser from elsewhere while it is installed.
dbt_environment=$("$root/scripts/client-environment" dbt-1.12 dbt-core==1.11.16 dbt-snowflake==1.12.3)

run_dbt() {
  echo "\$ DAY=$DAY dbt $*"
  (
    unset PYTHONPATH
    DBT_PROFILES_DIR=$PWD DBT_TARGET_PATH=$TIR_HOME/dbt DBT_LOG_PATH=$TIR_HOME/dbt \
      "$dbt_environment/bin/dbt" --no-use-colors "$@"
  )
}

refresh() {
  echo "\$ tir refresh shop_orders"
  "$tir" refresh shop_orders
}

"$tir" sandbox up
eval "$("$tir" sandbox env)"
export DAY=day1
run_dbt --quiet run-operation create_database
run_dbt build --full-refresh
refresh
DAY=day2
run_dbt build
refresh
refresh
echo "The servers are still running; to stop them: tir sandbox down"
