"""Who says what in a text that a chat template made: found by the marks that the template puts before a message.

Trainers often decode without special tokens, and templates then leave less: of `<|im_start|>user\\n` only `user\\n`, of
`[INST]` nothing. A text is split by the marks of one template only; those of others are text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from toolyard.viewer.protocol import Role

MOST_SPEECHES = 10_000
"""A text with more marks is shown as one message."""


class Speech(NamedTuple):
    role: Role
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    sign: str
    """Text that occurs in every conversation of this template."""
    marks: re.Pattern[str]
    """What precedes a message; its only group that matched names the speaker."""
    quotes: bool = False
    """Whether results of tools are written as JSON strings."""
    in_turn: bool = False
    """Whether marks look like ordinary text: one that cannot follow the current speaker then is text."""
    complete: bool = True
    """Whether every message has its mark."""


_NAMED = {
    Role.SYSTEM: "system developer SYSTEM_PROMPT AVAILABLE_TOOLS",
    Role.USER: "user User INST",
    Role.ASSISTANT: "assistant Assistant model ai /INST /TOOL_RESULTS tool_response| /tool_response "
    "tool▁output▁end tool▁outputs▁end /function_results",
    Role.TOOL: "tool ipython observation functions python browser TOOL_RESULTS tool_response tool▁output▁begin "
    "tool▁outputs▁begin tool_result function_results Return",
}
_ROLES = {name: role for role, names in _NAMED.items() for name in names.split()}
_FOLLOWERS = {
    Role.OTHER: frozenset(Role),
    Role.SYSTEM: {Role.SYSTEM, Role.USER},
    Role.USER: {Role.ASSISTANT},
    Role.ASSISTANT: {Role.USER, Role.TOOL},
    Role.TOOL: {Role.TOOL, Role.ASSISTANT, Role.USER},
}
_WRAPPED = ("<tool_response>", "\n<tool_response>")
_UNOPENED = (Role.OTHER, Role.ASSISTANT)

_HARMONY = Template(
    "<|start|>",
    re.compile(
        r"<\|start\|>(?:(assistant)(?! to=assistant)"
        r"|(?:(functions|python|browser|tool)[^<]{0,200}|([a-z]{1,20}))(?:<\|channel\|>[^<]{0,99})?<\|message\|>)"
    ),
    quotes=True,
    in_turn=True,
)
_MISTRAL = Template("[INST]", re.compile(r"\[(/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS))\] ?"))
_CHATML = Template("<|im_start|>", re.compile(r"<\|im_start\|>([a-z_]{1,40})(?:<\|im_sep\|>|[^\n]{0,99}\n)"))
_MARKED = (
    _CHATML,
    Template(
        "<|start_header_id|>",
        re.compile(r"<\|start_header_id\|>([a-z_]{1,40})<\|end_header_id\|>\n{0,2}"),
        quotes=True,
    ),
    _HARMONY,
    Template("<start_of_turn>", re.compile(r"<start_of_turn>(user|model)\n")),
    Template("<|turn>", re.compile(r"<\|turn>([a-z]{1,40})\n|<\|?(tool_response\|?)>")),
    Template("<|user|>", re.compile(r"<\|(system|user|assistant|observation|tool|tool_response|tool_result)\|>\n?")),
    Template("<｜User｜>", re.compile(r"<｜(User|Assistant|tool▁outputs?▁(?:begin|end))｜>|<(/?function_results)>")),
    _MISTRAL,
    Template(
        "<|im_middle|>",
        re.compile(
            r"<\|im_system\|>[^<]{0,99}<\|im_middle\|>## (Return) of [^<\n\\]{0,200}(?:\n|\\n)"
            r"|<\|im_[a-z]{1,20}\|>(system|user|assistant|tool)[^<]{0,99}<\|im_middle\|>"
        ),
    ),
    Template("<seed:bos>", re.compile(r"<seed:bos>([a-z]{1,40})\n")),
    Template("<|start_of_role|>", re.compile(r"<\|start_of_role\|>([a-z_]{1,40})[^<]{0,99}<\|end_of_role\|>")),
    Template("]~b]", re.compile(r"\]~b\]([a-z]{1,40})[^\n]{0,99}\n")),
)
_LINES = Template("", re.compile(r"\n[ \t]*+(system|user|assistant|tool|model)(?=\n)"), in_turn=True)
"""ChatML, Gemma and others without their special tokens."""
PLAIN = (_CHATML, _LINES)
"""Templates in which every message has its mark, and nothing else has one."""
_GLUED = Template(
    "",
    re.compile(r"\A(system|user)\n\n|(?<!\s)(assistant|ipython|tool)\n\n|(?<![\w\s])(user)\n\n"),
    quotes=True,
    in_turn=True,
)
"""Llama 3 without its special tokens."""
_UNMARKED = Template("", re.compile("<(/?tool_response)>"), complete=False)
"""GLM without its special tokens: only results are marked."""
_BEGINS_AS_LINES = re.compile(r"\s*+(?:system|user)\n")
_ENDS_AS_LINES = re.compile(r"(?:^|\n)[ \t]*(?:assistant|model)\n(?:<think>\s*(?:</think>\s*)?)?\Z")
_ENDS_GLUED = re.compile(r"\Sassistant\n\n(?:<think>\s*)?\Z")
_TAIL = 60
"""Characters at the end of a prompt in which the mark of the assistant is."""

_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<turn|>", "<|end|>",
    "</s>", "<｜end▁of▁sentence｜>", "<seed:eos>", "[e~[", "<|return|>", "<|call|>", "<|eot|>",
)  # fmt: skip
_MOST_ENDS = 3


def template_of(prompt: str, response: str) -> tuple[Template | None, str]:
    """The template of a conversation, and the response with the marks that can be put back. None: it is not known."""
    if prompt.endswith("\nassistant\n"):
        return _LINES, _in_lines(response)
    for template in _MARKED:
        if template.sign in prompt:
            return template, response
    tail = prompt[-_TAIL:]
    if _ENDS_GLUED.search(tail):
        return _GLUED, response
    if _BEGINS_AS_LINES.match(prompt) or _ENDS_AS_LINES.search(tail):
        # Gemma 4 calls without its special tokens have neither quotes nor ends.
        if "model\n" in tail and "}response:" in response:
            return None, response
        return _LINES, _in_lines(response)
    if tail.endswith("assistant") and _CHANNEL.match(response):
        return _HARMONY, _CHANNEL.sub(_channel, response)
    for template in _MARKED:
        if template.sign in response:
            return template, response
    if _LISTED_CALL.search(response):
        restored = _LISTED_CALL.sub("[TOOL_CALLS][", response)
        return _RESTORED_MISTRAL, _LISTED_RESULT.sub(r"[TOOL_RESULTS]\1[/TOOL_RESULTS]", restored)
    return (_UNMARKED if "<tool_response>" in response else None), response


def speeches_in(text: str, template: Template | None, first: Role) -> list[Speech]:
    """The messages of a text. `first`: who speaks before the first mark."""
    if template is None:
        return [Speech(first, text)] if text.strip() else []
    if template is _LINES:
        text = f"\n{text}"  # so that a mark at the very start follows a newline, like any other
    said: list[Speech] = []
    role, at = first, 0
    wrapped = False
    """Whether the current message is a result in tags: marks in it are text."""
    for mark in template.marks.finditer(text):
        name = mark[mark.lastindex or 0]
        following = _ROLES.get(name, Role.OTHER)
        if role in _UNOPENED if name.startswith("/") else (role, following) == (Role.OTHER, Role.TOOL):
            continue  # a closing tag without its opening one, or a result without a call
        if template.in_turn and (said or text[: mark.start()].strip()):
            if following not in _FOLLOWERS[role]:
                continue
            if wrapped and not text[max(at, mark.start() - _TAIL) : mark.start()].rstrip().endswith("</tool_response>"):
                continue
        said.append(Speech(role, _without_end(text[at : mark.start()])))
        role, at = following, mark.end()
        wrapped = text.startswith(_WRAPPED, at)
        if len(said) > MOST_SPEECHES:
            return [Speech(first, text)]
    said.append(Speech(role, _without_end(text[at:])))
    return [speech for speech in said if speech.text.strip()]


def _without_end(speech: str) -> str:
    """The speech without its end marks, if it has some."""
    for _ in range(_MOST_ENDS):
        bare = speech.rstrip()
        if not bare.endswith(_ENDS):
            break
        speech = next(bare.removesuffix(end) for end in _ENDS if bare.endswith(end)).rstrip()
    return speech


# Marks that can be put back -------------------------------------------------------------------------------------------

_CHANNEL = re.compile(
    r"(?P<tool>functions\.[\w.-]{1,99}) to=assistantcommentary"
    r"|(?:\A|assistant)commentary to=(?P<called>functions\.[\w.-]{1,99}) (?:json|code)?(?=\{)"
    r"|assistant to=(?P<named>functions\.[\w.-]{1,99}?)commentary ?(?:json|code)?(?=\{)"
    r"|(?:\A|assistant)(?P<channel>analysis|commentary|final)"
)
"""gpt-oss without its special tokens."""
_RESTORED_MISTRAL = Template("", _MISTRAL.marks, complete=False)
_LISTED_CALL = re.compile(r'\[(?=\{"name": "[^"\n]{1,200}", "arguments": \{)')
_LISTED_RESULT = re.compile(
    r'(?<=[\]}])(\{"content": (?:(?!"call_id"|\{"content": ).)*+"call_id": "[^"\n]{1,99}"\})', re.DOTALL
)
"""Mistral without its special tokens."""


def _in_lines(response: str) -> str:
    """Hermes 3 leaves out a line break."""
    return response.replace("</tool_response>assistant\n", "</tool_response>\nassistant\n")


def _channel(mark: re.Match[str]) -> str:
    if mark["tool"]:
        return f"<|start|>{mark['tool']} to=assistant<|channel|>commentary<|message|>"
    if called := mark["called"] or mark["named"]:
        return f"<|start|>assistant<|channel|>commentary to={called} <|constrain|>json<|message|>"
    return f"<|start|>assistant<|channel|>{mark['channel']}<|message|>"
