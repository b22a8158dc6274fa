"""Messages sent to /v1/match match exactly what the engine stored when it served them through its own endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from metatrie.indexer.models import ModelConfig
from metatrie.indexer.router import RouterConfig

OpenFront = Callable[..., Awaitable[Any]]
Eventually = Callable[..., Awaitable[None]]

TEXT = "the weather in Paris is what it was when tools were called 🌦️ e\u0301 <|im_end|> "
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    },
    {"type": "function", "function": {"strict": True, "description": "é", "name": "second"}},
]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris", "n": 1.0}'}}
USER = {"role": "user", "content": TEXT * 20}
CHATS: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [{"role": "system", "content": "be brief"}, USER], "tools": TOOLS},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": TEXT * 15}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": TEXT * 3},
        ],
        "tools": TOOLS[:1],
    },
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [USER], "add_generation_prompt": False},
    {
        "messages": [USER, {"role": "assistant", "content": "so far, "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {"messages": [USER], "add_special_tokens": True},
]


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("tokenizer", ["here", "engine"])
async def test_match_equals_what_the_engine_stored(
    open_front: OpenFront, eventually: Eventually, tokenizer_dir: str, tokenizer: str, chat: dict[str, Any]
) -> None:
    models = {"m": ModelConfig(tokenizer=tokenizer_dir)} if tokenizer == "here" else {}
    engine = {"tokenizer": tokenizer_dir, "block_size": 16}
    front = await open_front(engines=1, router=RouterConfig(models=models), engine=engine)
    (worker,) = front.engines
    body = {"model": "m", **chat}
    async with front.session.post(
        worker.address + "/v1/chat/completions", json={**body, "max_tokens": 1}
    ) as response:
        assert response.status == 200, await response.text()
        prompt_tokens = (await response.json())["usage"]["prompt_tokens"]

    async def stored() -> bool:
        _, answer, _ = await front.post("/v1/match", body)
        return bool(answer["replicas"][0]["matched_blocks"] == prompt_tokens // 16)

    await eventually(stored)
    _, answer, _ = await front.post("/v1/match", body)
    assert answer["prompt_tokens"] == prompt_tokens
    assert "note" not in answer
    # And served through the front door the engine finds what was predicted.
    _, completion, headers = await front.post("/v1/chat/completions", {**body, "max_tokens": 1})
    usage = completion["usage"]
    assert usage["prompt_tokens"] == prompt_tokens
    predicted = int(headers["X-Metatrie-Reusable-Tokens"])
    assert usage["prompt_tokens_details"]["cached_tokens"] == predicted > 0


@pytest.mark.parametrize("prompt", [TEXT * 10, list(range(100)), [TEXT * 10]])
async def test_prompts_too(open_front: OpenFront, eventually: Eventually, tokenizer_dir: str, prompt: Any) -> None:
    models = {"m": ModelConfig(tokenizer=tokenizer_dir)}
    front = await open_front(engines=1, router=RouterConfig(models=models), engine={"tokenizer": tokenizer_dir})
    body = {"model": "m", "prompt": prompt, "max_tokens": 1}

    async def predicted() -> bool:
        _, completion, headers = await front.post("/v1/completions", body)
        usage = completion["usage"]
        predicted = int(headers["X-Metatrie-Reusable-Tokens"])
        return bool(usage["prompt_tokens_details"]["cached_tokens"] == predicted > 0)

    await eventually(predicted)
