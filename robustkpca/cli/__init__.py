"""The command line: parse, call, print, exit code. Heavy imports live inside the commands, so that --help is instant."""

# The order in which commands are registered is the order of --help.
from robustkpca.cli import analyze, lists, profile, reading, train, work
from robustkpca.cli.app import main

__all__ = ["analyze", "lists", "main", "profile", "reading", "train", "work"]
