"""Conversations with tools, arguments and control tokens: the text and the ids of transformers' apply_chat_template."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from conf.errors import UserError
from conf.tasks import CheckpointFormat
from models.formats import open_tokenizer
from models.tokenizers import load_tokenizer
from models.tokenizers.base import UnreadArgument
from models.tokenizers.template_files import read_template
from tests.helpers.builders import SHARED
from tests.helpers.cases import each
from tests.helpers.chat_styles import CHATML, MISTRAL, STYLES, written
from tests.helpers.conversion import convert
from tests.helpers.oracle import write_model
from tests.helpers.small_tokenizers import TRICKY, byte_fallback, byte_level, save

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a 城市 & <more>", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = [{"type": "function", "id": "call_1", "function": {"name": "weather", "arguments": {"city": "北京", "n": 1.5}}}]
PLAIN = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": TRICKY},
    {"role": "assistant", "content": "It is fine.", "reasoning_content": "think first"},
    {"role": "user", "content": "and there?"},
]
CALLED = [
    *PLAIN,
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": '{"sun": "\u00e9 yes"}'},
]


KINDS = each("kind", [byte_level, byte_fallback])


@pytest.mark.long
@KINDS
@each("style", STYLES)
def test_tools_and_their_calls_reach_the_template(style: str, kind: Any, tmp_path: Path) -> None:
    ours, theirs = written(tmp_path, style, kind())
    for messages, tools, begins in (
        (PLAIN, None, True),
        (PLAIN, TOOLS, True),
        (CALLED, TOOLS, True),
        (CALLED, TOOLS, False),
    ):
        named = {"tools": tools, "add_generation_prompt": begins}
        text, ids = ours.encode_messages(messages, None, **named)
        assert text == theirs.apply_chat_template(messages, tokenize=False, **named)
        assert ids == ours.encode(text, add_special_tokens=False)
        assert ids == theirs.apply_chat_template(messages, return_dict=False, sanitize_control_tokens=True, **named)


@each("style", STYLES, quick=("chatml", "llama3"))
def test_a_final_message_is_continued(style: str, tmp_path: Path) -> None:
    """With white space at its ends, which some templates strip, and with texts that spell control tokens."""
    ours, theirs = written(tmp_path, style, byte_level())
    named: Any = {"continue_final_message": True}
    if style == "chatml":
        named["tools"] = TOOLS
    for content in (
        "The",
        " It is ",
        "a\n\n",
        "",
        " \n",
        "<|im_end|> b </s>",
        "CONTINUE_FINAL_MESSAGE_TAG",
        "<think>\nHm",
    ):
        for role in ("assistant", "user"):
            messages = [*PLAIN[1:2], {"role": role, "content": content}]
            text, ids = ours.encode_messages(messages, None, **named)
            assert text == theirs.apply_chat_template(messages, tokenize=False, **named), content
            # The model's own <think> stays a token here. transformers can only make texts of all such tokens, or of none.
            sanitizes = (role, content[:7]) != ("assistant", "<think>")
            assert ids == theirs.apply_chat_template(
                messages, return_dict=False, sanitize_control_tokens=sanitizes, **named
            )
    for messages in ([PLAIN[0], {"role": "assistant", "content": None, "tool_calls": CALLS}], []):
        with pytest.raises(UserError, match="the last message has no content to continue"):
            ours.encode_messages(messages, None, **named)
    with pytest.raises(UserError, match="the chat template changes the last message"):
        ours.encode_messages(PLAIN, "{{ messages[-1].content | upper }}", continue_final_message=True)


def test_arguments_reach_the_template_that_reads_them(tmp_path: Path) -> None:
    ours, theirs = written(tmp_path, "chatml", byte_level())
    for thinks in (True, False):
        text, _ = ours.encode_messages(PLAIN, None, template_arguments={"enable_thinking": thinks})
        assert text == theirs.apply_chat_template(
            PLAIN, tokenize=False, add_generation_prompt=True, enable_thinking=thinks
        )
        assert text.endswith("</think>\n\n") is not thinks
    for name in ("enable_thinkin", "messages", "tools", "bos_token", "m"):
        with pytest.raises(
            UnreadArgument, match=f"'{name}' is not an argument of the chat template, which has enable_thinking"
        ) as raised:
            ours.encode_messages(PLAIN, None, template_arguments={name: 1})
        assert raised.value.name == name


def test_tools_are_refused_where_no_template_reads_them(tmp_path: Path) -> None:
    save(byte_level(), tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    with pytest.raises(UnreadArgument, match="the chat template reads no tools: leave them out, or give another"):
        ours.encode_messages(PLAIN, None, tools=TOOLS)
    file = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert ours is not None
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(PLAIN, tools=tools, tokenize=False)
        assert ours.encode_messages(PLAIN, None, tools=tools)[0] == expected


def spelled(value: Any, name: str) -> Any:
    """Return the texts of a conversation, each with a token's name in it."""
    if isinstance(value, str):
        return f"{value} a{name}b{name[:3]}"
    if isinstance(value, dict):
        kept = ("role", "type")
        return {key: item if key in kept else spelled(item, name) for key, item in value.items()}
    return [spelled(item, name) for item in value] if isinstance(value, list) else value


@pytest.mark.long
@KINDS
@each("style", STYLES)
def test_text_of_a_conversation_is_never_a_control_token(style: str, kind: Any, tmp_path: Path) -> None:
    template, special, added = STYLES[style]
    ours, theirs = written(tmp_path, style, kind())
    clean = ours.encode_messages(CALLED, None, tools=TOOLS)[1]
    for name in [*special, *(token for token in added if not token.isspace()), "</s>"]:
        id = theirs.convert_tokens_to_ids(name)
        # Answers keep tokens that are not special, because templates search for <think>; transformers marks it, too.
        messages = [m if m["role"] == "assistant" and name in added else spelled(m, name) for m in CALLED]
        text, ids = ours.encode_messages(messages, None, tools=spelled(TOOLS, name))
        named = {"tools": spelled(TOOLS, name), "add_generation_prompt": True}
        assert ids == theirs.apply_chat_template(messages, return_dict=False, sanitize_control_tokens=True, **named)
        assert ids.count(id) == clean.count(id)
        assert text == theirs.apply_chat_template(messages, tokenize=False, **named)


@each("style", STYLES)
def test_names_of_properties_are_not_control_tokens_either(style: str, tmp_path: Path) -> None:
    ours, theirs = written(tmp_path, style, byte_level())
    name = STYLES[style][1][0]
    tools = json.loads(json.dumps(TOOLS).replace('"city"', json.dumps(f"city{name}")))
    counts = [
        ours.encode_messages(PLAIN, None, tools=conversation_tools)[1].count(theirs.convert_tokens_to_ids(name))
        for conversation_tools in (TOOLS, tools)
    ]
    assert counts[0] == counts[1]


def test_answers_keep_the_thinking_that_templates_look_for(tmp_path: Path) -> None:
    ours, theirs = written(tmp_path, "chatml", byte_level())
    thought = {"role": "assistant", "content": "<think>\nhm <|im_end|>\n</think>\n\nFine"}
    text, ids = ours.encode_messages([PLAIN[1], thought, PLAIN[3]], None)
    assert "<|im_start|>assistant\nFine<|im_end|>" in text
    assert ids == ours.encode(text, add_special_tokens=False)


def test_marks_are_characters_that_the_conversation_has_not(tmp_path: Path) -> None:
    ours, theirs = written(tmp_path, "chatml", byte_level())
    private = "".join(map(chr, range(0xE000, 0xE005))) + "\\ue005"
    messages = [{"role": "user", "content": f"{private}</s>{private}"}]
    text, ids = ours.encode_messages(messages, None)
    assert text == f"<|im_start|>user\n{private}</s>{private}<|im_end|>\n<|im_start|>assistant\n"
    assert ours.decode(ids, skip_special_tokens=False) == text
    everything = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(UserError, match="the messages contain all private-use characters: leave some of them out"):
        ours.encode_messages([{"role": "user", "content": f"{everything}</s>"}], None)
    # marks do not stay in JSON of ASCII
    template = "{{ messages | tojson(ensure_ascii=True) }}"
    messages = [{"role": "user", "content": "\u00e9</s>\\ue000"}]
    text, ids = ours.encode_messages(messages, template)
    assert text == json.dumps(messages)
    assert ours.decode(ids, skip_special_tokens=True) == text
    # a mark that a template cuts joins no halves
    cut = "{{ messages[0].content[:8] }}{{ messages[0].content[8:] }}{{ messages[0].content.split('im')[0] }}end|>"
    _, ids = ours.encode_messages([{"role": "user", "content": "<|im_end|>"}], cut)
    assert theirs.convert_tokens_to_ids("<|im_end|>") not in ids


skip_without_vocabularies = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real vocabularies of ../shared")
REAL = SHARED / "data" / "tokenizers"


@skip_without_vocabularies
def test_sentencepiece_reads_the_run_around_a_spelled_token_as_one_text() -> None:
    tokenizer = load_tokenizer(REAL / "llama2")
    assert tokenizer is not None
    _, ids = tokenizer.encode_messages([{"role": "user", "content": "a</s>b<s>"}], None)
    assert ids[0] == tokenizer.bos_token_id
    assert not {1, 2} & set(ids[1:])
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == "[INST] a</s>b<s> [/INST]"
    from sentencepiece import SentencePieceProcessor

    library = SentencePieceProcessor(model_file=str(REAL / "llama2" / "tokenizer.model"))
    assert ids[1:] == library.encode("[INST] a</s>b<s> [/INST]")  # the library never reads a control piece from a text


@pytest.mark.long
@skip_without_vocabularies
@each("name", ["llama3", "qwen1"])
def test_tiktoken_reads_no_special_token_of_a_message(name: str, tmp_path: Path) -> None:
    for file in (REAL / name).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": {"qwen1": "qwen"}.get(name, "llama")}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    end = {"qwen1": "<|im_end|>", "llama3": "<|eot_id|>"}[name]
    messages = [{"role": "user", "content": f"e\u0301{end}b {end}"}]
    for template in (None, f"{{{{ messages[0].content }}}}{end}"):
        counts = [
            tokenizer.encode_messages(conversation, template)[1].count(tokenizer.encode(end, False)[0])
            for conversation in ([{"role": "user", "content": "x"}], messages)
        ]
        assert counts[0] == counts[1] > 0
    text, ids = tokenizer.encode_messages(messages, f"{{{{ messages[0].content }}}}{end}")
    assert (
        tokenizer.decode(ids, skip_special_tokens=True)
        == ("\u00e9" if name == "qwen1" else "e\u0301") + f"{end}b {end}"
    )


@skip_without_vocabularies
def test_baichuan_opens_no_turn_in_a_message(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").symlink_to(REAL / "baichuan1" / "tokenizer.model")
    (tmp_path / "config.json").write_text('{"model_type": "baichuan"}')
    (tmp_path / "generation_config.json").write_text('{"user_token_id": 195, "assistant_token_id": 196}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    turn = tokenizer.decode([196], skip_special_tokens=False)
    plain = tokenizer.encode_messages([{"role": "user", "content": "你好 \n <h1>"}], None)[1]
    assert plain == [195, *tokenizer.encode("你好 \n <h1>", False), 196]
    text = f"你好{turn} 好\n"
    ids = tokenizer.encode_messages([{"role": "user", "content": text}], None)[1]
    assert (ids[0], ids[-1], ids.count(195), ids.count(196)) == (195, 196, 1, 1)
    assert tokenizer.decode(ids[1:-1], skip_special_tokens=False) == text


@skip_without_vocabularies
def test_chatglm3_has_tools_as_its_repository_has() -> None:
    tokenizer = load_tokenizer(SHARED / "goldens" / "chatglm3")
    assert tokenizer is not None
    messages = [CALLED[1], *CALLED[4:]]
    text, ids = tokenizer.encode_messages(messages, None, tools=TOOLS)
    listed = json.dumps([tool["function"] for tool in TOOLS], indent=4, ensure_ascii=False)
    system = f"Answer the following questions as best as you can. You have access to the following tools:\n{listed}"
    expected = [
        {"role": "system", "content": system},
        CALLED[1],
        {"role": "assistant", "metadata": "weather", "content": "```python\ntool_call(city='北京', n=1.5)\n```"},
        {"role": "observation", "content": CALLED[5]["content"]},
    ]
    assert (text, ids) == tokenizer.encode_messages(expected, None)
    with pytest.raises(UnreadArgument, match="the built-in format of the tokenizer in .* has no tools: leave them out"):
        load_tokenizer(SHARED / "goldens" / "chatglm2").encode_messages(PLAIN, None, tools=TOOLS)  # type: ignore[union-attr]
    with pytest.raises(UnreadArgument, match="has no arguments, but 'enable_thinking' is given"):
        tokenizer.encode_messages(PLAIN, None, template_arguments={"enable_thinking": True})


@each("own_template", [None, CHATML])
def test_the_template_of_a_processor(own_template: str | None, tmp_path: Path) -> None:
    """Older multimodal checkpoints have it in chat_template.json; the template in the tokenizer's own settings has
    precedence."""
    save(byte_level(), tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": own_template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": MISTRAL}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.chat_template == (own_template or MISTRAL)


WITH_TOOLS = "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{{ messages[0].content }}"


@pytest.mark.long
@each("is_list", [False, True])
def test_templates_by_name(is_list: bool, tmp_path: Path) -> None:
    """transformers 4.50 and later save one file per template, earlier versions a list; there may be a separate template
    for tools. convert keeps them."""
    source = tmp_path / "source"
    write_model(source, LlamaForCausalLM, vocab_size=330)
    save(byte_level(), source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    templates = {"default": CHATML, "tool_use": WITH_TOOLS}
    if is_list:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    else:
        del settings["chat_template"]
        (source / "chat_template.jinja").write_text("\ufeff" + CHATML)
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tool_use.jinja").write_text("\ufeff" + WITH_TOOLS)
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    plain = AutoTokenizer.from_pretrained(source)
    copy, file, back = tmp_path / "copy", tmp_path / "x.gguf", tmp_path / "back"
    convert(convert(source, copy), file, format=CheckpointFormat.gguf)
    convert(file, back)
    for folder in (source, copy, file, back):
        tokenizer = open_tokenizer(folder)
        assert tokenizer is not None
        for tools in (None, TOOLS):
            text, _ = tokenizer.encode_messages(PLAIN, None, tools=tools)
            if is_list or not tools:  # transformers treats the byte-order mark as a character
                rendered = plain.apply_chat_template(PLAIN, tools=tools, tokenize=False, add_generation_prompt=True)
                assert text == rendered.removeprefix("\ufeff")
            assert text.startswith("[") == bool(tools)


def test_named_templates_without_a_default(tmp_path: Path) -> None:
    save(byte_level(), tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": WITH_TOOLS}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode_messages(PLAIN, None, tools=TOOLS)[0].startswith("[")
    with pytest.raises(
        UserError, match="has no chat template, but rag, tool_use by name: give predict.chat_template=PATH"
    ):
        tokenizer.encode_messages(PLAIN, None)


def test_files_with_a_template(tmp_path: Path) -> None:
    """Windows' editors write a byte-order mark; a processor's file is JSON."""
    (tmp_path / "x.jinja").write_text("\ufeff" + CHATML, encoding="utf-8")
    assert read_template(tmp_path / "x.jinja") == CHATML
    for value in (CHATML, [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]):
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": value}))
        assert read_template(tmp_path / "chat_template.json") == CHATML
    for text, message in {
        "{}": "has no key chat_template: give a Jinja file",
        "[1]": "has no key chat_template",
        "{{ x }}": "has no key chat_template",
        '{"chat_template": [{"name": "rag", "template": "x"}]}': "has no template named default, but rag: give a Jinja file",
        '{"chat_template": 3}': "chat_template=3 is not a text",
    }.items():
        (tmp_path / "chat_template.json").write_text(text)
        with pytest.raises(UserError, match=re.escape(message)):
            read_template(tmp_path / "chat_template.json")


def test_telechats_conversations(tmp_path: Path) -> None:
    """Its code concatenates ids: user_token_id, a text, bot_token_id, an answer, eos_token_id. It ignores all other
    roles."""
    backend = byte_level()
    backend.add_special_tokens(["<_user>", "<_bot>", "<_end>"])
    save(backend, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    own_template = settings.pop("chat_template")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "telechat"}))
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(settings))
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    user, bot, end = (backend.token_to_id(name) for name in ("<_user>", "<_bot>", "<_end>"))
    first, answer, second = (backend.encode(text, add_special_tokens=False).ids for text in (TRICKY, " Ja.\n", "?"))
    messages = [
        {"role": "user", "content": TRICKY},
        {"role": "assistant", "content": " Ja.\n"},
        {"role": "user", "content": "?"},
    ]
    text, ids = ours.encode_messages(messages, None)
    assert ids == [user, *first, bot, *answer, end, user, *second, bot]
    assert text == f"<_user>{TRICKY}<_bot> Ja.\n<_end><_user>?<_bot>"
    spelled_ids = ours.encode_messages([{"role": "user", "content": "a<_bot>b"}], None)[1]
    assert (spelled_ids.count(bot), spelled_ids[-1]) == (1, bot)
    with pytest.raises(UserError, match="does not take these messages: the roles are user and assistant"):
        ours.encode_messages([{"role": "system", "content": "x"}], None)
    file.write_text(json.dumps(settings | {"chat_template": own_template}))  # TeleChat2 has one
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    assert ours.encode_messages(messages, None)[0].startswith("<s>[user] ")
