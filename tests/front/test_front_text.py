"""Text to token ids: cached equals uncached, whatever the text; messages as engines hand them to templates."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metatrie.indexer.models import ModelConfig, Models
from metatrie.indexer.text import PieceCache, TextTokenize
from metatrie.indexer.tokenize import EngineTokenize
from metatrie.proto.api import PromptRequest
from metatrie.proto.errors import ConfigError, InvalidField, TooManyRequests
from metatrie.proto.text import ByteText, ChatPrompt, HFText, conversation, media_at, render, tool_dicts

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</think>"]
NEARLY = ["<|im_", "<|im_start", "|>", "<", "<|im_end|><|im_start|>", " <|im_end|>", "<|im_start|>user\n", "e\u0301"]
TEXT = st.lists(
    st.sampled_from(SPECIAL + NEARLY)
    | st.text(max_size=8)
    | st.sampled_from(["\n\n", "  ", "\u00a0", "weather", "🌦️"])
).map("".join)


@pytest.fixture(scope="module")
def hf(tokenizer_dir: str) -> HFText:
    return HFText(tokenizer_dir)


@settings(deadline=None, max_examples=300)
@given(st.lists(TEXT, min_size=1, max_size=4), st.booleans())
def test_cached_ids_are_the_uncached_ones(hf: HFText, texts: list[str], special: bool) -> None:
    cache = PieceCache()
    for text in [*texts, "".join(texts), *texts]:
        expected = hf.encode(text, add_special_tokens=special)
        assert cache.encode(hf, text, add_special_tokens=special) == expected


@settings(deadline=None)
@given(TEXT)
def test_pieces_are_the_text_and_begin_with_a_token(hf: HFText, text: str) -> None:
    for tokenizer in (hf, ByteText()):
        pieces = tokenizer.split(text)
        assert "".join(pieces) == text
        assert all(any(piece.startswith(token) for token in SPECIAL) for piece in pieces[1:])
        ids = [token for piece in tokenizer.encode_pieces(pieces) for token in piece]
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def awkward_tokenizer(kind: str) -> Any:
    """Tokenizers in which cutting at every added token would be wrong."""
    tk = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["<unk>", "▁a", "a", "▁", "b", "▁b", "A", "B"])}
    tokenizer = tk.Tokenizer(tk.models.WordLevel(words, unk_token="<unk>"))
    options: dict[str, Any] = {"normalized": False}
    match kind:
        case "lstrip" | "rstrip" | "single_word":
            options[kind] = True
        case "normalized":
            options["normalized"] = True
            tokenizer.normalizer = tk.normalizers.Sequence([tk.normalizers.Lowercase(), tk.normalizers.Strip()])
    first = kind == "metaspace_first"
    tokenizer.pre_tokenizer = tk.pre_tokenizers.Metaspace(prepend_scheme="first" if first else "always")
    longer = [tk.AddedToken(text, normalized=False) for text in ("<X>Y", "<X><X>")]
    tokenizer.add_tokens([tk.AddedToken("<X>", **options), *longer])
    tokenizer.post_processor = tk.processors.TemplateProcessing(single="<X> $A <X>", special_tokens=[("<X>", 8)])
    return tokenizer


@pytest.mark.parametrize("kind", ["plain", "lstrip", "rstrip", "single_word", "normalized", "metaspace_first"])
def test_tokens_that_depend_on_their_neighbours_are_no_cuts(tmp_path: Path, kind: str) -> None:
    awkward_tokenizer(kind).save(str(tmp_path / "tokenizer.json"))
    tokenizer = HFText(str(tmp_path))

    @settings(deadline=None, max_examples=150)
    @given(st.lists(st.sampled_from(["<X>", "<X>", "<X>Y", "a", " ", "\n", "A", "<X"])).map("".join), st.booleans())
    def same(text: str, special: bool) -> None:
        cache = PieceCache()
        for part in (text[: len(text) // 2], text):
            expected = tokenizer.encode(part, add_special_tokens=special)
            assert cache.encode(tokenizer, part, add_special_tokens=special) == expected

    same()


def test_a_turn_costs_only_what_is_new(hf: HFText) -> None:
    cache = PieceCache()
    messages: list[dict[str, Any]] = []
    for turn in range(10):
        messages += [{"role": "user", "content": f"turn {turn}"}, {"role": "assistant", "content": f"answer {turn}"}]
        text = render(hf, ChatPrompt(messages=messages, add_generation_prompt=False))
        before = cache.misses
        assert cache.encode(hf, text, add_special_tokens=False) == hf.encode(text, add_special_tokens=False)
        assert cache.misses - before <= 4
    assert cache.hits > 100


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(hf: HFText) -> None:
    cache = PieceCache(max_bytes=8000)
    for i in range(100):
        cache.encode(hf, f"<|im_start|>{i}", add_special_tokens=False)
        assert cache.bytes <= 8000
    misses = cache.misses
    cache.encode(hf, "<|im_start|>99", add_special_tokens=False)
    assert cache.misses == misses
    cache.encode(hf, "<|im_start|>0", add_special_tokens=False)
    assert cache.misses == misses + 1
    cache.encode(hf, "x" * 5000, add_special_tokens=False)
    assert cache.bytes <= 8000


def test_scopes_do_not_see_each_others_pieces(hf: HFText) -> None:
    cache = PieceCache()
    for scope in ("one", "two"):
        before = cache.hits
        cache.encode(hf, "<|im_start|>secret", add_special_tokens=False, scope=scope)
        assert cache.hits == before


def test_a_lone_surrogate_is_refused(hf: HFText) -> None:
    with pytest.raises(InvalidField):
        hf.encode("\ud800")
    with pytest.raises(InvalidField):
        PieceCache().encode(hf, "<|im_start|>\ud800", add_special_tokens=False)


# Messages


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [true]}'}}


def test_messages_are_brought_into_the_form_templates_expect() -> None:
    found = conversation(
        [
            {"role": "system", "content": None, "name": "n", "extra": 1},
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]},
            {"role": "assistant", "content": "x", "tool_calls": [CALL], "reasoning_content": "r"},
            {"role": "assistant", "content": "x", "tool_calls": []},
            {"role": "tool", "content": "y", "tool_call_id": "1"},
        ],
        "string",
    )
    parsed = {"name": "f", "arguments": {"b": 1, "a": [True]}}
    assert found == [
        {"role": "system", "content": "", "name": "n"},
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": "x",
            "tool_calls": [{**CALL, "function": parsed}],
            "reasoning": "r",
            "reasoning_content": "r",
        },
        {"role": "assistant", "content": "x"},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ]
    assert CALL["function"]["arguments"] == '{"b": 1, "a": [true]}'  # type: ignore[index]  # the caller's own
    parts = conversation([{"role": "user", "content": "a"}], "openai")
    assert parts[0]["content"] == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    "messages",
    [
        [{"content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ],
)
def test_messages_an_engine_refuses_are_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidField):
        conversation(messages, "string")


def test_tools_get_their_declared_fields_first() -> None:
    (tool,) = tool_dicts([{"function": {"strict": True, "parameters": {"z": 1}, "name": "f"}, "type": "function"}])
    assert json.dumps(tool) == (
        '{"type": "function", "function": {"name": "f", "description": null, "parameters": {"z": 1}, "strict": true}}'
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}", "openai"),
        (
            "{% for m in messages %}{% set c = m.content %}{% for part in c | list %}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "string"),
    ],
)
def test_the_content_format_is_read_off_the_template(
    tokenizer_dir: str, tmp_path: Path, template: str, expected: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((Path(tokenizer_dir) / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    assert HFText(str(tmp_path)).content_format == expected
    assert HFText(str(tmp_path), content_format="openai").content_format == "openai"


def test_a_final_message_can_be_continued(hf: HFText) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": " so far "}]
    chat = ChatPrompt(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert render(hf, chat) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n so far "
    with pytest.raises(InvalidField):
        render(hf, ChatPrompt(messages=messages, continue_final_message=True))


# In the router


def tokenize_of(directory: str, **options: Any) -> TextTokenize:
    models = {"m": ModelConfig(tokenizer=directory, chat_template_kwargs={"enable_thinking": False})}
    return TextTokenize(models, EngineTokenize(), **options)


async def test_a_request_decides_over_the_models_defaults(tokenizer_dir: str, hf: HFText) -> None:
    tokenize = tokenize_of(tokenizer_dir)
    messages = [{"role": "user", "content": "hi"}]
    thinking = {"enable_thinking": True}
    short = await tokenize(PromptRequest(model="m", messages=messages, chat_template_kwargs=thinking), ())
    long = await tokenize(PromptRequest(model="m", messages=messages), ())
    assert long.ids[: len(short.ids)] == short.ids
    assert hf.encode("<think>\n\n</think>\n\n") == long.ids[len(short.ids) :]
    await tokenize.close()


@pytest.mark.parametrize("tokenizer", ["hf", "byte"])
async def test_media_ends_what_is_known(tokenizer_dir: str, tokenizer: str) -> None:
    tokenize = tokenize_of(tokenizer_dir if tokenizer == "hf" else "byte")
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    messages = [*first, {"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]
    assert media_at(messages) == 2
    known = await tokenize(PromptRequest(model="m", messages=messages), ())
    assert known.note
    text = PromptRequest(model="m", messages=first, add_generation_prompt=False)
    before = await tokenize(text, ())
    assert known.ids == before.ids
    assert before.note is None
    nothing = await tokenize(PromptRequest(model="m", messages=messages[2:]), ())
    assert (nothing.ids, bool(nothing.note)) == ([], True)
    await tokenize.close()


async def test_the_loop_runs_while_text_is_tokenised(tokenizer_dir: str) -> None:
    tokenize = tokenize_of(tokenizer_dir, threads=1, waiting=1)
    request = PromptRequest(model="m", prompt="the weather in Paris 🌦️ " * 20_000)
    work = [asyncio.ensure_future(tokenize(request, ())) for _ in range(2)]
    turns = 0
    while not work[0].done():
        await asyncio.sleep(0)
        if not turns:
            with pytest.raises(TooManyRequests):
                await tokenize(request, ())
        turns += 1
    assert turns > 10
    first, second = await asyncio.gather(*work)
    assert first.ids == second.ids
    await tokenize.close()


def test_a_model_without_its_tokenizer_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        tokenize_of(str(tmp_path))


def test_a_name_means_one_thing() -> None:
    with pytest.raises(ConfigError, match="taken"):
        Models({"a": ModelConfig(aliases=("x",)), "b": ModelConfig(adapters=("x",))})
    with pytest.raises(ConfigError, match="taken"):
        Models({"a": ModelConfig(aliases=("b",)), "b": ModelConfig()})
