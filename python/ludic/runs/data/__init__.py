"""The samples of `ludic sft` and `ludic train-rm`, from files or from a task."""
