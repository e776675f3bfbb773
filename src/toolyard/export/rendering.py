"""How conversations are written: as any template takes them, or as one model's template gets them in a chat format.

The first has calls as objects and tools beside them: for the same model or another one whose template shows tools. The
second is what was played: what the template cannot show, such as tools it does not mention, is in the text. There it
can be checked that the template renders a conversation to the tokens that were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from toolyard.chat.protocol import Tokenizer, Tools
from toolyard.chat.template import TemplateFormat
from toolyard.chat.template.jinja2 import ChatTemplate
from toolyard.errors import ChatError
from toolyard.export.conversations import Conversation
from toolyard.messages import JSON

_SHOWN_CHARS = 60


class Written(NamedTuple):
    prompt: list[JSON]
    completion: list[JSON]
    tools: list[JSON] | None


class Match(StrEnum):
    """What a template makes of a conversation, compared with the trajectory."""

    EXACT = "exact"
    """The sampled tokens."""
    SAME_TEXT = "same text"
    """The same text, but the model had chosen other tokens for it."""
    DIFFERENT = "different"


class PlainWriting:
    """Calls as objects, tools beside them."""

    def __init__(self, tools: Tools) -> None:
        self._tools = [tool.model_dump(mode="json") for tool in tools] or None

    def write(self, conversation: Conversation) -> Written:
        prompt, completion = (
            [message.as_openai(decoded=True) for message in part]
            for part in (conversation.prompt, conversation.completion)
        )
        return Written(prompt, completion, self._tools)


class TemplateWriting:
    """As the template of `tokenizer` gets them in `chat`."""

    def __init__(self, chat: TemplateFormat, tokenizer: Tokenizer, tools: Tools) -> None:
        self._chat, self._tokenizer, self._tools = chat, tokenizer, tools
        self._templates: dict[str, ChatTemplate] = {}

    def write(self, conversation: Conversation) -> Written:
        """
        Raises:
            ChatError: the template refuses it.
        """
        _, whole, shown, _ = self._chat.template_input(conversation.messages, self._tools)
        _, prompt, _, _ = self._chat.template_input(list(conversation.prompt), self._tools)
        completion = [dict(message) for message in whole[len(prompt) :]]
        self._keep_calls_as_sampled(conversation, completion)
        return Written(whole[: len(prompt)], completion, shown)

    def match(self, conversation: Conversation, written: Written) -> tuple[Match, str]:
        """Compare what the template makes of it with the trajectory; also returns the first difference in words."""
        tokens = conversation.trajectory.tokens
        played = [*tokens.prompt_ids, *tokens.response_ids]
        try:
            text = self._rendered(conversation, written)
        except ChatError as error:
            return Match.DIFFERENT, str(error)
        ids = self._tokenizer.encode(text)
        if ids[: len(played)] == played and self._is_an_end(ids[len(played) :]):
            return Match.EXACT, ""
        said = self._tokenizer.decode(played)
        if text.startswith(said) and not text[len(said) :].strip():
            return Match.SAME_TEXT, ""
        at = next((at for at, (one, other) in enumerate(zip(text, said, strict=False)) if one != other), len(said))
        return Match.DIFFERENT, f"the template writes {_part(text, at)}, the trajectory has {_part(said, at)}"

    def _rendered(self, conversation: Conversation, written: Written) -> str:
        source, _, shown, variables = self._chat.template_input(conversation.messages, self._tools)
        template = self._templates.get(source)
        if template is None:
            template = self._templates[source] = ChatTemplate(source, variables, name=self._tokenizer.name)
        return template.render([*written.prompt, *written.completion], tools=shown, prompt=False)

    def _is_an_end(self, ids: Sequence[int]) -> bool:
        """Templates end a conversation with a newline or a special token that the model did not sample."""
        special = frozenset(self._tokenizer.special_tokens.values())
        return not self._tokenizer.decode([token for token in ids if token not in special]).strip()

    def _keep_calls_as_sampled(self, conversation: Conversation, completion: list[JSON]) -> None:
        """Calls that the template does not write are in the text: as the model wrote them, not as the syntax would."""
        made = [message for message in conversation.completion if message.role == "assistant"]
        shown = [message for message in completion if message["role"] == "assistant"]
        stops, response = frozenset(self._chat.stop_token_ids), conversation.trajectory.tokens.response_ids
        for message, adapted, turn in zip(made, shown, conversation.trajectory.turns, strict=False):
            if message.tool_calls and not adapted.get("tool_calls"):
                ids = response[turn.sampled.start : turn.sampled.end]
                while ids and ids[-1] in stops:
                    ids = ids[:-1]
                adapted["content"] = self._tokenizer.decode(ids)


def _part(text: str, at: int) -> str:
    start = max(0, at - _SHOWN_CHARS // 2)
    return repr(text[start : at + _SHOWN_CHARS // 2])
