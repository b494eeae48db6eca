"""The only loop: a plan checked before anything runs, then every model, chunk and perturbation."""
