#!/usr/bin/env bash
# The paper's question on Fashion-MNIST: small models of each attention, four seeds each, trained on 12,000 images for 8 epochs, then attacked.
# Usage: benchmarks/fashion.sh FASHION_MNIST_DIR OUT_DIR   Took 95 minutes on two cores, with other work beside it; begun again, it goes on where it stopped.
set -euo pipefail
data=$(realpath "$1")
mkdir -p "$2"
cd "$2"
export OMP_NUM_THREADS=1 data
seeds="0 1 2 3"
models=(
  "symvit symvit"
  "vit vit"
  "scaled scaled-vit"
  "rpc-6iter-first-4 rpc-symvit --iterations 6 --layers first --lambda 4"
  "rpc-6iter-first-1 rpc-symvit --iterations 6 --layers first --lambda 1"
  "rpc-6iter-first-0.1 rpc-symvit --iterations 6 --layers first --lambda 0.1"
  "rpc-2iter-all-4 rpc-symvit --iterations 2 --layers all --lambda 4"
)
train() { # SEED NAME MODEL [OPTIONS]
  local name=$2-$1 seed=$1
  shift 2
  [ -f "$name.safetensors" ] || robustkpca train --model "$@" --data "fashion-mnist:$data" --limit 12000 --epochs 8 --seed "$seed" \
    --device cpu --projection-loss 32 --out "$name.safetensors" >"$name.log" 2>&1 || echo "$name: $(tail -n 1 "$name.log")"
}
export -f train
cores=$(getconf _NPROCESSORS_ONLN)
for seed in $seeds; do printf "train $seed %s\n" "${models[@]}"; done | xargs -P "$cores" -I{} bash -c '{}'

together() { torchrun --nproc-per-node "$cores" -m robustkpca eval --device cpu --data "fashion-mnist:$data" "$@"; }
all=() rpc=()
for model in "${models[@]}"; do
  for seed in $seeds; do
    file="${model%% *}-$seed.safetensors"
    [ -f "$file" ] && all+=(--checkpoint "$file") && [[ $model == rpc-* ]] && rpc+=(--checkpoint "$file")
  done
done
together "${all[@]}" --attack pgd --attack fgsm --attack corruptions --limit 400 --out attacks
together "${all[@]}" --attack adaptive-quick --limit 100 --out adaptive
together "${rpc[@]}" --iterations 1,2,4,6,8 --attack pgd --eps 4/255 --limit 400 --out iterations
robustkpca report attacks adaptive iterations --out fashion.md
