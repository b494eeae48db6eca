#!/usr/bin/env bash
# The paper's question on Fashion-MNIST: small models of each attention, three seeds each, trained on 12,000 images for 4 epochs, then attacked.
# Usage: benchmarks/fashion.sh FASHION_MNIST_DIR OUT_DIR   Expected to take 90 minutes on two cores; not yet run to its end. Begun again, it goes on where it stopped.
set -euo pipefail
data=$1 out=$2
mkdir -p "$out"
export OMP_NUM_THREADS=1

one() { # NAME SEED MODEL [OPTIONS]
  local name=$1 seed=$2 model=$3
  shift 3
  if [ ! -f "$out/$name-$seed.safetensors" ]; then
    robustkpca train --model "$model" "$@" --data "fashion-mnist:$data" --limit 12000 --epochs 4 --seed "$seed" --device cpu \
      --projection-loss 32 --out "$out/$name-$seed.safetensors" >"$out/$name-$seed.log" 2>&1 || echo "$name, seed $seed: $(tail -n 1 "$out/$name-$seed.log")"
  fi
}
rpc() { # SEED ITERATIONS LAYERS LAMBDA
  one "rpc-$2iter-$3-$4" "$1" rpc-symvit --iterations "$2" --layers "$3" --lambda "$4"
}
for seed in 0 1 2; do
  { one vit "$seed" vit; one symvit "$seed" symvit; rpc "$seed" 6 first 0.1; rpc "$seed" 2 all 1; } &
  { rpc "$seed" 6 first 4; rpc "$seed" 6 first 1; rpc "$seed" 2 all 4; one scaled "$seed" scaled-vit; } &
  wait
done

models=()
for name in symvit vit scaled rpc-6iter-first-4 rpc-6iter-first-1 rpc-6iter-first-0.1 rpc-2iter-all-4 rpc-2iter-all-1; do
  for seed in 0 1 2; do
    [ -f "$out/$name-$seed.safetensors" ] && models+=(--checkpoint "$out/$name-$seed.safetensors")
  done
done
robustkpca eval "${models[@]}" --attack pgd --attack fgsm --attack corruptions --limit 400 --device cpu --out "$out/attacks" &
robustkpca eval "${models[@]}" --attack adaptive-quick --limit 100 --device cpu --out "$out/adaptive" &
wait
rpcs=("$out"/rpc-*iter-*-0.safetensors)
for file in "${rpcs[@]}"; do
  robustkpca eval --checkpoint "$file" --iterations 1,2,4,6,8 --attack pgd --eps 4/255 --limit 400 --device cpu --out "$out/iterations-$(basename "$file" .safetensors)"
done
robustkpca report "$out"/attacks "$out"/adaptive "$out"/iterations-* --out "$out/report.md"
