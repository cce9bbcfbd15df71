"""A tokenizer as data for a program without its libraries: the file `runner_tokenizer.json` of an export.

    tokens              texts of the vocabulary by id, null for missing ids
    added               added tokens, each {id, text, lstrip, rstrip, is_normalized}, found in a text as `AddedTokens`
                        finds them; normalized ones are found in the text after `normalizer`
    special             ids that decoding skips
    begin, end          ids around each prompt
    bos                 id of a prompt without tokens, or null
    normalizer          steps on the texts between added tokens that are not normalized
    splitter            steps on the texts between all added tokens
    merges              numbers: left id, right id, merged id and rank of each merge; the lowest rank is merged first,
                        of equal ranks the leftmost
    unknown             id of letters without a token; null: they are skipped
    fuses_unknown       whether consecutive unknown letters are one token
    bytes               ids of the byte tokens <0x00> to <0xFF>, which spell letters without a token; null for a missing
                        byte token; [] without byte fallback
    whole_words_first   whether a piece that is in the vocabulary becomes one token without merges
    decoder             steps on the texts of tokens
    pieces              null, or how sentencepiece joins pieces instead of `decoder`: whether the first piece of a text
                        loses a space, and whether the first piece after an added token does
    sets                sets of code points: first and last of each range
    white_space         number of the set that `lstrip` and `rstrip` strip

A step is a list of its name and its values.

    ["nfc", decompositions, classes, compositions]
        Unicode NFC. Lists of: code, decomposed codes, 0; code, class; first, second, composed code.
    ["replace", old, new]
    ["prepend", text, unless_there, only_first]
        Only to texts that are not empty. only_first: only at the beginning of the whole text.
    ["split", program, inverts, behavior]
        At the matches of a program (split_program.py). behavior: as in tokenizers.Split.
    ["letters", letters]
        One letter per byte. In the decoder: the bytes of tokens that consist of letters.
    ["byte_fallback"], ["fuse"], ["strip", letter, left, right], ["spaces", letter, drops_first]
        As the decoders of tokenizers.
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from tokenizers import AddedToken, normalizers, pre_tokenizers

from conf.errors import UserError
from models.tokenizers.split_program import (
    TESTED,
    Ranges,
    Sets,
    all_tested,
    compile_pattern,
    compile_text,
    members,
    pieces_of,
    ranges_of,
)
from models.tokenizers.token_decoder import LETTERS, steps

RUNNER_TOKENIZER = "runner_tokenizer.json"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel
BYTE_LETTERS = ["letters", sorted(LETTERS, key=LETTERS.__getitem__)]
BEHAVIORS = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")
Step = list[Any]


def form_of_backend(content: dict[str, Any]) -> dict[str, Any]:
    """Return the form of a tokenizer.json. Raises UserError with the feature that programs do not support."""
    sets, model, added = Sets(members), content["model"], content["added_tokens"]
    _check_model(model)
    tokens: dict[str, int] = model["vocab"]
    normalizer = [_normalizer(step) for step in _steps(content["normalizer"])]
    splitter = [instruction for step in _steps(content["pre_tokenizer"]) for instruction in _splitter(step, sets)]
    changes = [step for step in (*normalizer, *splitter) if step[0] != "nfc"]
    if any(
        step[0] == "prepend" and step[3] for step in changes[2:]
    ):  # the library treats several pieces as the first one
        raise UserError("its Metaspace has prepend_scheme=first behind other steps")
    if not content["decoder"]:
        raise UserError("it has no decoder")
    if any(token["single_word"] for token in added):
        raise UserError("an added token is a single_word")
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    merges = [(tokens[a], tokens[b], tokens[a + b], rank) for rank, (a, b) in enumerate(pairs)]
    return {
        "tokens": _by_id(tokens),
        **_added_form({token.pop("id"): AddedToken(**token) for token in added}, sets),
        "normalizer": normalizer,
        "splitter": splitter,
        "merges": [number for merge in merges for number in merge],
        "unknown": tokens[model["unk_token"]] if model["unk_token"] is not None else None,
        "fuses_unknown": model["fuse_unk"],
        "bytes": [tokens.get(f"<0x{byte:02X}>") for byte in range(256)] if model["byte_fallback"] else [],
        "whole_words_first": model["ignore_merges"],
        "decoder": [_decoder(step) for step in _steps(content["decoder"])],
        "pieces": None,
        "sets": sets.ranges,
    }


def form_of_ranks(
    ranks: Mapping[bytes, int], pattern: str, sets: Sets, added: Mapping[int, AddedToken]
) -> dict[str, Any]:
    """Return the form of a tiktoken vocabulary of ranks.

    Raises UserError for a pattern that programs do not support.
    """
    by_byte = BYTE_LETTERS[1]
    merges = [
        (ranks[token[:cut]], ranks[token[cut:]], rank, rank)
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return {
        "tokens": _by_id({"".join(by_byte[byte] for byte in token): rank for token, rank in ranks.items()}),
        **_added_form(added, sets),
        "normalizer": [],
        "splitter": [["split", compile_pattern(pattern, sets), False, "Isolated"], BYTE_LETTERS],
        "merges": [number for merge in merges for number in merge],
        "unknown": None,
        "fuses_unknown": False,
        "bytes": [],
        "whole_words_first": True,
        "decoder": [BYTE_LETTERS],
        "pieces": None,
        "sets": sets.ranges,
    }


def form_of_pieces(
    model: Any, added: Mapping[int, AddedToken], reads_added: bool, has_prefix_everywhere: bool
) -> dict[str, Any]:
    """Return the form of a vocabulary of pieces and scores. Raises UserError for features that programs do not support.

    `model`: sentencepiece's ModelProto. `reads_added`: whether `added` tokens are recognised in a text.
    `has_prefix_everywhere`: whether the text after an added token begins with a space, as the whole text does.
    """
    rules, pieces = model.normalizer_spec, [*enumerate(model.pieces)]
    normal = {piece.piece: id for id, piece in pieces if piece.type == piece.NORMAL}
    by_byte = {int(piece.piece[3:5], 16): id for id, piece in pieces if piece.type == piece.BYTE}
    joined = {piece.piece for _, piece in pieces if piece.type == piece.UNUSED and [*_halves(piece.piece, normal)]}
    refused = {
        "no byte-pair encoding": model.trainer_spec.model_type != model.trainer_spec.BPE,
        "rules that change letters": rules.precompiled_charsmap,
        "remove_extra_whitespaces": rules.remove_extra_whitespaces,
        "spaces behind words": model.trainer_spec.treat_whitespace_as_suffix or not rules.escape_whitespaces,
        "user-defined pieces": any(piece.type == piece.USER_DEFINED for _, piece in pieces),
        "unused pieces that others join to": joined,
        "bytes without a piece": len(by_byte) < 256,
        "letters without a piece": {*"".join(normal)} - normal.keys(),
    }
    if reasons := [reason for reason, is_met in refused.items() if is_met]:
        raise UserError(f"its sentencepiece model has {reasons[0]}")
    scores = sorted({piece.score for _, piece in pieces}, reverse=True)
    ranks = {score: rank for rank, score in enumerate(scores)}  # for equal scores the leftmost is merged
    merges = [
        (left, right, id, ranks[model.pieces[id].score])
        for piece, id in normal.items()
        for left, right in _halves(piece, normal)
    ]
    sets, prefix = Sets(members), ["prepend", "▁", False, not has_prefix_everywhere]
    return {
        "tokens": [
            model.trainer_spec.unk_surface if piece.type == piece.UNKNOWN else piece.piece for _, piece in pieces
        ],
        **_added_form(added, sets),
        **({} if reads_added else {"added": []}),
        "normalizer": [],
        "splitter": [["replace", " ", "▁"], *([prefix] if rules.add_dummy_prefix else [])],
        "merges": [number for merge in merges for number in merge],
        "unknown": None,
        "fuses_unknown": False,
        "bytes": [by_byte[byte] for byte in range(256)],
        "whole_words_first": False,
        "decoder": [],
        "pieces": [rules.add_dummy_prefix, has_prefix_everywhere],
        "sets": sets.ranges,
    }


def _halves(token: str, ids: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    for cut in range(1, len(token)):
        if token[:cut] in ids and token[cut:] in ids:
            yield ids[token[:cut]], ids[token[cut:]]


def _added_form(added: Mapping[int, AddedToken], sets: Sets) -> dict[str, Any]:
    listed = [
        {
            "id": id,
            "text": token.content,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "is_normalized": token.normalized,
        }
        for id, token in added.items()
    ]
    return {
        "added": listed,
        "special": [id for id, token in added.items() if token.special],
        "white_space": sets.number(_white_space()),
    }


def _check_model(model: dict[str, Any]) -> None:
    if model["type"] != "BPE":
        raise UserError(f"its model is {model['type']}")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model[name]:
            raise UserError(f"its model has {name}={model[name]!r:.80}")


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    return steps(part) if part else []


def _by_id(tokens: Mapping[str, int]) -> list[str | None]:
    listed: list[str | None] = [None] * (max(tokens.values(), default=-1) + 1)
    for token, id in tokens.items():
        listed[id] = token
    return listed


def _normalizer(part: dict[str, Any]) -> Step:
    match part:
        case {"type": "NFC"}:
            return ["nfc", *_nfc_tables()]
        case {"type": "Prepend", "prepend": text}:
            return ["prepend", text, False, False]
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if old:
            return ["replace", old, new]
        case _:
            raise UserError(f"its normalizer has {part['type']}")


def _splitter(part: dict[str, Any], sets: Sets) -> Iterator[Step]:
    match part:
        case {"type": "ByteLevel", "add_prefix_space": has_prefix, "use_regex": is_split}:
            if has_prefix:
                yield ["prepend", " ", True, False]
            if is_split:
                yield ["split", compile_pattern(GPT2_PATTERN, sets), False, "Isolated"]
            yield BYTE_LETTERS
        case {"type": "Metaspace", "replacement": letter, "prepend_scheme": scheme, "split": is_split}:
            yield ["replace", " ", letter]
            if scheme != "never":
                yield ["prepend", letter, True, scheme == "first"]
            if is_split:
                yield ["split", compile_text(letter, sets), False, "MergedWithNext"]
        case {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": inverts} if behavior in BEHAVIORS:
            ((kind, text),) = pattern.items()
            yield ["split", (compile_pattern if kind == "Regex" else compile_text)(text, sets), inverts, behavior]
        case {"type": "Digits", "individual_digits": is_each}:
            digits = _every_second(pre_tokenizers.Digits(individual_digits=False))
            yield ["split", [["set", sets.number(digits)], ["match"]], False, "Isolated" if is_each else "Contiguous"]
        case {"type": "Punctuation", "behavior": behavior} if behavior in BEHAVIORS:
            marks = _every_second(pre_tokenizers.Punctuation("contiguous"))
            yield ["split", [["set", sets.number(marks)], ["match"]], False, behavior]
        case _:
            raise UserError(f"its pre_tokenizer has {part['type']}")


def _decoder(part: dict[str, Any]) -> Step:
    match part:
        case {"type": "ByteLevel"}:
            return BYTE_LETTERS
        case {"type": "ByteFallback"}:
            return ["byte_fallback"]
        case {"type": "Fuse"}:
            return ["fuse"]
        case {"type": "Strip", "content": letter, "start": left, "stop": right}:
            return ["strip", letter, left, right]
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if old:
            return ["replace", old, new]
        case {"type": "Metaspace", "replacement": letter, "prepend_scheme": scheme}:
            return ["spaces", letter, scheme != "never"]
        case _:
            raise UserError(f"its decoder has {part['type']}")


@cache
def _white_space() -> Ranges:
    kept = pieces_of(pre_tokenizers.WhitespaceSplit(), all_tested())
    return ranges_of("".join({*all_tested()} - {*"".join(kept)}))


def _every_second(cut: Any) -> Ranges:
    """Return the code points that a pre-tokenizer separates from other text.

    They are every second piece, because the tested text begins with other text.
    """
    return ranges_of("".join(pieces_of(cut, all_tested())[1::2]))


@cache
def _nfc_tables() -> tuple[list[int], list[int], list[int]]:
    """Return the NFC tables in the Unicode version of `tokenizers`, without Hangul, which is computed."""
    letters = [chr(code) for code in TESTED if code and not 0xAC00 <= code < 0xD7A4]
    nfd, nfc = normalizers.NFD().normalize_str, normalizers.NFC().normalize_str

    def map_texts(form: Callable[[str], str], texts: Iterable[str]) -> list[str]:
        return form("\0".join(texts)).split("\0")

    decomposed = {letter: form for letter, form in zip(letters, map_texts(nfd, letters), strict=True) if form != letter}
    # A mark of a class other than 0 sorts before U+0345, whose class is the highest.
    marked = map_texts(nfd, ("\u0345" + letter for letter in letters))
    marks = [m for m, form in zip(letters, marked, strict=True) if m not in decomposed and form.startswith(m)]
    composed = map_texts(nfc, decomposed)
    pairs = [
        (nfc(decomposed[c][:-1]), decomposed[c][-1], c)
        for c, form in zip(decomposed, composed, strict=True)
        if form == c
    ]
    return (
        [code for letter, form in decomposed.items() for code in (ord(letter), *map(ord, form), 0)],
        [code for mark in marks for code in (ord(mark), unicodedata.combining(mark))],
        [ord(letter) for pair in pairs for letter in pair],
    )
