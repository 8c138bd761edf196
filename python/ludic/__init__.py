"""Post-training of language models: reinforcement learning, reward modelling and supervised
fine-tuning."""

__all__: list[str] = []
