"""The old path of `ludic.inference.vllm.in_server.client_tag_middleware`, which command lines of
vLLM servers may still name."""

from ludic.inference.vllm.in_server.client_tag_middleware import ClientTagMiddleware

__all__ = ["ClientTagMiddleware"]
