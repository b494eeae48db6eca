#!/usr/bin/env bash
# The evidence in reports/: all embedded models on all 1,000 embedded images, both protocols and the corruptions, and its report.
# About 15 minutes on two cores. Usage: benchmarks/embedded.sh RUN_DIR
set -euo pipefail
robustkpca eval --model symvit --model rpc-symvit --model rpc-symvit-2iter-all --model vit \
  --attack pgd --attack fgsm --attack pgd-paper --attack fgsm-paper --attack corruptions --seed 0 --device cpu --out "$1"

