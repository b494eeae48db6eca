"""The command line: parse, call, print, exit code. Heavy imports live inside the commands, so that --help is instant."""

from robustkpca.cli import lists, reading, work  # registers the commands
from robustkpca.cli.app import main

__all__ = ["lists", "main", "reading", "work"]
