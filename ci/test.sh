#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install, check and test: `bash ci/test.sh [GROUP...]`, groups check unit contract ep sanitize (default: these), npu
# and device (a real Atlas A3). Each group runs in its own pytest process. Exit code 0 only if all passed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
[ $# -gt 0 ] || set -- check unit contract ep sanitize
for group in "$@"; do
  [ "$group" = check ] || [ -d "tests/$group" ] || {
    echo "ci/test.sh: unknown group '$group'; allowed: check unit contract ep sanitize npu device" >&2
    exit 2
  }
done

bash ci/setup.sh
bin=${XMOE_VENV:-$root/.venv}/bin
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
status=0
for group in "$@"; do
  start=$SECONDS
  echo "== $group"
  if [ "$group" = check ]; then
    bash ci/check.sh || status=1
  elif [ "$group" = npu ]; then
    bash ci/npu.sh --junitxml="$results/$group.xml" --durations=5 || status=1
  else
    # The script, not `python -m pytest`: that would put this folder onto sys.path.
    "$bin/pytest" "tests/$group" --junitxml="$results/$group.xml" --durations=5 || status=1
  fi
  echo "== $group took $((SECONDS - start)) s"
done
"$bin/python" ci/total.py "$results" || status=1
exit $status
