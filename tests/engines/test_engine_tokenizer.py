"""Tokenizers: round trips, streaming, chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metatrie.engines.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer, load_tokenizer
from metatrie.proto.errors import ConfigError, InvalidField

BYTE = ByteTokenizer()
TEXT = st.text() | st.lists(st.sampled_from([*ByteTokenizer.SPECIAL, "é", "<|im_", "雪", "\n"])).map("".join)


@given(TEXT)
def test_byte_round_trip(text: str) -> None:
    ids = BYTE.encode(text)
    assert all(0 <= i < BYTE.vocab_size for i in ids)
    assert BYTE.decode(ids) == text


@given(st.text(), st.text())
def test_byte_tokens_of_a_prefix_are_a_prefix(first: str, second: str) -> None:
    ids = BYTE.encode(first)
    assert BYTE.encode(first + "\n" + second)[: len(ids)] == ids


@given(st.lists(st.integers(0, 255)))
def test_byte_streaming_gives_the_same_text(ids: list[int]) -> None:
    stream = BYTE.stream()
    parts = [stream.push([i]) for i in ids]
    assert "".join([*parts, stream.flush()]) == bytes(ids).decode("utf-8", "replace")


def test_byte_chat_template() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = BYTE.apply_chat_template(messages)
    assert text == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert BYTE.encode(text)[0] == 257
    assert BYTE.apply_chat_template(messages, add_generation_prompt=False) == text.removesuffix(
        "<|im_start|>assistant\n"
    )
    assert BYTE.apply_chat_template(messages, tools=[{"b": 1, "a": 2}]).startswith('<|im_start|>tools\n[{"a": 2, "b"')


def test_a_conversation_continues_its_own_tokens() -> None:
    turns = [{"role": "user", "content": "hi"}]
    prompt = BYTE.encode(BYTE.apply_chat_template(turns))
    generated = list(BYTE.plain_ids)
    turns += [{"role": "assistant", "content": BYTE.decode(generated)}, {"role": "user", "content": "go on"}]
    assert BYTE.encode(BYTE.apply_chat_template(turns))[: len(prompt) + len(generated)] == prompt + generated


@pytest.mark.parametrize("token", [-1, 259])
def test_byte_decode_refuses_ids_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(InvalidField):
        BYTE.decode([token])


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small byte-level BPE, trained here, with Hugging Face's two files."""
    tokenizers = pytest.importorskip("tokenizers")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(["the cat sat on the mat and the dog ran to the cat"] * 50, trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("hf")
    bpe.save(str(path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<s>"},
        "chat_template": "{% if not messages %}{{ raise_exception('none') }}{% endif %}{{ bos_token }}"
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}{{ m.role }}:{{ m.content }}<|end|>"
        "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% if add_generation_prompt %}assistant:{% if think %}<think>{% endif %}{% endif %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(str(path))


def test_hf_encodes_and_decodes(hf: Tokenizer) -> None:
    ids = hf.encode("the cat", add_special_tokens=False)
    assert hf.decode(ids) == "the cat"
    assert hf.encode("the cat") == [0, *ids]
    with pytest.raises(InvalidField):
        hf.decode([hf.vocab_size])


def test_hf_streams_characters_whole(hf: Tokenizer) -> None:
    text = "the cat 雪 sat é"
    stream = hf.stream()
    parts = [stream.push([i]) for i in hf.encode(text)]
    assert "".join(parts) + stream.flush() == text
    assert all("\ufffd" not in part for part in parts)
    # Cut inside a character: the rest comes out marked, at the end.
    cut = hf.stream()
    assert cut.push(hf.encode("雪", add_special_tokens=False)[:1]) == ""
    assert cut.flush() == "\ufffd"


def test_hf_streaming_gives_up_on_bytes_that_are_no_character(hf: Tokenizer) -> None:
    start = hf.encode("雪", add_special_tokens=False)[0]
    stream = hf.stream()
    text = "".join(stream.push([start]) for _ in range(40))
    assert set(text) == {"\ufffd"}
    assert len(text + stream.flush()) == 40


def test_hf_plain_ids_survive_decoding_and_encoding(hf: Tokenizer) -> None:
    ids = list(hf.plain_ids) * 2
    assert ids
    assert hf.encode(hf.decode(ids), add_special_tokens=False) == ids


def test_hf_chat_template(hf: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert hf.apply_chat_template(messages) == "<s>user:hi<|end|>assistant:"
    assert hf.apply_chat_template(messages, think=True) == "<s>user:hi<|end|>assistant:<think>"
    tools = [{"ä": "<"}]
    assert hf.apply_chat_template(messages, False, tools) == '<s>user:hi<|end|>[{"ä": "<"}]'
    with pytest.raises(InvalidField, match="TemplateError"):
        hf.apply_chat_template([])


def test_hf_templates_are_sandboxed(tmp_path: Path, hf: Tokenizer) -> None:
    assert isinstance(hf, HFTokenizer)
    hf._tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(InvalidField, match="SecurityError"):
        load_tokenizer(str(tmp_path)).apply_chat_template([{"role": "user", "content": "x"}])


def test_hf_without_template(tmp_path: Path, hf: Tokenizer) -> None:
    assert isinstance(hf, HFTokenizer)
    hf._tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidField, match="no chat template"):
        load_tokenizer(str(tmp_path)).apply_chat_template([{"role": "user", "content": "x"}])


def test_a_missing_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json.*byte"):
        load_tokenizer(str(tmp_path))
