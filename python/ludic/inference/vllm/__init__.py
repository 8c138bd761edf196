"""vLLM servers: their clients, and how a server is started and stopped.

Only `in_server` runs in the server's own process.
"""
