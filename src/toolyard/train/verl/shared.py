"""What trajectories in one event loop of a verl worker share.

verl creates an agent loop object per sample; the first one opens tools, rewards and the chat format for all.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import logging
import os
import socket
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolyard.chat.formats import open_format
from toolyard.chat.protocol import ChatFormat, Tokenizer
from toolyard.errors import ConfigError, RecordError, TaskError
from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.records.dump import DumpWriter
from toolyard.records.trajectory import Trajectory
from toolyard.rewards.registry import FinalReward, load_reward
from toolyard.rollout.interaction import BaseInteraction, load_interaction
from toolyard.tools.base import BaseTool
from toolyard.tools.registry import initialize_tools_from_config
from toolyard.train.verl.engine import ServerNotes
from toolyard.train.verl.settings import VerlSettings

_log = logging.getLogger(__name__)

_GROUPS = 4096
"""Maximum number of groups to remember."""
_EXIT_SECONDS = 5.0
Schemas = tuple[OpenAIFunctionToolSchema, ...]


@dataclass(slots=True)
class _Group:
    begun: int = 0
    scores: list[float] = field(default_factory=list[float])


class Groups:
    """The samples of each prompt in this process; verl may spread a group over its workers."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Group] = OrderedDict()

    def _of(self, name: str) -> _Group:
        found = self._known[name] = self._known.pop(name, None) or _Group()
        while len(self._known) > _GROUPS:
            self._known.popitem(last=False)
        return found

    def join(self, name: str) -> int:
        """The index of a new sample in its group."""
        group = self._of(name)
        group.begun += 1
        return group.begun - 1

    def scored(self, name: str, score: float) -> None:
        self._of(name).scores.append(score)

    def mean(self, name: str) -> float | None:
        """The mean of the scores so far; None if there are none."""
        scores = self._of(name).scores
        return sum(scores) / len(scores) if scores else None


@dataclass(slots=True)
class Seen:
    """Values that servers reported for other trajectories, for those that fail before an answer: verl makes one array
    of a whole batch and breaks on missing values. Empty before the first answer in this process."""

    newest: int | None = None
    speculated: dict[str, int] = field(default_factory=dict[str, int])
    experts: Any = None
    """A placeholder for one token."""

    def take(self, notes: ServerNotes) -> None:
        self.newest = self.newest if notes.newest is None else notes.newest
        self.speculated |= dict.fromkeys(notes.speculated, 0)
        if notes.experts is not None and len(notes.experts):
            self.experts = notes.experts[:1] * 0


@dataclass(slots=True)
class Opened:
    """The opened parts, created by `open_here`."""

    settings: VerlSettings
    verl_tokenizer: Any
    chat: ChatFormat
    tools: Mapping[str, BaseTool]
    schemas: Schemas
    reward: FinalReward | None
    interaction: BaseInteraction | None
    filler: int
    """The token for empty prompts and responses."""
    groups: Groups = field(default_factory=Groups)
    seen: Seen = field(default_factory=Seen)

    def select(self, names: Sequence[str] | None) -> tuple[Mapping[str, BaseTool], Schemas]:
        """The tools that a row selects; all of them if it selects none.

        Raises:
            TaskError: a selected tool does not exist.
        """
        if not names:
            return self.tools, self.schemas
        unknown = [name for name in names if name not in self.tools]
        if unknown:
            known = ", ".join(self.tools) or "none"
            raise TaskError(f"extra_info.tool_selection: there is no tool {unknown[0]!r}; known tools: {known}")
        tools = {name: self.tools[name] for name in names}
        return tools, tuple(tool.get_openai_tool_schema() for tool in tools.values())

    async def close(self) -> None:
        for part in (*self.tools.values(), *([] if self.reward is None else [self.reward])):
            try:
                await part.close()
            except Exception:
                _log.exception("%s could not be closed", part.name)


# Opening --------------------------------------------------------------------------------------------------------------

_by_loop: dict[asyncio.AbstractEventLoop, dict[tuple[str, int], Opened]] = {}


def open_here(settings: VerlSettings, tokenizer: Any) -> Opened:
    """Open the parts for the running event loop, or return those already open. It blocks the loop, since no trajectory
    can start before it is done.

    Raises:
        ConfigError: the settings, or a file that they name, are invalid.
        ToolError: an MCP server does not answer; safe to retry.
    """
    loop = asyncio.get_running_loop()
    for ended in [other for other in _by_loop if other.is_closed()]:
        del _by_loop[ended]  # parts cannot be closed without their loop; their processes end on their own
    known = _by_loop.setdefault(loop, {})
    key = settings.model_dump_json(), id(tokenizer)  # the id stays valid, since `Opened` keeps the tokenizer
    if key not in known:
        known[key] = _open(settings, tokenizer)
    return known[key]


def _open(settings: VerlSettings, tokenizer: Any) -> Opened:
    chat = settings.chat
    opened_chat = open_format(
        own_tokenizer(tokenizer),
        format=chat.format,
        chat_template=chat.chat_template,
        tool_role=chat.tool_role,
        tool_wrapper=chat.tool_wrapper,
        template_kwargs=chat.template_kwargs,
        syntax_options=chat.syntax_options,
    )
    reward = load_reward(settings.reward, settings.reward_options)
    interaction = None
    if settings.interaction is not None:
        interaction = load_interaction(settings.interaction.class_name, settings.interaction.config)
    path = settings.tool_config_path
    tools: list[BaseTool] = []
    if path is not None:
        for folder in (os.getcwd(), str(Path(path).absolute().parent)):
            if folder not in sys.path:
                sys.path.append(folder)  # last, so that a json.py there does not shadow the standard library
        tools = initialize_tools_from_config(path)
    fillers = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return Opened(
        settings=settings,
        verl_tokenizer=tokenizer,
        chat=opened_chat,
        tools={tool.name: tool for tool in tools},
        schemas=tuple(tool.get_openai_tool_schema() for tool in tools),
        reward=reward,
        interaction=interaction,
        filler=next(int(token) for token in fillers if token is not None),
    )


def own_tokenizer(found: Any) -> Tokenizer:
    """Wrap verl's tokenizer, an object of `transformers`.

    Raises:
        ConfigError: it is not a tokenizer of `transformers`.
    """
    from toolyard.chat.tokenizers.fast import FastTokenizer, choose_templates, named_tokens, stop_tokens_of
    from toolyard.chat.tokenizers.transformers import PythonTokenizer

    try:
        name = str(found.name_or_path)
        variables = named_tokens({key: str(value) for key, value in found.special_tokens_map.items()})
        template, plain = choose_templates(found.chat_template)
        if not getattr(found, "is_fast", False):
            return PythonTokenizer(found, name=name, chat_template=template, variables=variables)
        # A copy: padding and truncation are state of the tokenizer, which verl changes.
        backend = copy.deepcopy(found.backend_tokenizer)
    except AttributeError as error:
        raise ConfigError(f"verl's tokenizer is a {type(found).__name__}, not one of transformers: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    stops = stop_tokens_of(Path(name, "generation_config.json"))
    return FastTokenizer(
        backend,
        name=name,
        chat_template=template,
        plain_template=plain,
        variables=variables,
        stop_token_ids=stops,
    )


# The dump -------------------------------------------------------------------------------------------------------------

_dumps: dict[str, DumpWriter] = {}
"""This process's writers by folder; they are not tied to an event loop."""


async def dump(folder: str, trajectory: Trajectory) -> None:
    """Append a trajectory to this process's subfolder of `folder`. Errors are only logged: the sample is not lost."""
    try:
        writer = _dumps.get(folder)
        if writer is None:
            writer = DumpWriter(Path(folder, f"{socket.gethostname()}-{os.getpid()}"))
            await writer.__aenter__()  # does not suspend, so no other task can run in between
            _dumps[folder] = writer
        await writer.write(trajectory)
    except (RecordError, OSError) as error:
        _log.warning("rollout_data_dir %r: request %s was not dumped: %s", folder, trajectory.request_id, error)


# Closing --------------------------------------------------------------------------------------------------------------


async def close() -> None:
    """Close the parts opened for the running event loop, and this process's dump. The next sample opens them again."""
    for opened in _by_loop.pop(asyncio.get_running_loop(), {}).values():
        await opened.close()
    while _dumps:
        await _dumps.popitem()[1].close()


def _close_at_exit() -> None:
    """Close the parts of loops that can still run: verl's own run in a thread."""
    for loop in list(_by_loop):
        with contextlib.suppress(Exception):
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(close(), loop).result(_EXIT_SECONDS)
            elif not loop.is_closed():
                loop.run_until_complete(asyncio.wait_for(close(), _EXIT_SECONDS))


def _forget() -> None:
    """In a forked child no loop runs, and the open parts belong to the parent."""
    _by_loop.clear()
    _dumps.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(_close_at_exit)
