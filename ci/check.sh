#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Static checks: format, lint, types, size. `ci/check.sh lint types` runs some of them only.
# XMOE_BIN names the folder of the tools when they are not in the environment ci/setup.sh made.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bin=${XMOE_BIN:-${XMOE_VENV:-$root/.venv}/bin}
[ -x "$bin/ruff" ] || { echo "ci/check.sh: no $bin/ruff; run ci/setup.sh first" >&2; exit 1; }

format() { "$bin/ruff" format --check .; }
lint() { "$bin/ruff" check .; }
# The package, never ".": the four folders would be found a second time under top-level names.
types() { "$bin/mypy" -p xmoe; }
size() { "$bin/python" ci/size.py; }

[ $# -gt 0 ] || set -- format lint types size
failed=()
for check in "$@"; do
  case $check in
    format | lint | types | size) ;;
    *) echo "ci/check.sh: unknown check '$check'; allowed: format lint types size" >&2; exit 2 ;;
  esac
  echo "== $check"
  "$check" || failed+=("$check")
done
[ ${#failed[@]} -eq 0 ] || { echo "ci/check.sh: failed: ${failed[*]}" >&2; exit 1; }
