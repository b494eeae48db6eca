"""Models: settings, attention, networks, the classifier, weight files and checkpoints."""
