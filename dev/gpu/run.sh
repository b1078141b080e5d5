#!/usr/bin/env bash
# Checks and measures the GPU kernels on this machine, the most valuable part first. One line per result, and JSON.
#
#   dev/gpu/run.sh [--dry] [FOLDER]
#
# --dry runs small cases in triton's interpreter, without a GPU: it shows that the scripts work, and measures nothing.
# FOLDER receives one JSON file per part. Default: gpu-results
set -euo pipefail
cd "$(dirname "$0")/../.."
dry=
if [ "${1:-}" = --dry ]; then dry=--dry; shift; fi
out=${1:-gpu-results}
python=${PYTHON:-python}
if [ -n "$dry" ]; then
  export TRITON_INTERPRET=1
else
  unset TRITON_INTERPRET
  "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null ||
    { echo "error: torch finds no GPU here; --dry runs small cases without one" >&2; exit 1; }
fi
mkdir -p "$out"
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=0
for part in check_kernels measure_attention; do
  echo "== $part"
  "$python" "dev/gpu/$part.py" $dry --out "$out/$part.json" || failed=1
done
exit $failed
