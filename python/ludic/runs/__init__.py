"""A run from its first line to its last: reinforcement, fine-tuning, reward model; its folder,
its reports."""
