"""The documented path of `ludic.training.samples.prompt_completion`."""

from ludic.training.samples.prompt_completion import (
    ChatTemplateResult,
    format_chat_template_text,
    tokenize_with_chat_template,
)

__all__ = ["ChatTemplateResult", "format_chat_template_text", "tokenize_with_chat_template"]
