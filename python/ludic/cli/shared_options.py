"""What the commands have in common before their settings are composed."""

from __future__ import annotations


def make_lr_setting(lr: float | None) -> list[str]:
    """The setting that `--lr` is short for."""
    return [] if lr is None else [f"trainer.lr={lr}"]


def refuse_flags_in(arguments: list[str] | None) -> None:
    """Raise ConfigError for a flag among the settings, which names the setting."""
    if any(argument.startswith("-") for argument in arguments or ()):
        from ludic.recipes.compose import list_settings
        from ludic.recipes.overrides import refuse_flags

        refuse_flags(arguments or (), list_settings())
