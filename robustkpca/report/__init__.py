"""Tables, plots and words made of runs, and where every number comes from."""
