#!/usr/bin/env bash
# Trains the embedded models, one recipe for all, on the 60,000 training images of Fashion-MNIST, one thread each.
# The rule, for every model: seed 0, the weights after the last epoch, lambda chosen by choose_lambda.sh on training images
# that are held out. Nothing is chosen on the test images: what comes out is embedded and shown.
# Usage: benchmarks/train_embedded.sh FASHION_MNIST_DIR OUT_DIR [NAME...]     (names: the keys below; all without names)
set -euo pipefail
data=$1 out=$2
shift 2
declare -A flags=(
  [vit]="--model vit --seed 0"
  [symvit]="--model symvit --seed 0"
  [rpc-symvit]="--model rpc-symvit --iterations 6 --layers first --lambda 0.1 --seed 0"
  [rpc-symvit-2iter-all]="--model rpc-symvit --iterations 2 --layers all --lambda 1 --seed 0"
)
export OMP_NUM_THREADS=1
for name in "${@:-${!flags[@]}}"; do
  # shellcheck disable=SC2086
  robustkpca train ${flags[$name]} --data "fashion-mnist:$data" --device cpu --out "$out/$name.safetensors"
done
