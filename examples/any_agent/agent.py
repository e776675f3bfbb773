"""A plain agent on the OpenAI SDK. It knows nothing of training, and works as well at any other server."""

import json
import subprocess
import sys

from openai import OpenAI, PermissionDeniedError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "Run a Python program and return what it prints.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]


def run(arguments: str) -> str:
    code = json.loads(arguments).get("code", "")
    command = ["toolyard", "sandbox", "run", "-", "--timeout", "5"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr)[-1000:]


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        messages = json.load(file)["messages"]
    client = OpenAI()  # the address and the key are in the environment
    while True:
        try:
            answer = client.chat.completions.create(model="any", messages=messages, tools=TOOLS).choices[0].message
        except PermissionDeniedError as error:  # a limit on turns or time: the agent has to stop
            sys.exit(str(error))
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call.function.arguments)})
    print(answer.content)


main()
