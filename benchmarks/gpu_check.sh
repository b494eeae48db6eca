#!/usr/bin/env bash
# The GPU path in one go, under 8 minutes on one GPU: golden vectors in float32 and bf16, PGD-20 images per second, the profile table, and the tests
# that need CUDA. Usage: benchmarks/gpu_check.sh   (in an environment with the project and its dev extra; cpu instead of cuda: DEVICE=cpu)
set -euo pipefail
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda}
python benchmarks/gpu_check.py --device "$device" --sizes "${SIZES:-tiny,small,base}" --batch-size "${BATCH:-64}"
for size in $(tr , ' ' <<<"${SIZES:-tiny,small,base}"); do
  python -m robustkpca profile --model "symvit-$size" --model "rpc-symvit-$size" --iterations 2,6 --lambda 4 --layers first --layers all \
    --batch-size "${BATCH:-64}" --repeats "${REPEATS:-10}" --device "$device"
done
python -m pytest -q -k "cuda" tests
