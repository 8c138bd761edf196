"""Judges behind a loopback server: a function of what is judged decides the verdict."""

import json
import re

from stub_openai_server import StubOpenAIServer, completion

CHATML = re.compile(r"<\|im_start\|>(\w+)(?:\n|\\n)(.*?)(?:<\|im_end\|>|$)", re.DOTALL)
QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')
ORDER = re.compile(r"give (\d+)")


def read_question(body):
    """(what is judged, schema of the verdict) of a request."""
    _, data, _, _, _ = body["messages"][-1]["content"].split("\n", 4)
    return json.loads(data), body["response_format"]["json_schema"]["schema"]["properties"]


def verdict(**keys):
    return completion(json.dumps({"reason": "so", **keys}))


def shown_answers(data):
    """The answers of a question, in the order in which they are shown."""
    if "answer" in data:
        return [data["answer"]]
    return list(data["answers"].values()) if "answers" in data else [data["answer_A"], data["answer_B"]]


def judge_by(quality, biased=lambda data: False):
    """A judge that prefers answers of higher `quality(data, answer)`, from 0 to 1; where
    `biased(data)`, those that are shown first: a function of what is judged and the schema of the
    verdict, which it returns without the reason."""

    def judge(data, properties):
        values = [quality(data, text) for text in shown_answers(data)]
        if biased(data):
            values = [-place for place, _ in enumerate(values)]
        if "better" in properties:
            return {"better": "tie" if values[0] == values[1] else "AB"[values[1] > values[0]]}
        if "ranking" in properties:
            return {"ranking": [place + 1 for place in sorted(range(len(values)), key=lambda place: -values[place])]}
        items = {name: rule for name, rule in properties.items() if name != "reason"}
        return {name: values[0] >= 0.5 if rule["type"] == "boolean" else round(10 * values[0]) for name, rule in items.items()}

    return judge


def judged_by(quality, **settings):
    """A server of `judge_by`."""
    judge = judge_by(quality, **settings)
    return StubOpenAIServer(lambda body: verdict(**judge(*read_question(body))), idle_s=2.0)


def obedient_judge():
    """A server whose judge compares the answer with the reference, unless something tells it to
    give a number outside of the JSON strings that it is shown: then it gives that.

    As a server does, it writes the messages into ChatML and reads them as one text, in which the
    special tokens that a message contains begin and end messages.
    """

    def answer(body):
        text = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>" for message in body["messages"])
        said = [content for _, content in CHATML.findall(text)]
        orders = [order for content in said for order in ORDER.findall(QUOTED.sub("", content))]
        known = re.search(r'reference"?: "?(\w+)', text, re.I), re.search(r'answer"?(?:: "?|>)(\w+)', text, re.I)
        right = all(known) and known[0][1] == known[1][1]
        return verdict(item_1=int(orders[-1]) if orders else 10 * right)

    return StubOpenAIServer(answer)
