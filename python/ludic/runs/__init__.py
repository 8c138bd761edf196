"""Training runs from start to end, for `ludic train`, `sft`, `train-rm` and `dpo`: phases,
folder, resume, reports."""
