# What the examples share, to be read by their run.sh: the sandbox is up, its variables are set, and `run` shows what it runs.
root=$(cd ../.. && pwd)
TIR_HOME=${TIR_HOME:-$root/.tir}
TIR=${TIR:-$root/.venv/bin/tir}
if [ ! -x "$TIR" ]; then
  echo "There is no $TIR: run make setup first, or make example, which does both." >&2
  exit 1
fi
PATH=$(dirname "$TIR"):$PATH
JAVA_HOME=$("$root/scripts/find-java")
export TIR_HOME PATH JAVA_HOME

run() {
  echo "\$ $*"
  "$@"
}

# For a command whose exit code says that something is wrong.
fails() {
  echo "\$ $*"
  if "$@"; then
    echo "It found nothing wrong." >&2
    exit 1
  fi
}

tir sandbox up >/dev/null
eval "$(tir sandbox env)"
trap 'echo "The servers of the sandbox are still running; to stop them: TIR_HOME=$TIR_HOME tir sandbox down"' EXIT
