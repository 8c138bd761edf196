"""Images in messages, prompts and samples: bytes that are stored once, and digests everywhere
else."""

PROCESSOR = "_ludic_image_processor"
"""The attribute of a model that sees images, and of its tokenizer, with their `ImageProcessor`."""
