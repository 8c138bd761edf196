"""What runs inside a vLLM server's own process."""
