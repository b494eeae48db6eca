#!/usr/bin/env bash
# The evaluation whose rows are committed as reports/baseline.parquet. Usage: benchmarks/baseline.sh RUN_DIR
set -euo pipefail
robustkpca eval --model symvit --model rpc-symvit --model rpc-symvit-2iter-all --model vit \
  --attack pgd --attack fgsm --seed 0 --limit 500 --device cpu --out "$1"
