"""Guided rows: whole texts match their grammar, masks contain exactly the tokens that may follow, and no row depends on
other rows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.json_schemas import FORMATS
from conf.speculation import Speculate, SpeculationConfig
from conf.thinking import ThinkingConfig
from models.tokenizers import load_tokenizer
from pipelines.engine import Engine
from pipelines.engine.guide import Guides
from pipelines.engine.request import FinishReason, Output, SequenceGroup
from tests.helpers.builders import KEY_VALUE_BYTES, REPOSITORY, SHARED, engine_of, write_llama
from tests.helpers.cases import each
from tests.helpers.drafts import Hostile, at_random
from tests.helpers.guides import GUIDES, keeps_to
from tests.helpers.small_tokenizers import byte_fallback, save

DRAWN = DecodeConfig(max_new_tokens=100, temperature=1.0, top_p=0.95, seed=5)
SETTINGS = [replace(DRAWN, guide=guide, seed=i) for i, guide in enumerate(GUIDES)]
SETTINGS += [replace(settings, temperature=0.0, top_p=1.0, max_new_tokens=40) for settings in SETTINGS]
SETTINGS += [DRAWN, DecodeConfig(max_new_tokens=30), replace(DRAWN, guide=GUIDES[3], n=3, max_new_tokens=20)]
REASONED = {"lark": 'start: thought ("yes" | "no")\nthought[lazy]: /(.|\\n)*<\\/think>/'}
LIMITED = ThinkingConfig(max_tokens=6, is_open=True)
SETTINGS += [
    replace(DRAWN, guide=REASONED, thinking=LIMITED, logprobs=1, n=2, max_new_tokens=30),
    replace(DRAWN, thinking=LIMITED, repetition_penalty=1.4, bad_words=["</"], n=2, max_new_tokens=30),
    replace(DRAWN, thinking=replace(LIMITED, max_tokens=2, start="e", is_open=False), seed=9, max_new_tokens=60),
    replace(DRAWN, guide=GUIDES[0], thinking=replace(LIMITED, max_tokens=2)),  # its grammar has no such text
]
PROMPTS = [[0, 70 + i, 9, 4] * (i % 3 + 1) for i in range(len(SETTINGS))]


@pytest.fixture(scope="module")
def llama_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random checkpoint whose tokenizer has byte fallback, and whose model has more tokens."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = byte_fallback()
    write_llama(folder, vocab_size=tokenizer.get_vocab_size() + 5, eos_token_id=2)
    (folder / "generation_config.json").unlink()
    save(tokenizer, folder)
    return folder


def run(engine: Engine, settings: list[DecodeConfig]) -> list[Output]:
    """Return the result of each row, and check the blocks."""
    requests = [
        engine.request(i, prompt, decode) for i, (prompt, decode) in enumerate(zip(PROMPTS, settings, strict=True))
    ]
    outputs = list(engine.generate(requests, on_step=engine.scheduler.check_integrity))
    plain = [replace(output, num_cached_tokens=0, num_preemptions=0) for output in outputs]
    return sorted(plain, key=lambda output: output.request_id)


@pytest.fixture(scope="module")
def alone(chatty: Path) -> list[Output]:
    """Return the result of each row alone."""
    engine = engine_of(chatty, 1, tokenizer="")
    outputs = []
    for i, (prompt, decode) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        (output,) = engine.generate([engine.request(i, prompt, decode)])
        outputs.append(replace(output, num_cached_tokens=0))
    return outputs


@pytest.mark.long
@each("kind", ["byte-level", "byte fallback"])
def test_whole_texts_are_in_the_grammar(chatty: Path, llama_like: Path, kind: str) -> None:
    engine = engine_of(chatty if kind == "byte-level" else llama_like, 8, tokenizer="")
    settings = [replace(DRAWN, guide=guide, seed=seed) for guide in GUIDES for seed in range(12)]
    requests = [engine.request(i, [0, 70, 9], decode) for i, decode in enumerate(settings)]
    num_whole = dict.fromkeys(range(len(GUIDES)), 0)
    for output in engine.generate(requests):
        (completion,) = output.completions
        assert completion.text is not None
        if completion.finish_reason is FinishReason.stop:
            assert keeps_to(completion.text, GUIDES[output.request_id // 12])
            num_whole[output.request_id // 12] += 1
        else:
            assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.length, 100)
    assert all(
        num_whole[i] > 0 for i in num_whole if "json_object" not in GUIDES[i]
    )  # with a random model its strings may never end


def test_the_mask_has_just_the_tokens_that_may_follow(chatty: Path, llama_like: Path) -> None:
    """Compared with the members of a finite language, after every prefix of one."""
    members = ["yes", "yesterday", "今天!", "no  no", " Once upon\n"]
    for folder, eos, vocab_size in ((chatty, 1, 330), (llama_like, 2, 400)):
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        for guide in ({"choice": members}, {"regex": "|".join(members)}, {"json_schema": {"enum": members}}):
            texts = [(json.dumps(m, ensure_ascii=False) if "json_schema" in guide else m).encode() for m in members]
            state, said = Guides(tokenizer, vocab_size, frozenset({eos})).begin(guide), b""
            while True:
                mask = int.from_bytes(state.mask(), "little")
                allowed = {id for id in range(vocab_size) if mask >> id & 1}
                goes_on = {i for i, t in enumerate(tokens) if t and any(text.startswith(said + t) for text in texts)}
                ends = {eos} if said in texts else set()
                if "json_schema" in guide:  # its strings may also contain escapes
                    assert goes_on | ends <= allowed
                else:
                    assert allowed == goes_on | ends
                if not goes_on:
                    break
                token = min(goes_on, key=lambda id: (len(tokens[id] or b""), id))
                state.accept(token)
                said += tokens[token] or b""
            assert state.is_complete
            assert said in texts


@each(
    "device",
    [
        {},
        {"block_size": 4, "max_batched_tokens": 9},
        {"block_size": 4, "kv_cache_memory": str(45 * 4 * KEY_VALUE_BYTES)},
    ],
)
def test_rows_are_those_alone(
    chatty: Path, alone: list[Output], device: dict[str, Any], preempted: list[SequenceGroup]
) -> None:
    preempted.clear()
    assert run(engine_of(chatty, 6, tokenizer="", **device), SETTINGS) == alone
    assert bool(preempted) == ("kv_cache_memory" in device)


def test_unguided_rows_keep_their_tokens(chatty: Path, alone: list[Output]) -> None:
    free = [replace(decode, guide=None) for decode in SETTINGS]
    mixed = [replace(decode, guide=None) if i % 2 else decode for i, decode in enumerate(SETTINGS)]
    expected, actual = run(engine_of(chatty, 6, tokenizer=""), free), run(engine_of(chatty, 6, tokenizer=""), mixed)
    reasoned = [completion for output in actual[-4:-1] for completion in output.completions]
    assert all("\n</think>" in (completion.text or "") for completion in reasoned)
    assert alone[-1].completions[0].finish_reason is FinishReason.no_token
    assert actual[1::2] == expected[1::2]
    assert actual[::2] != expected[::2]


@each("right", [None, lambda place: True, at_random(0.6)])
def test_drafts_change_no_token(chatty: Path, alone: list[Output], right: Callable[[int], bool] | None) -> None:
    """Drafts are verified with the mask of their own position, including the eos and tokens that no mask allows."""
    speculation = SpeculationConfig(adaptive=False)
    drafted = [replace(decode, speculate=Speculate.ngram, speculation=speculation) for decode in SETTINGS]
    engine = engine_of(chatty, 6, tokenizer="")
    if right:
        tokens = {(output.request_id, i): c.token_ids for output in alone for i, c in enumerate(output.completions)}
        engine.speculator.proposers[Speculate.ngram] = Hostile(tokens, right)
    assert run(engine, drafted) == alone
    assert engine.speculator.counts.num_accepted_tokens > 0


def test_an_engine_that_looks_ahead_waits_for_guided_rows(chatty: Path, alone: list[Output]) -> None:
    engine = engine_of(chatty, 6, tokenizer="")
    engine.looks_ahead = True
    assert run(engine, SETTINGS) == alone


def test_the_end_of_the_grammar_ends_a_row(chatty: Path) -> None:
    """Also before min_new_tokens, because nothing can follow. Text that the detokenizer holds back is returned."""
    engine = engine_of(chatty, tokenizer="")
    for decode in (DecodeConfig(), DecodeConfig(min_new_tokens=9, max_new_tokens=9)):
        (output,) = engine.generate(
            [engine.request(0, [0, 70], replace(decode, guide={"choice": ["好"]}, stop=["好的"]))]
        )
        (completion,) = output.completions
        assert (completion.text, completion.finish_reason) == ("好", FinishReason.stop)
        assert completion.stop_reason is None


def test_bans_hold_within_a_guide(chatty: Path) -> None:
    engine = engine_of(chatty, tokenizer="")
    assert engine.tokenizer is not None
    (y,) = engine.tokenizer.encode("y", False)
    decode = DecodeConfig(guide={"choice": ["y", "n"]}, logit_bias={y: 100.0})
    banned = replace(decode, bad_words=["y"])
    texts = [
        o.completions[0].text
        for o in engine.generate([engine.request(i, [0], d) for i, d in enumerate((decode, banned))])
    ]
    assert sorted(filter(None, texts)) == ["n", "y"]
    (output,) = engine.generate([engine.request(0, [0], replace(banned, guide={"choice": ["y"]}))])
    assert output.completions[0].finish_reason is FinishReason.no_token


REFUSED = [
    ({"json_schema": {"if": {}, "not": {}}}, r'json_schema has keywords that are not supported: "if", "not": leave'),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, '"uniqueItems": leave them out'),
    ({"json_schema": {"properties": {"a": {"contains": {}}}}}, '"contains": leave them out'),
    ({"json_schema": {"enum": [123456789012345678]}}, "enum 123456789012345678, which no 64-bit float holds"),
    ({"json_schema": {"properties": {"a": {"const": {"b": [2**53 + 1]}}}}}, "const 9007199254740993, which"),
    ({"json_schema": {"type": "integer", "minimum": 10**400}}, "minimum 1000.*, which no 64-bit float holds"),
    ({"json_schema": {"multipleOf": 2**53 + 1}}, "multipleOf 9007199254740993, which"),
    ({"json_schema": {"type": "text"}}, "json_schema cannot be used: .*Invalid type: text"),
    ({"json_schema": {"enum": []}}, "json_schema cannot be used: .*Unsatisfiable schema"),
    ({"json_schema": {"$ref": "https://example.com/s"}}, "json_schema cannot be used: .*is not present in a registry"),
    ({"json_schema": {"$ref": "#/$defs/a"}}, "json_schema cannot be used: .*does not exist"),
    (
        {"json_schema": {"oneOf": [{"type": "string"}, {"minLength": 3}]}},
        r"has a oneOf that is not .*: give anyOf$",
    ),
    ({"regex": "a("}, "regex cannot be used: invalid regex .*unclosed group: correct or simplify it$"),
    ({"regex": "a(?=b)"}, "regex cannot be used: .*look-around"),
    ({"lark": "start: foo"}, 'lark cannot be used: unknown name: "foo"'),
    ({"lark": "start: start"}, "lark cannot be used"),
    # These would take seconds, or unlimited memory.
    ({"json_schema": {"properties": {f"p{i}": {} for i in range(3000)}}}, r"too big \(limit for this grammar: 10000\)"),
    ({"json_schema": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}}, "$ref": "#/$defs/a"}}, "circular"),
]


@each("guide, message", REFUSED)
def test_invalid_guides_are_refused(chatty: Path, guide: dict[str, Any], message: str) -> None:
    engine = engine_of(chatty, tokenizer="")
    for refusal in (lambda decode: engine.request(0, [0], decode), engine.requests.check):
        with pytest.raises(UserError, match=rf"^decode\.guide\..*{message}") as error:
            refusal(DecodeConfig(guide=guide))
        assert "\n" not in str(error.value)


def test_keywords_that_limit_nothing_are_passed_over() -> None:
    """Unknown formats and values that allow everything are ignored, as JSON Schema says. The other keywords apply."""
    tokenizer = load_tokenizer(REPOSITORY / "models" / "tiny")
    assert tokenizer is not None
    guides = Guides(tokenizer, tokenizer.size, frozenset({1}))

    def allows(schema: dict[str, Any], text: str) -> bool:
        state = guides.begin({"json_schema": schema})
        for id in [*tokenizer.encode(text, False), 1]:
            if not int.from_bytes(state.mask(), "little") >> id & 1:
                return False
            state.accept(id)
        return True

    text, free = {"type": "string", "maxLength": 3}, {"uniqueItems": False, "propertyNames": {"type": "string"}}
    for unknown in ("password", "binary", "byte", "path", "int64", "uri-reference", "poem"):
        schema = {**text, "format": unknown}
        assert (allows(schema, '"abc"'), allows(schema, '"abcd"')) == (True, False)
    for known in FORMATS:
        assert not allows({"type": "string", "format": known}, '"a b"')
    for name in ("uniqueItems", "format", "enum"):  # not keywords here
        schema = {"type": "object", "properties": {name: {**text, "format": "byte"}}, "required": [name], **free}
        assert (allows(schema, f'{{"{name}":"abc"}}'), allows(schema, '{"a":1}')) == (True, False)
    kept = {"const": {"format": "poem", "uniqueItems": False}}
    assert (allows(kept, '{"format":"poem","uniqueItems":false}'), allows(kept, "{}")) == (True, False)
    assert {allows({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, text) for text in ("0", "7")} == {True}
    below = {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}  # only 2**53 + 2
    assert [allows(below, str(2**53 + i)) for i in range(5)] == [False, False, True, False, False]
    for number in (2**53, 10**18, 2**60, -(10**18)):  # exact as a float
        assert (allows({"enum": [number]}, str(number)), allows({"enum": [number]}, str(number + 1))) == (True, False)


def test_long_repetitions_cost_no_more_than_short_ones(chatty: Path) -> None:
    """Forced text is not written at once, even if a grammar has only one continuation."""
    engine = engine_of(chatty, tokenizer="")
    nested = "(?:(?:(?:a{99}){99}){99}){99}"
    for guide in ({"regex": nested}, {"lark": f'%llguidance {{"no_forcing": false}}\nstart: /{nested}/'}):
        (output,) = engine.generate([engine.request(0, [0], DecodeConfig(guide=guide, max_new_tokens=5))])
        assert set(output.completions[0].text or "") == {"a"}


def test_a_guide_beyond_the_limits_of_a_step_fails_alone(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance's limits of a step; the other rows continue."""
    from llguidance import LLParserLimits

    tight = LLParserLimits(step_lexer_fuel=2000, verbose_errors=False)
    monkeypatch.setattr("pipelines.engine.guide._limits", lambda: tight)
    engine = engine_of(chatty, 3, tokenizer="")
    hard = {"regex": "(.*[a-m].{9}|.*[h-z].{8}){3}"}
    decodes = [DRAWN, replace(DRAWN, guide={"choice": ["yes", "no"]})]
    good = [engine.request(i, [0, 70], decode) for i, decode in enumerate(decodes)]
    expected = [output.completions for output in sorted(engine.generate(good), key=lambda o: o.request_id)]
    bad = engine.request(2, [0, 70], replace(DRAWN, guide=hard))
    outputs = sorted(engine.generate([*good, bad]), key=lambda o: o.request_id)
    assert [output.completions for output in outputs[:2]] == expected
    with pytest.raises(
        UserError, match=r"decode\.guide takes too much work for this text \(.+\): give a simpler guide"
    ):
        raise outputs[2].error or AssertionError("no error")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real vocabularies of ../shared")
@each("name", ["llama2", "gpt2", "chatglm-6b", "llama3", "qwen2"], quick=["llama2", "gpt2"])
def test_real_vocabularies(name: str) -> None:
    """Every token that begins a choice is allowed, also two with equal bytes. Only Lark names special tokens."""
    tokenizer = load_tokenizer(SHARED / "data" / "tokenizers" / name)
    assert tokenizer is not None
    assert tokenizer.eos_token_id is not None
    size, eos = tokenizer.size + 64, tokenizer.eos_token_id  # as models pad their heads
    guides = Guides(tokenizer, size, frozenset({eos}))
    mask = int.from_bytes(guides.begin({"choice": ["yes", "</s><|endoftext|>"]}).mask(), "little")
    texts = (b"yes", b"</s><|endoftext|>")
    beginnings = {i for i in range(size) if (t := tokenizer.token_bytes(i)) and any(x.startswith(t) for x in texts)}
    assert {i for i in range(size) if mask >> i & 1} == beginnings
    named = guides.begin({"lark": f'start: {tokenizer.decode([eos], skip_special_tokens=False)} "!"'})
    mask = int.from_bytes(named.mask(), "little")
    assert [i for i in range(size) if mask >> i & 1] == [eos]


def test_requirements_of_a_guide(chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = DecodeConfig(guide={"regex": "a"})
    with pytest.raises(UserError, match=r"decode\.guide needs a tokenizer: give model\.tokenizer=PATH"):
        engine_of(chatty).request(0, [0], guide)
    write_llama(tmp_path, vocab_size=330)
    save(byte_fallback(), tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="decode.guide needs an EOS token, and the model has none"):
        engine_of(tmp_path, tokenizer="").request(0, [0], guide)
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UserError, match=r"decode\.guide needs the package llguidance: pip install 'quintet\[guide\]'$"):
        engine_of(chatty, tokenizer="").request(0, [0], guide)


def test_compiled_guides_are_kept(chatty: Path) -> None:
    tokenizer = load_tokenizer(chatty)
    guides = Guides(tokenizer, 330, frozenset({1}))
    first, second = guides.begin({"choice": ["a", "b"]}), guides.begin({"choice": ["a", "b"]})
    assert tokenizer is not None
    first.accept(tokenizer.encode("a", False)[0])
    assert first.is_complete
    assert not second.is_complete  # another state of the same grammar
    assert guides._compiled.cache_info().hits == 1


def test_refusals_are_kept(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated request gets the same error, and nothing is compiled again."""
    from pipelines.engine import guide as module

    engine, compiled, lark = engine_of(chatty, tokenizer=""), list[str](), module._lark
    monkeypatch.setattr(module, "_lark", lambda kind, value: compiled.append(kind) or lark(kind, value))  # type: ignore[func-returns-value]
    messages = []
    for _ in range(3):
        with pytest.raises(UserError, match="keywords that are not supported") as error:
            engine.request(0, [0], DecodeConfig(guide={"json_schema": {"type": "object", "unevaluatedItems": 1}}))
        messages.append(str(error.value))
    assert len(set(messages)) == 1
    assert compiled == ["json_schema"]
