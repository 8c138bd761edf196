"""Models on disk and in memory: loading, saving, tokenizer, LoRA adapters, heads, names of weights,
packed attention."""
