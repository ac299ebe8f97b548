"""Let a model call a function: python examples/tools.py [URL].

Needs a started server with a model that can call tools, and `pip install ".[hub,serve,shape]"` for it:

    specdec serve -m Qwen/Qwen2.5-0.5B-Instruct
"""

import json
import sys
import urllib.error
import urllib.request
from typing import Any

TEMPERATURES = {"Oslo": 4, "Rome": 18}
CITY = {"type": "object", "properties": {"city": {"enum": list(TEMPERATURES)}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_temperature", "strict": True, "parameters": CITY | {"additionalProperties": False}},
}


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the server's answer to a chat request."""
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", data, headers)) as response:
        return json.load(response)["choices"][0]["message"]


def main(url: str = "http://127.0.0.1:8080") -> None:
    """Ask a question, run the function that the model calls, and print the answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it in Oslo?"}]
    settings = {"tools": [TOOL], "seed": 7, "max_tokens": 100}
    message = post(url, {"messages": messages, "tool_choice": "required", **settings})
    messages.append(message)
    for call in message["tool_calls"]:
        city = json.loads(call["function"]["arguments"])["city"]
        print(f"get_temperature({city!r}) = {TEMPERATURES[city]}")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{TEMPERATURES[city]} degrees"})
    print(post(url, {"messages": messages, "tool_choice": "none", **settings})["content"])


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except urllib.error.HTTPError as error:
        sys.exit(f"tools.py: {error.read().decode()}")
    except urllib.error.URLError as error:
        sys.exit(f"tools.py: {error.reason}; start a server with: specdec serve -m Qwen/Qwen2.5-0.5B-Instruct")
