"""`python -m ludic.inference.vllm_server FLAGS...` is `python -m
ludic.inference.vllm.in_server.server FLAGS...`."""

from ludic.inference.vllm.in_server.server import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
