#!/usr/bin/env bash
# Is what RPC-Attention gains under PGD robustness, or a gradient that misleads the attack? The embedded models under PGD-10, PGD with restarts,
# the adaptive suite and AutoAttack, on the same images. About 100 minutes on one core; writes reports/adaptive.md and .html.
# Usage: benchmarks/adaptive.sh RUN_DIR
set -euo pipefail
robustkpca eval --model symvit --model rpc-symvit --model rpc-symvit-2iter-all \
  --attack pgd --attack pgd-best --attack adaptive --attack autoattack \
  --eps 4/255 --limit 150 --batch-size 150 --seed 0 --device cpu --out "$1"
robustkpca report "$1" --out reports/adaptive.md
