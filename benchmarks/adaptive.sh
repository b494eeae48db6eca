#!/usr/bin/env bash
# Is what RPC-Attention gains under PGD robustness, or a gradient that misleads the attack? The embedded models at 4/255 under PGD-10, PGD with
# restarts, the adaptive suite and AutoAttack on 150 images, and under PGD-10 and APGD-100 on all 1,000. Writes reports/adaptive.md.
# About 100 minutes on one core (96 for the first run, 10 for the second, the one time both were run).
# Usage: benchmarks/adaptive.sh FOLDER
set -euo pipefail
models=(--model symvit --model rpc-symvit --model rpc-symvit-2iter-all)
robustkpca eval "${models[@]}" --attack pgd --attack pgd-best --attack adaptive --attack autoattack \
  --eps 4/255 --limit 150 --batch-size 150 --seed 0 --device cpu --out "$1/150"
robustkpca eval "${models[@]}" --attack pgd --attack apgd --eps 4/255 --seed 0 --device cpu --out "$1/1000"
robustkpca report "$1/150" "$1/1000" --out reports/adaptive.md
