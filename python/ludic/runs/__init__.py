"""Training runs from start to end, for `ludic train`, `sft` and `train-rm`: phases, folder, resume,
reports."""
