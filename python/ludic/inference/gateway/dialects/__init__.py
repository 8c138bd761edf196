"""The wire formats of the gateway: OpenAI's chat, Responses and completions, and Anthropic's
Messages. Each reads a request into an `Ask`, and writes `Answered` samples as one body or as the
events of a stream."""
