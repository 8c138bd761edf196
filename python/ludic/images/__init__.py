"""Images in messages, prompts and samples: bytes that are stored once, and digests everywhere
else."""
