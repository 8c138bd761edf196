"""The samples of `ludic sft`, `train-rm` and `dpo`, from files or from a task."""
