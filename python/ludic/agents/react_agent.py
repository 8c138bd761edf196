"""An agent that reasons and calls tools until it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ludic.agents.base_agent import IntermediateCall
from ludic.agents.tool_agent import ToolAgent
from ludic.errors import ConfigError, ConfigTypeError
from ludic.inference.request import InferenceSpec, call_seed
from ludic.parsers import ParseResult
from ludic.types import Message, TokenTrace

CALLS_INFO, FAILED_INFO = "tools/calls", "tools/failed"
"""Keys of the info of an answer: the calls of tools before it, and how many of them failed."""
OUT_OF_STEPS: Message = {
    "role": "user",
    "content": "You have exhausted your reasoning steps and can call no more tools. Give your final answer now.",
}


class ReActAgent(ToolAgent):
    """Calls the model up to `max_react_steps` times for each action (ReAct, arXiv:2210.03629).

    After a response with tool calls the tools are run and the model is called again. A response
    without tool calls is the answer and is parsed. The last call offers no tools, and a message
    that is not stored in the context tells the model so. `act` returns the answer. The calls before
    it are in `intermediate_calls`; the protocol turns them into steps of the same rollout, so that
    they are trained as well. The info of the answer has the number of calls, `tools/calls`, and how
    many of them failed, `tools/failed`.

    With `reject_incomplete_completions`, a response that reached the token limit ends `act`, and
    its tools are not run.
    """

    name = "react_agent"

    def __init__(self, tools: Sequence[Callable[..., Any]], max_react_steps: int = 5, **kwargs: Any) -> None:
        super().__init__(tools, **kwargs)
        if not getattr(self._ctx, "supports_tools", False):
            raise ConfigTypeError(
                f"{type(self).__name__} requires a context with supports_tools=True, which {type(self._ctx).__name__} is not; use one "
                "that stores tool calls and their results"
            )
        if max_react_steps < 1:
            raise ConfigError(f"max_react_steps ({max_react_steps}) must be >= 1, because the last step is the answer")
        self.max_react_steps = max_react_steps

    async def act(
        self, inference: InferenceSpec | None = None, sampling_seed: int | None = None, timeout_s: float | None = None
    ) -> tuple[ParseResult, str, dict[str, Any], TokenTrace | None]:
        """(parsed, raw text, info, trace) of the answer. `timeout_s` applies to each model call;
        each call has its own sampling seed."""
        self.intermediate_calls = []
        self.num_calls = self.num_failed = 0
        spec = self._with_tools(inference)
        for call in range(self.max_react_steps):
            last = call == self.max_react_steps - 1
            messages = self._ctx.on_before_act()
            response, info, self.last_info, trace = await self._infer_once(
                messages=[*messages, OUT_OF_STEPS] if last else messages,
                inference=spec,
                sampling_seed=call_seed(sampling_seed, call),
                timeout_s=timeout_s,
                tools=None if last or not self.tool_schemas else self._tool_request(),
            )
            ends = last or self._is_rejected(response)
            content, tool_calls = (response.text, []) if ends else self._extract_openai_message(info)
            if not tool_calls:
                answer = replace(response, text=content or "")
                self._ctx.add_assistant_step(answer.text, None)
                info |= {CALLS_INFO: self.num_calls, FAILED_INFO: self.num_failed}
                return self._parse(answer, info), answer.text, info, trace
            self._ctx.add_assistant_step(content, tool_calls)
            results = await self._run_tool_calls(tool_calls)
            info["chat_completion"] = {"role": "assistant", "content": content or "", "tool_calls": tool_calls}
            self.intermediate_calls.append(IntermediateCall(response.text, info, trace, "\n".join(results)))
        raise AssertionError("the last call returns")
