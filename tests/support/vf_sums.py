"""Tasks and harnesses of verifiers: sums, asked once or until the answer is right. Import it only
where verifiers is installed."""

import ssl

import httpx
import verifiers.v1 as vf


class SumData(vf.TaskData):
    a: int
    b: int


class Sum(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == str(self.data.a + self.data.b))

    @vf.reward
    async def short(self, trace) -> float:
        return 0.5 if len(trace.last_reply) < 3 else 0.0

    @vf.metric
    async def characters(self, trace) -> float:
        return len(trace.last_reply)


class FailingSum(Sum):
    @vf.reward
    async def right(self, trace) -> float:
        raise ValueError("the grader fell over")


def sums(kind=Sum, count=3, system_prompt="Add."):
    return [kind(SumData(idx=index, prompt=f"{index}+3=", system_prompt=system_prompt, a=index, b=3)) for index in range(count)]


class AsksUntilRight(vf.Harness[vf.HarnessConfig]):
    """Replies "wrong" and asks again, up to three times. Runs in this process."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60, trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)) as http:
            for _ in range(3):
                answer = await http.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
                if answer.is_error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                text = answer.json()["choices"][0]["message"]["content"] or ""
                if text == str(data.a + data.b):
                    break
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "wrong"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["AsksUntilRight"]


def until_right(**settings):
    return vf.AgentConfig(harness={"id": "vf_sums"}, runtime=vf.SubprocessConfig(), **settings)
