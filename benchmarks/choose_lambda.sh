#!/usr/bin/env bash
# Chooses lambda for the embedded RPC models: 3 epochs on 20,000 training images, scored on 5,000 others. Prints one line each.
# Usage: benchmarks/choose_lambda.sh FASHION_MNIST_DIR OUT_DIR
set -euo pipefail
data=$1 out=$2
mkdir -p "$out"
for lambda in 4 1 0.1; do
  for variant in "6 first" "2 all"; do
    read -r n layers <<<"$variant"
    name=lambda$lambda-${n}iter-$layers
    robustkpca train --model rpc-symvit --iterations "$n" --lambda "$lambda" --layers "$layers" \
      --data "fashion-mnist:$data" --limit 25000 --holdout 5000 --epochs 3 --seed 0 --device cpu \
      --out "$out/$name.safetensors" 2>&1 | tee "$out/$name.log" | grep '^epoch 3' | sed "s/^/$name  /" || echo "$name  failed: see $out/$name.log"
  done
done
