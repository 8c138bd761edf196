"""The old path of `ludic.inference.vllm.in_server.secret_middleware`, which command lines of vLLM
servers may still name."""

from ludic.inference.vllm.in_server.secret_middleware import SecretMiddleware

__all__ = ["SecretMiddleware"]
