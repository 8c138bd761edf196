"""Data sets of problems, and verifiers of outputs."""

from ludic.envs.code_exec.adapters.base import (
    APPS_SYSTEM_PROMPT,
    APPSTestAdapter,
    ExactMatchVerifier,
    OutputVerifier,
    TestAdapter,
)

__all__ = ["APPS_SYSTEM_PROMPT", "APPSTestAdapter", "ExactMatchVerifier", "OutputVerifier", "TestAdapter"]
