"""From messages to token ids: the chat template, the prompt tokens, tool calls, the vocabulary."""
