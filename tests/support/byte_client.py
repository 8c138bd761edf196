"""A chat client with one token per byte. Each message is encoded as its text and a newline, so the
prompt of a turn is a prefix of the prompt of the next turn."""

from ludic.types import ChatResponse


def ids(text):
    return list(text.encode())


class ByteClient:
    """Returns the given texts in turn. A newline is the end token. `sent` has the prompt ids,
    completion ids and log-probabilities of every call."""

    def __init__(self, *texts, error=None):
        self.texts, self.error, self.requests, self.sent = texts, error, [], []

    async def complete(self, request):
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        text = self.texts[(len(self.requests) - 1) % len(self.texts)]
        prompt = ids("".join(f"{message['content']}\n" for message in request.messages))
        completion = ids(f"{text}\n")
        logps = [-0.123456789 * (position + 1) for position in range(len(completion))]
        self.sent.append((prompt, completion, logps))
        return ChatResponse(text, completion, logps, "stop", prompt), {}
