"""Messages to token ids and back: chat template, prompt tokens, tool calls, vocabulary."""
