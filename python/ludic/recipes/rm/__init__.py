"""`ludic train-rm`: preferences in, a reward model out. The loop is `RMTrainer`'s."""
