#!/usr/bin/env bash
# Chooses lambda for the embedded RPC models: 3 epochs on 20,000 training images, scored on 5,000 others. Prints one line each;
# about 10 minutes on two cores. Usage: benchmarks/choose_lambda.sh FASHION_MNIST_DIR OUT_DIR
set -euo pipefail
data=$1 out=$2
mkdir -p "$out"
export OMP_NUM_THREADS=1
one() { # ITERATIONS LAYERS LAMBDA
  robustkpca train --model rpc-symvit --iterations "$1" --layers "$2" --lambda "$3" --data "fashion-mnist:$data" \
    --limit 25000 --holdout 5000 --epochs 3 --seed 0 --device cpu --out "$out/$1iter-$2-lambda$3.safetensors" \
    >"$out/$1iter-$2-lambda$3.log" 2>&1 || true
  echo "$1iter/$2 lambda $3: $(grep -E '^(epoch 3|error)' "$out/$1iter-$2-lambda$3.log")"
}
for lambda in 4 1 0.1; do
  one 6 first "$lambda" &
  one 2 all "$lambda"
  wait
done
