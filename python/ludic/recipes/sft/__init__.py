"""`ludic sft`: a data file in, a model out. The loop is `Trainer`'s."""
