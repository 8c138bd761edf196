"""A server of the Model Context Protocol without its SDK, which starts within milliseconds and does
what servers should not. The last argument, if any, is a folder in which it leaves its process
id."""

import json
import os
import sys
import time
from pathlib import Path

ANY = {"type": "object", "properties": {"text": {"type": "string"}}}
SCHEMAS = {
    "stock": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"], "x-own": [1, None]},
    **dict.fromkeys(("echo", "pid", "fails", "picture", "dies", "hangs", "waits", "floods", "prints", "lies", "refuses"), ANY),
}


def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def call(name, arguments):
    """The content of the result."""
    if name == "dies":
        os._exit(3)
    if name == "hangs":
        time.sleep(60)
    if name == "floods":
        while True:
            sys.stdout.write("x" * 65536)
    if name == "prints":
        print("a line that is no message\n\x1b[2J", flush=True)
    if name == "lies":
        return [{"type": "text", "text": 3}]
    if name == "picture":
        return [{"type": "text", "text": "see"}, {"type": "image", "data": "AA==", "mimeType": "image/png"}]
    if name == "fails":
        return [{"type": "text", "text": "Error: no shelf"}]
    texts = {"pid": str(os.getpid()), "echo": arguments.get("text"), "stock": "7"}
    return [{"type": "text", "text": part} for part in str(texts.get(name, "")).split("&")]


def main():
    print("begins", file=sys.stderr, flush=True)
    if "silent" in sys.argv:
        time.sleep(60)
    if "broken" in sys.argv:
        raise SystemExit("no shelf in the shop")
    if sys.argv[1:]:
        (Path(sys.argv[-1]) / str(os.getpid())).touch()
    schemas = {"stock": SCHEMAS["stock"]} if "one-tool" in sys.argv else SCHEMAS
    for line in sys.stdin:
        request = json.loads(line)
        method, number = request["method"], request.get("id")
        if number is None:
            continue
        if method == "initialize":
            capabilities = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            send(id=number, result={**capabilities, "serverInfo": {"name": "shop", "version": "1"}})
        elif method == "tools/list":
            tools = [{"name": name, "description": f"It {name}.", "inputSchema": schema} for name, schema in schemas.items()]
            half, later = len(tools) // 2, "cursor" in (request.get("params") or {})
            page = {"tools": tools[half:]} if later else {"tools": tools[:half], "nextCursor": "rest"}
            send(id=number, result=page)
        elif method == "tools/call" and request["params"]["name"] == "waits":
            continue
        elif method == "tools/call" and request["params"]["name"] != "refuses":
            name = request["params"]["name"]
            send(id=number, result={"content": call(name, request["params"].get("arguments") or {}), "isError": name == "fails"})
        else:
            send(id=number, error={"code": -32601, "message": f"no {method}"})


if __name__ == "__main__":
    main()
