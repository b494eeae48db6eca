"""Pure statistics on arrays: no torch, no pandas."""
