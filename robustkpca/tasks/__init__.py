"""Tasks: what is predicted, scored and perturbed."""
