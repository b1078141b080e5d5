#!/usr/bin/env bash
# Checks and measures the GPU kernels on this machine, the most valuable part first. One line per result, and JSON.
#
#   dev/gpu/run.sh [--dry] [--train ZOO] [FOLDER]
#
# --dry runs small cases in triton's interpreter, without a GPU: it shows that the scripts work, and measures nothing.
# --train trains the built-in models afterwards, on ten times the tokens of a CPU, in the folder ZOO; the same command
# resumes it. Install the models if their held-out loss is lower: foredraft zoo train --out ZOO --install.
# FOLDER receives one JSON file per part. Default: gpu-results
set -euo pipefail
cd "$(dirname "$0")/../.."
dry= zoo=
while [ "${1:-}" = --dry ] || [ "${1:-}" = --train ]; do
  if [ "$1" = --dry ]; then dry=--dry; shift; else zoo=${2:?--train needs a folder}; shift 2; fi
done
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
workers=$(( ($(nproc) + 1) / 2 )) # processes of tests, which share the GPU
parts="check_kernels check_graphs check_draft_loops tests measure_attention measure_products measure_model measure_steps"
for part in $parts; do
  echo "== $part"
  if [ $part != tests ]; then
    "$python" "dev/gpu/$part.py" $dry --out "$out/$part.json" || failed=1
    if [ $part = measure_steps ]; then
      echo "== $part, without graphs"
      FOREDRAFT_GRAPHS=0 "$python" "dev/gpu/$part.py" $dry --out "$out/$part-without-graphs.json" || failed=1
    fi
  elif [ -z "$dry" ]; then # without a GPU `make test` runs them
    "$python" -m pytest -q -n "$workers" -p no:benchmark tests/kernels/gpu tests/models/test_gpu_attention.py \
      tests/models/test_recorded_pass.py tests/models/test_exact.py tests/invariants/test_devices.py |
      tee "$out/tests.txt" || failed=1
    FOREDRAFT_TEST_DEVICE=cuda "$python" -m pytest -q -n "$workers" -p no:benchmark tests/invariants \
      -m "not soak and not rest and not wide" | tee "$out/invariants.txt" || failed=1
  fi
done
if [ -n "$zoo" ] && [ -z "$dry" ]; then
  echo "== train"
  "$python" -m foredraft zoo train --device cuda --tokens 614000000 --out "$zoo" || failed=1
fi
exit $failed
