"""The distribution that carries this package. The registry's `ludic` is another project, whose
import package has the same name."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "ludic-rl"
"""What `pip install` takes. Messages are made from this name, and pages are tested with it."""

NAMESAKE = "ludic"


def install_command(extra: str) -> str:
    """Example: `install_command("wandb")` is `pip install 'ludic-rl[wandb]'`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def find_version(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def describe_namesake() -> str | None:
    """What to do if the registry's `ludic` is installed too: the later of the two overwrites files
    of the other."""
    found = find_version(NAMESAKE)
    if found is None:
        return None
    return (
        f"the distribution {NAMESAKE} {found} is installed too: another project, which overwrites files of {DISTRIBUTION}; "
        f"`pip uninstall {NAMESAKE}`, then install {DISTRIBUTION} again"
    )
