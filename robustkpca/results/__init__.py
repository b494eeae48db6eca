"""Numbers computed from rows: accuracies, comparisons, means over training runs, ImageNet-C and -O."""
