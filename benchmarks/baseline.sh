#!/usr/bin/env bash
# The evaluation that CI repeats and compares with reports/baseline.parquet; about 3 minutes on two cores.
# Usage: benchmarks/baseline.sh RUN_DIR
# A new baseline: benchmarks/baseline.sh runs/new && robustkpca check runs/new --baseline reports/baseline.parquet --update-baseline
set -euo pipefail
robustkpca eval --model symvit --model rpc-symvit --model rpc-symvit-2iter-all --model vit \
  --attack pgd --attack fgsm --attack corruptions --limit 400 --seed 0 --device cpu --out "$1"
