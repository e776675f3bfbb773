"""Opens the parts of a run from its settings: engine, chat format, tools, rewards, tasks. Heavy dependencies are
imported here, only when the settings need them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from toolyard.chat.formats import open_format
from toolyard.chat.protocol import ChatFormat, Tokenizer
from toolyard.chat.tokenizers.opening import load_tokenizer
from toolyard.engines.models import DEFAULT_MODEL, need_packages, resolve_model
from toolyard.engines.protocol import ChatEngine, Engine, Sampling
from toolyard.errors import ConfigError
from toolyard.messages import JSON, Message, OpenAIFunctionToolSchema
from toolyard.records.tape import Tape
from toolyard.rewards.registry import load_reward
from toolyard.rollout.admission import Loads
from toolyard.rollout.config import AgentConfig, RolloutConfig
from toolyard.rollout.fingerprint import task_digest
from toolyard.rollout.interaction import load_interaction
from toolyard.rollout.play.play import ANSWER
from toolyard.rollout.play.setting import AgentSetting, Setting
from toolyard.rollout.play.speaker import MessageSpeaker, Speaker, TokenSpeaker
from toolyard.rollout.request import AsyncRolloutRequest, create_request, request_id_of
from toolyard.tasks.files import BadRow, open_tasks
from toolyard.tasks.protocol import Task
from toolyard.tools.base import BaseTool
from toolyard.tools.code_interpreter.tool import SandboxFusionTool
from toolyard.tools.registry import initialize_tools_from_config
from toolyard.turns import EngineAnswer

if TYPE_CHECKING:
    from toolyard.engines.http.client import HttpOptions
    from toolyard.engines.http.sglang import SglangEngine
    from toolyard.rollout.faults.inject import Faults

Note = Callable[[str], None]
_TURN_START = 3
"""Tokens before an assistant's turn that tell it from a user's with the same text."""
_TAKE_IMAGES = frozenset({"sglang", "vllm", "scripted", "replay"})
"""Token engines that accept images with the prompt. The scripted and replay engines ignore them."""


@dataclass(frozen=True, slots=True)
class OpenedRollout:
    """Everything a run needs, opened and ready."""

    setting: Setting
    tool_schemas: tuple[OpenAIFunctionToolSchema, ...]


@asynccontextmanager
async def open_rollout(
    config: RolloutConfig,
    *,
    tape: Tape | None = None,
    note: Note = lambda _: None,
    stage: Note = lambda _: None,
    engine_urls: Sequence[str] | None = None,
    faults: Faults | None = None,
) -> AsyncGenerator[OpenedRollout]:
    """Open the parts that `config` names and close them at the end. With a `tape`, no engine and no tools are opened.
    With `faults`, engine and tools have them; the calls of requests must go through `Faults.calls`.

    `note` is called with messages, `stage` with what is being opened, possibly in another thread.
    `engine_urls`: what `engine.directory` contains, if the caller watches it.

    Raises:
        ConfigError, ToolError, EngineError: a setting is invalid, or a part cannot be opened.
    """
    find_users_modules(config)
    stage("loading rewards and tools")
    reward = load_reward(config.rewards.final, config.rewards.options)
    interaction = None
    if config.interaction is not None:
        interaction = load_interaction(config.interaction.class_name, config.interaction.config)
    async with AsyncExitStack() as stack:
        if reward is not None:
            stack.push_async_callback(reward.close)
        tools: Mapping[str, BaseTool] = {}
        if tape is None and config.agent is None:
            tools = {tool.name: tool for tool in _open_tools(config)}
            for tool in tools.values():
                stack.push_async_callback(tool.close)
            schemas = tuple(tool.get_openai_tool_schema() for tool in tools.values())
            if faults is not None:
                faults.take_over(tools.values())
        elif tape is None:
            schemas = ()  # an agent has its own
        else:
            schemas = tuple(map(OpenAIFunctionToolSchema.model_validate, tape.meta.get("tool_schemas", ())))
        if config.engine.directory is not None and tape is None:
            config = await _with_directory(config, config.engine.directory, engine_urls)
        speaker = await _open_speaker(config, stack, tape, schemas, stage, faults)
        if speaker.servers is not None and engine_urls is None:
            _follow_directory(config, speaker.servers.set_urls, note, stack)
        loads = _loads(config, speaker) if config.adaptive_concurrency and tape is None else None
        setting = Setting(speaker, tools, config.limits, reward, config.rewards.weights, interaction, loads)
        model = config.engine.model or DEFAULT_MODEL
        replay = tape is not None
        async with with_agent(setting, config.agent, config.sampling, model=model, replay=replay) as complete:
            yield OpenedRollout(complete, schemas)


@asynccontextmanager
async def with_agent(
    setting: Setting, agent: AgentConfig | None, sampling: Sampling, *, model: str = DEFAULT_MODEL, replay: bool = False
) -> AsyncGenerator[Setting]:
    """The setting with an agent, if there is one, and the gateway that it talks to. In a `replay`, neither is opened.

    Raises:
        ConfigError: there is no such agent, or other settings do not go with one.
    """
    if agent is None:
        yield setting
        return
    speaker, limits = setting.speaker, setting.limits
    if not isinstance(speaker, TokenSpeaker):
        raise ConfigError("agent: engine.kind 'openai' does not return tokens; use transformers, sglang or vllm")
    if replay:
        yield replace(setting, agent=AgentSetting(None, None, speaker.chat, agent.score_from))
        return
    from toolyard.gateway.config import GatewayConfig
    from toolyard.gateway.server import open_gateway
    from toolyard.rollout.agent.run import Agent, open_agent
    from toolyard.rollout.agent.sandboxed import open_sandboxed_agent

    assert speaker.engine is not None
    serving = GatewayConfig(
        port=0,
        tokens=(secrets.token_urlsafe(16),),  # known to nobody: each session has a key of its own
        open_sessions=False,
        max_sessions=1_000_000,  # bounded by the run's concurrency
        sampling=sampling,
        fixed_sampling=agent.fixed_sampling,
        generate_seconds=limits.generate_seconds,
        engine_retries=limits.engine_retries,
        engine_retry_pause_seconds=limits.engine_retry_pause_seconds,
        grace_seconds=1.0,
    )
    async with AsyncExitStack() as stack:
        opened: Agent | None = None
        if agent.sandbox is None:
            opened = open_agent(agent.run, agent.env, agent.cwd)
        gateway = await stack.enter_async_context(
            open_gateway(serving, speaker.engine, speaker.chat, speaker.tokenizer, model=model)
        )
        if agent.sandbox is not None:
            opened = await stack.enter_async_context(open_sandboxed_agent(agent, agent.sandbox, gateway.address))
        agents = AgentSetting(opened, gateway, speaker.chat, agent.score_from, agent.grace_seconds)
        yield replace(setting, agent=agents)


def planned(config: RolloutConfig, note: Note = lambda _: None) -> dict[str, str]:
    """The ids of all requests, with digests of their tasks. Reads all tasks, so that a bad one is found before the
    first request runs.

    Raises:
        ConfigError, TaskError: there are no tasks, or one is invalid.
    """
    tasks = tasks_of(config, lambda bad: note(f"skipped: {bad}"))
    ids: dict[str, str] = {}
    for task in tasks:
        digest = task_digest(task)
        ids |= {request_id_of(task.id, offset, config.step): digest for offset in range(config.n)}
    if not ids:
        raise ConfigError(f"tasks {config.tasks.path!r}: the file has no tasks")
    return ids


def requests_of(
    config: RolloutConfig, tool_schemas: Sequence[OpenAIFunctionToolSchema], wanted: Collection[str]
) -> Iterator[AsyncRolloutRequest]:
    """The requests whose ids are in `wanted`, created lazily; groups stay together."""
    for task in tasks_of(config):
        for offset in range(config.n):
            if request_id_of(task.id, offset, config.step) in wanted:
                yield create_request(task, offset, tool_schemas=tool_schemas, step=config.step, seed=config.seed)


async def schemas_of(config: RolloutConfig) -> list[OpenAIFunctionToolSchema]:
    """The schemas of the tools, which are opened and closed again."""
    find_users_modules(config)
    tools = _open_tools(config)
    schemas = [tool.get_openai_tool_schema() for tool in tools]
    for tool in tools:
        await tool.close()
    return schemas


# Tasks ----------------------------------------------------------------------------------------------------------------


def tasks_of(config: RolloutConfig, report: Callable[[BadRow], object] | None = None) -> Iterator[Task]:
    """The tasks of a run, one by one, with the additions of `config.prompt`.

    Raises:
        ConfigError, TaskError: the file does not exist, or a row is invalid.
    """
    prompt = config.prompt
    examples = tuple(_example(index, said) for index, said in enumerate(prompt.examples))
    reader = open_tasks(
        config.tasks.path,
        limit=config.tasks.limit,
        on_bad_row="skip" if config.tasks.skip_bad_rows else "raise",
        report=report,
        system=prompt.system,
        instruction=prompt.instruction,
        fields=config.tasks.fields,
    )
    for task in reader:
        if not examples:
            yield task
            continue
        first = 1 if task.messages[0].role == "system" else 0
        yield replace(task, messages=(*task.messages[:first], *examples, *task.messages[first:]))


def prompt_additions(config: RolloutConfig) -> str:
    """Describe what `config.prompt` adds to every task; empty if tasks are played unchanged."""
    prompt = config.prompt
    parts = [
        f"the system message {_in_short(prompt.system)}" if prompt.system is not None else "",
        f"{len(prompt.examples)} messages of worked examples" if prompt.examples else "",
        f"the instruction {_in_short(prompt.instruction)} at its end" if prompt.instruction is not None else "",
    ]
    return ", ".join(part for part in parts if part)


def _in_short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


def _example(index: int, said: Mapping[str, Any]) -> Message:
    try:
        return Message.from_openai(said)
    except ValueError as error:
        raise ConfigError(f"prompt.examples[{index}]: {error}") from None


# Tools ----------------------------------------------------------------------------------------------------------------


def _open_tools(config: RolloutConfig) -> list[BaseTool]:
    if config.tools is None:
        return [SandboxFusionTool({"type": "native"}, None)]
    return initialize_tools_from_config(config.tools)


def find_users_modules(config: RolloutConfig) -> None:
    """Make modules beside the tools file, and in the working directory, importable."""
    folders = [os.getcwd()]
    if config.tools is not None:
        folders.append(str(Path(config.tools).absolute().parent))
    for folder in folders:
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that a json.py there does not shadow the standard library


# Engines --------------------------------------------------------------------------------------------------------------


async def _open_speaker(
    config: RolloutConfig,
    stack: AsyncExitStack,
    tape: Tape | None,
    schemas: Sequence[OpenAIFunctionToolSchema],
    stage: Note,
    faults: Faults | None,
) -> Speaker:
    engine = config.engine
    if faults is not None and tape is None and engine.urls:
        from toolyard.rollout.faults.proxy import engine_proxy

        urls = await stack.enter_async_context(engine_proxy(faults, engine.kind, engine.urls))
        engine = engine.model_copy(update={"urls": urls})
        config = config.model_copy(update={"engine": engine})
    if engine.adapter is not None and engine.kind != "transformers":
        raise ConfigError(f"engine.adapter {engine.adapter!r}: only transformers can merge one, not {engine.kind}")
    if engine.kind == "openai":
        hides = _hides_images(config, None)
        if tape is not None:
            return MessageSpeaker(None, config.sampling, config.limits, hides_images=hides)
        from toolyard.engines.http.openai import OpenaiEngine

        opened: ChatEngine = OpenaiEngine(_urls(config), model=engine.model, **_http(config))
        ready = await stack.enter_async_context(opened)
        return MessageSpeaker(ready, config.sampling, config.limits, hides_images=hides)
    if engine.kind == "transformers" and tape is None:
        need_packages(otherwise="sample from a server: --engine openai --url URL --model NAME")
    known = await _open_model(config, stage)
    tell, hides = config.chat.near_miss == "tell", _hides_images(config, known.chat)
    if tape is not None:
        return TokenSpeaker(None, known.chat, config.sampling, config.limits, tell_near_misses=tell, hides_images=hides)
    _refuse_tools_that_are_not_offered(config, known.chat, schemas)
    return TokenSpeaker(
        await _enter_engine(config, known, stack, stage),
        known.chat,
        config.sampling,
        config.limits,
        tell_near_misses=tell,
        hides_images=hides,
        before_attempt=None if faults is None or engine.urls else faults.before_attempt,
        tokenizer=known.tokenizer,
    )


class _KnownModel(NamedTuple):
    name: str
    place: Path | str
    tokenizer: Tokenizer
    chat: ChatFormat


async def _open_model(config: RolloutConfig, stage: Note) -> _KnownModel:
    name = config.engine.model or DEFAULT_MODEL
    # In threads, since each of these may take a minute: the event loop must hear of Ctrl-C.
    stage(f"looking for the model {name}")
    model = await asyncio.to_thread(resolve_model, name, progress=stage)
    stage(f"loading the tokenizer of {name}")
    tokenizer = await asyncio.to_thread(load_tokenizer, model)
    chat = open_format(
        tokenizer,
        format=config.chat.format,
        chat_template=config.chat.chat_template,
        tool_role=config.chat.tool_role,
        tool_wrapper=config.chat.tool_wrapper,
        template_kwargs=config.chat.template_kwargs,
        syntax_options=config.chat.syntax_options,
    )
    return _KnownModel(name, model, tokenizer, chat)


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine by itself, with what is needed to talk to it."""

    name: str
    engine: Engine
    chat: ChatFormat
    tokenizer: Tokenizer


async def open_token_engine(config: RolloutConfig, stack: AsyncExitStack, stage: Note) -> OpenedEngine:
    """Open the engine of `config`, without tools and rewards; leaving `stack` closes it.

    Raises:
        ConfigError, EngineError: a setting is invalid, or it cannot be opened.
    """
    if config.engine.kind == "openai":
        raise ConfigError("engine.kind 'openai' does not return tokens; use transformers, sglang or vllm")
    if config.engine.kind == "transformers":
        need_packages(otherwise="sample from a server: --engine vllm --url URL --model NAME")
    if config.engine.directory is not None:
        config = await _with_directory(config, config.engine.directory, None)
    known = await _open_model(config, stage)
    return OpenedEngine(known.name, await _enter_engine(config, known, stack, stage), known.chat, known.tokenizer)


async def _enter_engine(config: RolloutConfig, known: _KnownModel, stack: AsyncExitStack, stage: Note) -> Engine:
    kind = config.engine.kind
    if kind == "transformers":
        stage("importing torch and transformers")
        await asyncio.to_thread(import_module, "toolyard.engines.transformers.engine")
    stage(f"loading {known.name}" if kind == "transformers" else f"opening the engine {kind}")
    return await stack.enter_async_context(_token_engine(config, known.place, known.tokenizer, known.chat))


def _hides_images(config: RolloutConfig, chat: ChatFormat | None) -> str:
    """Why the model does not see its tools' images; empty if it does. Depends on the settings alone, so a replay
    decides the same."""
    kind, wanted = config.engine.kind, config.chat.images
    if wanted == "hide":
        return "chat.images is hide"
    if chat is None:
        return "" if wanted == "show" else "chat.images is auto, and the server may not accept images"
    why = "" if kind in _TAKE_IMAGES else f"the engine {kind} does not accept images"
    if chat.image_token_id is None:
        why = f"the format {chat.name} has no place for images"
    if why and wanted == "show":
        raise ConfigError(f"chat.images: show: {why}")
    return why


def _refuse_tools_that_are_not_offered(
    config: RolloutConfig, chat: ChatFormat, schemas: Sequence[OpenAIFunctionToolSchema]
) -> None:
    """A tool missing from the prompt would look useless in the summary."""
    silent = chat.unoffered(schemas)
    if silent:
        told = "; ".join(f"{name}: {why}" for name, why in silent.items())
        raise ConfigError(
            f"tools {config.tools or '(defaults)'}: the format {chat.name} cannot offer all of them to the model; "
            f"{told}. Choose another --format, or remove them from the file"
        )


def _token_engine(config: RolloutConfig, model: Path | str, tokenizer: Tokenizer, chat: ChatFormat) -> Engine:
    engine = config.engine
    match engine.kind:
        case "transformers":
            from toolyard.engines.transformers.engine import TransformersEngine

            return TransformersEngine(
                model,
                adapter=engine.adapter,
                device=engine.device,
                dtype=engine.dtype,
                torch_compile=engine.torch_compile,
                max_batch_size=engine.max_batch_size,
            )
        case "sglang":
            return _sglang(config)
        case "vllm":
            from toolyard.engines.http.vllm import VllmEngine

            return VllmEngine(_urls(config), **_http(config))
        case "scripted":
            return _scripted(config, tokenizer, chat)
        case "replay":
            return _replaying(engine.tape)
        case "openai":
            raise AssertionError(engine.kind)


@asynccontextmanager
async def open_sglang(config: RolloutConfig, note: Callable[[str], None]) -> AsyncGenerator[SglangEngine]:
    """SGLang's servers, for whoever only gives them weights.

    Raises:
        ConfigError: the settings have no URL, or the engine directory cannot be read.
    """
    async with AsyncExitStack() as stack:
        if config.engine.directory is not None:
            config = await _with_directory(config, config.engine.directory, None)
        engine = await stack.enter_async_context(_sglang(config))
        _follow_directory(config, engine.set_urls, note, stack)
        yield engine


def _sglang(config: RolloutConfig) -> SglangEngine:
    from toolyard.engines.http.sglang import SglangEngine

    return SglangEngine(_urls(config), **_http(config))


def _http(config: RolloutConfig) -> HttpOptions:
    engine = config.engine
    return {
        "api_key": None if engine.api_key is None else engine.api_key.get_secret_value(),
        "request_timeout": engine.request_timeout_seconds,
        "silence_seconds": engine.silence_seconds,
        "waits_for_servers": engine.directory is not None,
    }


def _urls(config: RolloutConfig) -> tuple[str, ...]:
    if not config.engine.urls and config.engine.directory is None:
        raise ConfigError(
            f"engine.urls: {config.engine.kind} needs a server URL, for example --url http://127.0.0.1:30000"
        )
    return config.engine.urls


async def _with_directory(config: RolloutConfig, path: str, urls: Sequence[str] | None) -> RolloutConfig:
    """The config with the URLs of its engine directory, or with `urls`."""
    if not config.engine.has_servers:
        raise ConfigError(f"engine.directory {path!r}: {config.engine.kind} has no servers")
    if config.engine.urls:
        raise ConfigError(f"engine.directory {path!r}: engine.urls is set, too; choose one")
    from toolyard.engines.http.directory import read_directory

    found = await asyncio.to_thread(read_directory, path) if urls is None else tuple(urls)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"urls": found})})


def _follow_directory(
    config: RolloutConfig, change: Callable[[Sequence[str]], None], note: Callable[[str], None], stack: AsyncExitStack
) -> None:
    """Call `change` until the end of `stack`, whenever the engine directory changes, if there is one."""
    if config.engine.directory is not None:
        from toolyard.engines.http.directory import watch_directory

        watch = watch_directory(config.engine.directory, config.engine.urls, change, note)
        stack.push_async_callback(_end, asyncio.create_task(watch))


def _loads(config: RolloutConfig, speaker: Speaker) -> Loads:
    if speaker.servers is None:
        raise ConfigError(f"adaptive_concurrency: {config.engine.kind} has no servers that report their load")
    return speaker.servers.loads


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _scripted(config: RolloutConfig, tokenizer: Tokenizer, chat: ChatFormat) -> Engine:
    from toolyard.engines.scripted import Line, ScriptedEngine

    place = config.engine.script
    if place is None:
        raise ConfigError("engine.script: the scripted engine needs a JSON file of messages; set engine.script")
    try:
        found: Any = json.loads(Path(place).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"engine.script {place!r}: {error}") from None
    if not _is_script(found):
        raise ConfigError(f"engine.script {place!r}: expected a list of strings, or an object of such lists by task id")
    by_task = cast("dict[str, list[str]]", found) if isinstance(found, dict) else {}
    every = cast("list[str]", [] if by_task else found)
    ids = {
        request_id_of(task.id, offset, config.step): task.id
        for task in (tasks_of(config) if by_task else ())
        for offset in range(config.n)
    }
    stop = list(chat.stop_token_ids[:1])

    def say(request_id: str, _: int, prompt: Sequence[int]) -> Line:
        turns = every or by_task.get(ids.get(request_id, ""), [])
        start = list(prompt[-_TURN_START:])
        said, at = 0, 0
        for text in turns:
            # What was said is in the prompt. Counting calls would not do: another machine may continue a request.
            line = [*tokenizer.encode(text), *stop]
            at = _find(prompt, [*start, *line], at)
            if at < 0:
                return line
            said, at = said + 1, at + len(line)
        return ConfigError(f"engine.script {place!r} has no turn {said + 1} for task {ids.get(request_id, '?')!r}")

    return ScriptedEngine(say, decode=tokenizer.decode)


def _find(ids: Sequence[int], part: Sequence[int], first: int) -> int:
    """Where `part` begins in `ids`, at `first` or later; -1 if it is not there."""
    ids, part = list(ids), list(part)
    return next((at for at in range(first, len(ids) - len(part) + 1) if ids[at : at + len(part)] == part), -1)


def _is_script(found: Any) -> bool:
    def is_turns(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(text, str) for text in cast("list[Any]", value))

    return is_turns(found) or (isinstance(found, dict) and all(map(is_turns, cast("JSON", found).values())))


def _replaying(place: str | None) -> Engine:
    from toolyard.engines.replay import RecordedGeneration, ReplayEngine

    if place is None:
        raise ConfigError("engine.tape: the replay engine needs a tape; set engine.tape")
    tape = Tape.read(place)
    recorded: dict[str, list[RecordedGeneration]] = {}
    for request_id in tape.request_ids:
        for entry in tape.entries(request_id):
            answer = ANSWER.validate_python(entry.got["answer"]) if entry.kind == "sampled" else None
            if isinstance(answer, EngineAnswer):
                asked = entry.asked
                said = RecordedGeneration(asked["prompt_crc"], asked["prompt_tokens"], answer.generation)
                recorded.setdefault(request_id, []).append(said)
    return ReplayEngine(recorded)
