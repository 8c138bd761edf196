"""Settings of `ludic sft`."""
