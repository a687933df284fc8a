#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the virtual environment, install xmoe in editable mode with exact versions, build the native parts.
# The one place that does so: quickstart.sh, test.sh, check.sh and CI all call it. Running it again is cheap.
#
#   XMOE_VENV     where the environment lives (default .venv in the checkout)
#   XMOE_PYTHON   interpreter to make it with (default python3)
#   XMOE_EXTRAS   extras of the package to install (default test)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${XMOE_VENV:-$root/.venv}
python=${XMOE_PYTHON:-python3}

say() { printf '== %s\n' "$*"; }
die() { printf 'ci/setup.sh: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null || die "no $python; install Python 3.11 or newer, or set XMOE_PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  die "$("$python" --version) is too old; allowed: 3.11 or newer; set XMOE_PYTHON"
command -v g++ >/dev/null || die "no g++; the software device is C++17; install g++ (Debian: apt-get install g++)"

# Some ways of copying a tree lose links; the packages of a checkout are found through them.
for folder in kernels policy comm models; do
  link=xmoe/$folder
  if [ ! -L "$link" ]; then
    # A tool without links leaves a small text file with the target in it. A real folder is not ours to delete.
    [ -d "$link" ] && die "$link is a folder, expected a link to ../$folder; move it away"
    rm -f "$link"
    ln -s "../$folder" "$link"
    say "link $link recreated"
  fi
done

[ -x "$venv/bin/python" ] || { say "environment $venv"; "$python" -m venv "$venv"; }

# Installed already for exactly this checkout and these files? Then pip has nothing to do.
want=$(cat ci/constraints.txt ci/setup.sh pyproject.toml setup.py | cksum | cut -d' ' -f1)-$root-${XMOE_EXTRAS:-test}
stamp=$venv/.xmoe-installed
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$want" ]; then
  pip=("$venv/bin/python" -m pip --disable-pip-version-check -qq)
  say "packages (pip, exact versions from ci/constraints.txt)"
  # --no-compile: byte code of the few modules in use is written on first import; doing it here for all
  # of torch and transformers takes longer than everything else together.
  # torch by itself and first: its version must be settled before another package asks for "any torch".
  "${pip[@]}" install --no-compile -c ci/constraints.txt torch
  "${pip[@]}" install --no-compile -c ci/constraints.txt setuptools cffi
  say "xmoe, editable"
  "${pip[@]}" install --no-compile -c ci/constraints.txt --no-build-isolation -e ".[${XMOE_EXTRAS:-test}]"
  printf '%s' "$want" >"$stamp"
fi
say "native parts (only what changed)"
"$venv/bin/python" kernels/softdev/build.py
"$venv/bin/python" kernels/acl/build.py
