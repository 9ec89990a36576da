"""Rewards that a model without any training can earn and learn, by the second API of verifiers."""

import httpx
import verifiers.v1 as vf

__all__ = ["Even", "Once"]


class EvenTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def even(self, trace: vf.Trace) -> float:
        said = trace.branches[-1].messages[-1].content or "?"
        return sum(ord(character) % 2 == 0 for character in said) / len(said)


class EvenConfig(vf.TasksetConfig):
    problems: int = 64


class Even(vf.Taskset[EvenTask, EvenConfig]):
    def load(self):
        for i in range(self.config.problems):
            yield EvenTask(vf.TaskData(prompt=f"{i}:"), self.config.task)


class Once(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}], "max_tokens": 6}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
            (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status()
        return vf.ProgramResult(0, "", "")
