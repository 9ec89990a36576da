"""Two turns of the first API: the model answers, is asked again, and answers again."""

import verifiers as vf
from datasets import Dataset


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "sure?"}]


def load_environment(problems=4):
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(problems)]

    def right(completion, answer, **kwargs):
        return float(completion[-1]["content"] == answer)

    rubric = vf.Rubric(funcs=[right], weights=[1.0])
    return Twice(max_turns=2, dataset=Dataset.from_list(rows), rubric=rubric)
