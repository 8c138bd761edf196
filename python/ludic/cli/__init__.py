"""The `ludic` command, with one module for each subcommand. `app` declares the options and imports
the other modules when a command runs."""

import sys

import ludic
from ludic.distribution import describe_namesake

if "GRPO" not in ludic.__all__ and (problem := describe_namesake()):
    sys.exit(f"ludic: {problem}")

from ludic.cli.app import main as main
