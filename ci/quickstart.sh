#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to an answer: install, look at the libraries, run the shipped Qwen3.5-MoE checkpoint at
# EP8 through aclnnMegaMoe on the software device, and the FusedMoE fallback beside it.
# Arguments are handed to `xmoe regress`, e.g. `bash ci/quickstart.sh --ep 16`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
start=$SECONDS
bash ci/setup.sh
bin=${XMOE_VENV:-$root/.venv}/bin
installed=$((SECONDS - start))

echo "== xmoe doctor"
"$bin/xmoe" doctor
echo "== xmoe regress ${*:---ep 8 --rounds 3 --requests 8}"
if [ $# -gt 0 ]; then "$bin/xmoe" regress "$@"; else "$bin/xmoe" regress --ep 8 --rounds 3 --requests 8; fi
echo "== quickstart done: install $installed s, all $((SECONDS - start)) s"
