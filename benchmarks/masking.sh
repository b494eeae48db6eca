#!/usr/bin/env bash
# Does a strong RPC setting (6 iterations in layer 1, lambda 4) mask its gradient? Three seeds of SymViT and of RPC-SymViT on digits, under PGD-10 and
# the adaptive suite at 16/255. About 40 minutes on one core; writes reports/masking.md.
# Usage: benchmarks/masking.sh FOLDER
set -euo pipefail
mkdir -p "$1"
models=()
for seed in 0 1 2; do
  robustkpca train --model symvit --data digits --seed "$seed" --out "$1/symvit-$seed.safetensors"
done
for seed in 0 1 2; do
  robustkpca train --model rpc-symvit --iterations 6 --lambda 4 --layers first --data digits --seed "$seed" --out "$1/rpc-$seed.safetensors"
done
for name in symvit-0 symvit-1 symvit-2 rpc-0 rpc-1 rpc-2; do models+=(--checkpoint "$1/$name.safetensors"); done
robustkpca eval "${models[@]}" --data digits --limit 100 --attack pgd --attack adaptive --eps 16/255 --seed 0 --device cpu --out "$1/run"
robustkpca report "$1/run" --out reports/masking.md
