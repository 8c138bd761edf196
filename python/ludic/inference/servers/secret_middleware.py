"""A path that command lines of vLLM servers name; the module is
`ludic.inference.vllm.in_server.secret_middleware`."""

from ludic.inference.vllm.in_server.secret_middleware import SecretMiddleware

__all__ = ["SecretMiddleware"]
