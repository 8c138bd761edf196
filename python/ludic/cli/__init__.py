"""The `ludic` command, with one module for each subcommand. `app` declares the options and imports
the other modules when a command runs."""

from ludic.cli.app import main

__all__ = ["main"]
