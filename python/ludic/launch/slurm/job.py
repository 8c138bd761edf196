"""What the batch script of `ludic slurm` executes: `python -m ludic.launch.slurm.job FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from ludic.errors import LudicError
from ludic.launch.slurm.run import run_job
from ludic.launch.slurm.settings import read_settings


def main(arguments: list[str]) -> int:
    try:
        return run_job(read_settings(Path(*arguments[:1])))
    except LudicError as error:
        print(f"ludic: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
