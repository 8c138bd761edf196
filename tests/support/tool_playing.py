"""Clients that call tools, and a chat template that renders the calls."""

from playing import ScriptedClient

from ludic.types import ChatResponse

TEMPLATE = """\
{%- if tools %}
{{- '<|system|>\\n' }}
{%- for tool in tools %}
{{- tool | tojson + '\\n' }}
{%- endfor %}
{%- endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<eos>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}"""


def call(name, arguments="{}", number=0):
    """A tool call in OpenAI's format."""
    return {"id": f"id{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


class CallingClient(ScriptedClient):
    """Returns texts or (text, tool calls) in turn. A text that contains "cut" has finish reason
    "length"."""

    async def complete(self, request):
        answer = self.texts[len(self.requests) % len(self.texts)]
        self.requests.append(request)
        text, calls = answer if isinstance(answer, tuple) else (answer, [])
        ids = list(text.encode()) or [0]
        message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        reason = "length" if "cut" in text else "stop"
        prompt = [len(request.messages), len(self.requests)]
        response = ChatResponse(text, ids, [-0.5] * len(ids), reason, prompt)
        return response, {"raw_response": {"choices": [{"message": message}]}}
