"""Data sets of problems, and verifiers of outputs."""

from ludic.envs.code_exec.adapters.base import (
    APPS_SYSTEM_PROMPT as APPS_SYSTEM_PROMPT,
    APPSTestAdapter as APPSTestAdapter,
    ExactMatchVerifier as ExactMatchVerifier,
    OutputVerifier as OutputVerifier,
    TestAdapter as TestAdapter,
)
