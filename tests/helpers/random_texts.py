"""Texts on which tokenizers differ, and random texts made of their parts."""

from collections.abc import Iterator, Sequence
from random import Random

ODD = [
    "",
    "a",
    " ",
    "  ",
    "\n",
    "\r\n\r\n  x",
    "\t\ta",
    "Hello world",
    "a" * 300,
    " " * 200 + "x",
    "\n" * 50,
    "don't WE'LL I'ſ it'S",
    "1234567 12 ½٣",
    "$100.00 €5",
    "!!!...---___ ??",
    "<0x0A>",
    "\x00\x01\x7f\x1f",
    "今天天气很好",
    "カタカナひらがな한국어",
    "नमस्ते ไทย עברית العربية",
    "𝓗𝓮𝓵𝓵𝓸 𠀀",
    "▁a ▁",
    "\ufeffx\u200b",
    "👩‍👩‍👧🇨🇳🙂 e\u0301 a\u0323\u0302 \u1100\u1161\u11a8 각 \u0344" + "x\u0300" + "\u0300" * 20,
    "def f(x):\n    return x**2  # ok\n\n\n",
    "\ue000\U000f0000\U0010ffff\U00040000",
]
LETTERS = (
    "aábcXYZ019 '  \n\r\t.,!?-_/\\\"(){}[]<>|▁ĠſßİıǅⅣ½²٣今天カ한é\u0301\u0323\u0345\u200d\u00a0\u3000\u2028👩🇨\x00\x1f\x85"
    "\u0f73\u1100\u1161\u11a8각\U00011938"
)
PLANES = [(0, 0x3000), (0, 0xD800), (0x1F000, 0x20000), (0x10000, 0x110000)]


def random_texts(special: Sequence[str], count: int) -> Iterator[str]:
    """Yield the difficult texts and random ones. special: texts of special tokens, which some of the texts contain."""
    yield from ODD
    chooser = Random(count)
    for _ in range(count):
        text = ""
        for _ in range(chooser.randrange(1, 12)):
            kind = chooser.random()
            if kind < 0.15 and special:
                text += chooser.choice(special)
            elif kind < 0.4:
                text += chooser.choice(ODD)
            elif kind < 0.5:
                text += chr(chooser.randrange(*chooser.choice(PLANES)))
            else:
                text += "".join(chooser.choices(LETTERS, k=chooser.randrange(1, 8)))
        yield text
