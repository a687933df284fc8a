#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests over the unmodified torch_npu wheel and the software device, in an environment of their own:
# `bash ci/npu.sh [PYTEST ARGUMENT...]`. Called by `ci/test.sh npu`.
#
#   XMOE_NPU_VENV   where that environment lives (default .venv-npu in the checkout)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export XMOE_VENV=${XMOE_NPU_VENV:-$root/.venv-npu} XMOE_EXTRAS=test,npu
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
bash ci/setup.sh
bin=$XMOE_VENV/bin
# Compiled against this environment's torch; takes some minutes the first time.
"$bin/python" kernels/softdev/build.py --opapi
# Its sources hold escape sequences that Python warns of when it compiles them; under "warnings are errors" the
# first import would fail, a later one, from byte code, would not.
site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$bin/python" -W ignore -m compileall -q "$site/torch_npu" >/dev/null
# Before Python starts: the loader reads LD_LIBRARY_PATH once, and `import torch` loads torch_npu.
environment=$("$bin/xmoe" device env)
eval "$environment"
"$bin/pytest" tests/npu "$@"
