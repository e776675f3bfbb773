"""Two custom tools: a class, as in verl's guide, and a function."""

from toolyard.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, tool


class MyCustomTool(BaseTool):
    """The model guesses a word, and reads how many letters are in their places."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instances = {}

    async def create(self, instance_id: str = None, **kwargs):  # noqa: RUF013 - as the guide writes it
        # One state per trajectory. The task provides kwargs: tools_kwargs[name]["create_kwargs"].
        self._instances[instance_id] = {"word": kwargs["word"], "guesses": 0, "best": 0.0}
        return instance_id

    async def execute(self, instance_id: str, parameters: dict, **kwargs):
        # Arguments have been checked against the schema. Returns what the model reads, the step reward and metrics.
        state, guess = self._instances[instance_id], parameters["param1"]
        state["guesses"] += 1
        if state["guesses"] > self.config["custom_param"]:
            return ToolResponse(text="No guesses are left."), -0.1, {"guesses": state["guesses"]}
        right = sum(a == b for a, b in zip(guess, state["word"], strict=False))
        share = right / max(len(guess), len(state["word"]))
        step = 0.0 if share > state["best"] else -0.05
        state["best"] = max(state["best"], share)
        text = f"{right} of {len(state['word'])} letters are in their places."
        return ToolResponse(text=text), step, {"guesses": state["guesses"]}

    async def calc_reward(self, instance_id: str, **kwargs):
        # Called once, at the end of the trajectory.
        return self._instances[instance_id]["best"]

    async def release(self, instance_id: str, **kwargs):
        # Always called, even after a failure.
        del self._instances[instance_id]


@tool
def count_letters(word: str) -> int:
    """Count the letters of a word.

    Args:
        word: One word, without spaces.
    """
    return len(word)
