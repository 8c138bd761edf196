"""Settings of `ludic dpo`."""
