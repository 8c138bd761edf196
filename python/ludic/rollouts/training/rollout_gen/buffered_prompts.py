"""A buffer of prompts as a pool of groups reads it: one at a time, each with its position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludic.errors import ConfigError, ConfigTypeError, DataError, LudicError, RequestsExhausted
from ludic.interaction.containment import describe_error


class BufferedPrompts:
    """Takes prompts from a `DataBuffer`, or from a buffer of the user's own with `get_prompts`,
    `save_state` and `load_state`. If it has `position` and `at` too, prompts are found again by
    their position, and need not be in a saved state."""

    def __init__(self, data_buffer: Any) -> None:
        missing = [name for name in ("get_prompts", "save_state", "load_state") if not hasattr(data_buffer, name)]
        if missing:
            raise ConfigTypeError(
                f"a {type(data_buffer).__name__} has no {' and no '.join(missing)}; give a DataBuffer(prompts=[...]), or an object "
                "with get_prompts(n), save_state() and load_state(state)"
            )
        self.buffer = data_buffer
        self.can_find = hasattr(data_buffer, "at") and hasattr(data_buffer, "position")
        """Whether `at` works."""
        self._taken = 0

    def take(self) -> tuple[int, Any]:
        """The next (position, prompt). Raises RequestsExhausted after the last one."""
        position = self.buffer.position if self.can_find else self._taken
        prompts = self.buffer.get_prompts(1)
        if not prompts:
            raise RequestsExhausted("the buffer gave no prompt")
        if not isinstance(prompts, list | tuple) or len(prompts) != 1:
            raise DataError(f"get_prompts(1) of {type(self.buffer).__name__} must return a list of one prompt, not {prompts!r}")
        self._taken += 1
        return position, prompts[0]

    def at(self, position: int) -> Any:
        """The prompt at a position that was taken, in this process or before it."""
        return self.buffer.at(position)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state of the buffer. Raises ConfigError for one that it cannot read."""
        try:
            self.buffer.load_state(state)
        except LudicError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(self.buffer).__name__}.load_state cannot read the saved buffer_state ({describe_error(error)}); take an older "
                "checkpoint, or give the buffer that was saved"
            ) from error


def copy_prompt(prompt: Any) -> Any:
    """A copy that the caller may append messages to or write keys into. Texts, and anything that is
    neither a list nor a mapping, stay as they are."""
    if isinstance(prompt, dict):
        return dict(prompt)
    return [dict(part) if isinstance(part, dict) else part for part in prompt] if isinstance(prompt, list) else prompt
