#!/bin/sh
# Start a run, or continue it if its folder has one already: for machines that start a command again when it ends.
#
#   start-or-resume RECIPE RUN_DIR [OPTIONS and KEY=VALUE of `lightningrl train`]
#
# WORKER_KEY_FILE: a file with the key that workers show; without it the run makes a key.
# When the run has ended, wait, so that its folder can be copied: Kubernetes starts a container again that ends.
set -eu
recipe=$1
run_dir=$2
shift 2
if [ -e "$run_dir/result.json" ]; then
  echo "the run in $run_dir has ended; its model is in $run_dir/model"
  exec sleep infinity
fi
if [ -n "${WORKER_KEY_FILE:-}" ]; then
  mkdir -p "$run_dir"
  install -m 600 "$WORKER_KEY_FILE" "$run_dir/worker.key"
fi
if [ -e "$run_dir/config.toml" ]; then
  set -- --resume "$@"
fi
exec lightningrl train "$recipe" --run-dir "$run_dir" "$@"
