"""A path that command lines of vLLM servers name; the module is
`ludic.inference.vllm.in_server.client_tag_middleware`."""

from ludic.inference.vllm.in_server.client_tag_middleware import ClientTagMiddleware

__all__ = ["ClientTagMiddleware"]
