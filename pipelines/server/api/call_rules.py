"""The rules of a Lark grammar for llguidance, over texts and the special tokens of one vocabulary."""

import json
import re
from collections.abc import Iterable

from conf.guides import MAX_BYTES, MAX_LARK_RULES
from models.tokenizers.base import Tokenizer
from pipelines.server.api.errors import bad_request

ANY_TEXT = "/(?s:.*)/"
BLANKS = r"/[ \n]{1,4}/"
SPARE_RULES = 8
"""Rules of a grammar besides those that Rules counts."""


class Literals:
    """Writes literals of a grammar for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, literals: Iterable[str]) -> None:
        """`literals`: the special tokens that occur in these texts are written as tokens."""
        texts = list(literals)
        self._control_texts = tokenizer.control_texts
        names = [name for name in tokenizer.special_texts if any(name in text for text in texts)]
        ids = {name: tokenizer.special_token_id(name) for name in names}
        self._ids = {name: id for name, id in ids.items() if id is not None}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else "(?!)")

    def has_token(self, text: str) -> bool:
        """Return whether the vocabulary has a token of its own, special or not, for a part of a text."""
        return any(name.strip() and name in text for name in self._control_texts)

    def parts(self, text: str) -> list[str]:
        """Return the expressions of a text in order: texts, and tokens such as `<[5]>`."""
        pieces = [piece for piece in self._pattern.split(text) if piece]
        return [f"<[{self._ids[piece]}]>" if piece in self._ids else quoted(piece) for piece in pieces]

    def __call__(self, text: str) -> str:
        """Return a text as a grammar expression; "" for the empty text."""
        return " ".join(self.parts(text))


class Rules:
    """Collects rules. Equal rules are written once."""

    def __init__(self, literal: Literals) -> None:
        self.literal = literal
        self._names: dict[str, str] = {}
        self._rules: dict[str, str] = {}
        self._size = 0

    @property
    def lines(self) -> list[str]:
        return list(self._rules.values())

    def name(self, key: str, kind: str) -> tuple[str, bool]:
        """Return the name of the rule with this key, and whether it is new: its expression is `put` then."""
        is_new = key not in self._names
        if is_new and len(self._names) >= MAX_LARK_RULES - SPARE_RULES:
            message = f"the tools need a grammar of more than {MAX_LARK_RULES} rules: give fewer or simpler tools"
            raise bad_request(message, "tools")
        return self._names.setdefault(key, f"{kind}_{len(self._names)}"), is_new

    def put(self, name: str, expression: str, attribute: str = "") -> None:
        line = f"{name}{attribute}: {expression}"
        self._size += len(line)
        if self._size > MAX_BYTES:
            message = f"the tools need a grammar of more than {MAX_BYTES} bytes: give fewer or simpler tools"
            raise bad_request(message, "tools")
        self._rules[name] = line

    def rule(self, expression: str, kind: str = "r", attribute: str = "") -> str:
        """Return the name of a rule with this expression. A name in capitals is a terminal's."""
        name, is_new = self.name(f"{kind}{attribute} {expression}", kind)
        if is_new:
            self.put(name, expression, attribute)
        return name

    def until(self, close: str, text: str = ANY_TEXT, is_limited: bool = False) -> str:
        """Return the expression of a text that a literal ends, and of the literal.

        `text`: the expression of the text, one regular expression or terminal. `is_limited`: the text cannot hold the
        beginning of the literal. llguidance ends a lexeme at a suffix, which cannot hold special tokens.
        """
        parts = self.literal.parts(close)
        if not parts:
            raise ValueError("a text without an end")
        if parts[0].startswith("<["):
            return joined(text, *parts)
        before = self.rule(text, "until", f"[suffix={parts[0]}]")
        if len(parts) == 1:
            return before
        return joined(before if is_limited else f"{before}+", *parts[1:])


def quoted(text: str) -> str:
    """Return a text as an expression without special tokens."""
    return json.dumps(text, ensure_ascii=False)


def joined(*expressions: str) -> str:
    return " ".join(filter(None, expressions))


def either(expressions: Iterable[str]) -> str:
    """Return the expression of one of several."""
    options = list(dict.fromkeys(expressions))
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def regex(text: str) -> str:
    """Return a regular expression as it stands between slashes in a grammar."""
    escapes = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
    return re.sub(r"\\.|[/\n\r]", lambda match: escapes.get(match[0], match[0]), text, flags=re.DOTALL)


def searched(pattern: str) -> str:
    """Return the regular expression of the texts in which a JSON schema's pattern occurs."""
    starts, ends = pattern.startswith("^"), pattern.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$$", pattern)
    core = pattern[starts : len(pattern) - ends]
    if core != pattern and re.search(r"(?<!\\)\|", core) and not _is_group(core):
        starts, ends, core = False, False, pattern
    return f"{'' if starts else '(?s:.*)'}(?:{regex(core)}){'' if ends else '(?s:.*)'}"


def _is_group(text: str) -> bool:
    """Whether brackets enclose all alternatives of a pattern."""
    depth = 0
    for match in re.finditer(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", text):
        depth += (match[0] == "(") - (match[0] == ")")
        if match[0] == "|" and depth == 0:
            return False
    return True
