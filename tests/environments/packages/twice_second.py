"""The same by the second API: a harness in this process asks the model over HTTP."""

import httpx
import verifiers.v1 as vf

__all__ = ["Plus", "Twice"]


class PlusData(vf.TaskData):
    answer: str


class PlusTask(vf.Task[PlusData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.branches[-1].messages[-1].content == self.data.answer)


class PlusConfig(vf.TasksetConfig):
    problems: int = 4


class Plus(vf.Taskset[PlusTask, PlusConfig]):
    def load(self):
        for i in range(self.config.problems):
            yield PlusTask(PlusData(prompt=f"{i}+1=", answer=str(i + 1)), self.config.task)


class Twice(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                said = (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status().json()
                messages += [said["choices"][0]["message"], {"role": "user", "content": "sure?"}]
        return vf.ProgramResult(0, "", "")
