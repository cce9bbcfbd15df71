"""The training text of the bundled model `tiny`, generated from a seed.

There are four kinds of documents: short stories in simple English, statements about things and places, Chinese
sentences, and questions with answers that can be checked. The hash of a question's text decides whether it belongs to
the held-out tenth or to the training text. A held-out question is therefore never in the training text.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NAMES = (
    "Tom Mia Ben Lily Sam Anna Max Ella Jack Rosa Leo Nina Tim Zoe Dan Lucy Omar Ivy Finn Maya Paul Emma Hugo Sara Noah Ruby Adam Jane "
    "Otto Vera"
).split()
BOYS = set("Tom Ben Sam Max Jack Leo Tim Dan Omar Finn Paul Hugo Noah Adam Otto".split())
COLOURS = "red blue green yellow white black brown pink orange purple".split()
THINGS = "ball cup hat book kite box bag key bell drum toy car boat coat shoe lamp pen map ring doll".split()
SIZES = "big small little tiny huge old new shiny soft round".split()
ANIMALS = (
    "cat dog bird fox bear duck frog fish mouse rabbit horse cow sheep goat owl pig llama lion panda turtle".split()
)
PLACES = "park garden forest beach farm lake river hill market school library kitchen field bridge village".split()
FOODS = "apples bread soup cake rice honey cheese berries carrots noodles pears cookies".split()
WEATHER = "sunny rainy windy cold warm snowy cloudy bright".split()
CITIES = "Beijing Paris London Shanghai Rome Cairo Tokyo Lima Berlin Oslo Madrid Delhi".split()
OPPOSITES = (
    "hot cold|big small|up down|day night|fast slow|happy sad|old new|open closed|wet dry|light dark|full empty|high low|loud quiet|"
    "hard soft|near far|early late|left right|long short"
)
PAIRS = [(a, b) for a, b in (pair.split() for pair in OPPOSITES.split("|"))]
HOMES = {
    "bird": "a nest", "fish": "the water", "bear": "a cave", "fox": "a den", "cow": "a barn", "dog": "a house", "llama": "the mountains",
    "panda": "the bamboo forest", "lion": "the grassland", "owl": "a tree", "frog": "a pond", "mouse": "a hole", "horse": "a stable",
}  # fmt: skip
DEEDS = {
    "bird": "sings in the morning", "fish": "swims all day", "bear": "loves honey", "fox": "runs fast", "cow": "gives milk",
    "dog": "guards the door", "llama": "has soft wool", "panda": "eats bamboo", "lion": "has a loud roar", "owl": "wakes at night",
    "frog": "jumps high", "mouse": "likes cheese", "horse": "carries people",
}  # fmt: skip

CN_NAMES = "小明 小红 小华 小丽 小刚 小芳 小军 小美".split()
CN_FOODS = "苹果 米饭 面条 香蕉 鸡蛋 西瓜 饺子 牛奶".split()
CN_PLACES = "公园 学校 北京 上海 图书馆 商店 河边 山上".split()
CN_THINGS = "苹果 铅笔 书 球 气球 糖 鸡蛋 杯子".split()
CN_DEEDS = "看书 唱歌 跑步 画画 游泳 放风筝 打球 听音乐".split()
CN_WEATHER = "晴天 雨天 雪天 阴天".split()

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Question:
    """A question and its only correct answer. Answers are compared as whole strings."""

    kind: str
    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether the question is left out of the training text, as a tenth of all questions, selected by sha256, are."""
        return hashlib.sha256(self.prompt.encode()).digest()[0] < 26


# --- stories -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cast:
    """The people and things of a story. They are chosen once, so that the whole story is consistent."""

    name: str
    friend: str
    thing: str
    colour: str
    size: str
    animal: str
    place: str
    food: str
    weather: str

    @property
    def he(self) -> str:
        return "he" if self.name in BOYS else "she"

    @property
    def his(self) -> str:
        return "his" if self.name in BOYS else "her"

    @property
    def him(self) -> str:
        return "him" if self.name in BOYS else "her"


def _cast(rng: random.Random) -> Cast:
    name, friend = rng.sample(NAMES, 2)
    pick = rng.choice
    return Cast(
        name, friend, pick(THINGS), pick(COLOURS), pick(SIZES), pick(ANIMALS), pick(PLACES), pick(FOODS), pick(WEATHER)
    )


def _opening(c: Cast, rng: random.Random) -> str:
    child = "boy" if c.name in BOYS else "girl"
    return rng.choice(
        [
            f"Once upon a time, there was a {rng.choice(['little', 'young', 'kind', 'clever'])} {child} named {c.name}.",
            f"Once upon a time, a {child} named {c.name} lived near a {c.place}.",
            f"One {c.weather} day, {c.name} went to the {c.place}.",
            f"{c.name} was a {rng.choice(['kind', 'clever', 'quiet', 'cheerful'])} {child} who liked to play in the {c.place}.",
            f"It was a {c.weather} morning, and {c.name} was in the {c.place}.",
        ]
    )


def _lost(c: Cast, rng: random.Random) -> list[str]:
    where = rng.choice(["under a tree", "behind a rock", "near the door", "in the tall grass", "on a bench"])
    return [
        f"{c.name} had a {c.size} {c.colour} {c.thing}.",
        rng.choice(
            [f"{c.he.title()} loved the {c.thing} very much.", f"{c.he.title()} took the {c.thing} everywhere."]
        ),
        f"One day, {c.name} could not find the {c.thing}.",
        rng.choice(
            [
                f"{c.he.title()} was very sad and began to cry.",
                f"{c.he.title()} looked and looked, but it was not there.",
            ]
        ),
        f'"{rng.choice(["Do not worry", "Do not cry", "Let us look together"])}," said {c.friend}. "I will help you."',
        f"They looked in the {c.place}, and {c.friend} saw something {c.colour} {where}.",
        f"It was the {c.thing}!",
        f'"Thank you, {c.friend}," said {c.name}, and {c.he} was happy again.',
    ]


def _friend(c: Cast, rng: random.Random) -> list[str]:
    mood = rng.choice(["shy", "sad", "hungry", "scared", "tired"])
    gift = c.food if mood == "hungry" else f"{c.his} {c.colour} {c.thing}"
    return [
        f"In the {c.place}, {c.he} met a {c.size} {c.animal}.",
        f"The {c.animal} was {mood}.",
        f'"Why are you {mood}?" asked {c.name}.',
        rng.choice([f'"I have no friends," said the {c.animal}.', f'"I am far from home," said the {c.animal}.']),
        f"{c.name} gave the {c.animal} {gift}.",
        f'"You are very kind," said the {c.animal}.',
        f"From that day on, {c.name} and the {c.animal} were best friends.",
    ]


def _share(c: Cast, rng: random.Random) -> list[str]:
    return [
        f"{c.name} had a bag of {c.food}.",
        f"{c.friend} came to the {c.place} and was hungry.",
        f'"May I have some {c.food}?" asked {c.friend}.',
        rng.choice([f"At first, {c.name} did not want to share.", f"{c.name} thought about it for a moment."]),
        f"Then {c.he} smiled and gave half of the {c.food} to {c.friend}.",
        f"They sat down and ate the {c.food} together.",
        rng.choice(["The food tasted even better that way.", f"{c.name} learned that sharing is fun."]),
    ]


def _storm(c: Cast, rng: random.Random) -> list[str]:
    return [
        f"{c.he.title()} wanted to fly a {c.colour} kite with {c.friend}.",
        rng.choice(["Suddenly, the sky became dark.", "Then a strong wind began to blow."]),
        f"The rain fell, and a {c.size} {c.animal} ran to them.",
        f'"Come under my coat," said {c.name} to the {c.animal}.',
        f"They waited in the {rng.choice(['barn', 'house', 'shop', 'hut'])} until the rain stopped.",
        rng.choice(["Then a rainbow came out.", "Soon the sun came out again."]),
        f'"What a day!" said {c.friend}, and they all laughed.',
    ]


def _garden(c: Cast, rng: random.Random) -> list[str]:
    grown = rng.choice(["flowers", "carrots", "beans", "roses", "pumpkins"])
    return [
        f"{c.name} wanted to grow {grown} in the garden.",
        f"{c.he.title()} put the seeds in the ground and gave them water.",
        "Every day, " + c.he + " looked at the ground, but nothing grew.",
        f'"Be patient," said {c.friend}. "Good things take time."',
        f"So {c.name} waited, and gave water, and waited some more.",
        f"One {c.weather} morning, the garden was full of {c.colour} {grown}.",
        f"{c.name} was so proud that {c.he} danced with {c.friend}.",
    ]


def _bake(c: Cast, rng: random.Random) -> list[str]:
    return [
        f"{c.name} and {c.friend} wanted to make a {c.size} cake for the {c.animal}.",
        f"They needed milk, eggs and {c.food}.",
        rng.choice([f"{c.friend} dropped the eggs on the floor.", f"{c.friend} forgot to look at the clock."]),
        f'"Oh no!" said {c.friend}. "I am sorry."',
        f'"It is all right," said {c.name}. "We can try again."',
        "They tried again, and this time the cake was perfect.",
        f"The {c.animal} ate it all and said thank you.",
    ]


ARCS: list[Callable[[Cast, random.Random], list[str]]] = [_lost, _friend, _share, _storm, _garden, _bake]


def story(rng: random.Random) -> str:
    c = _cast(rng)
    sentences = [_opening(c, rng), *rng.choice(ARCS)(c, rng)]
    if rng.random() < 0.4:
        sentences.append(
            rng.choice(
                ["The end.", f"That night, {c.name} slept well.", f"It was a good day for {c.name} and {c.friend}."]
            )
        )
    cut = rng.randint(3, 5)
    return " ".join(sentences[:cut]) + rng.choice([" ", "\n"]) + " ".join(sentences[cut:])


# --- statements and Chinese sentences ----------------------------------------------------------------


def statement(rng: random.Random) -> str:
    lines = []
    for _ in range(rng.randint(2, 4)):
        animal, city = rng.choice(list(HOMES)), rng.choice(CITIES)
        reason = rng.choice(
            [
                "the people are kind",
                "the food is good",
                "the streets are full of life",
                "I have many friends there",
                "the parks are green",
            ]
        )
        second = rng.choice(["I go there every summer", "my family lives there", "there is always something to see"])
        name = "LLaMA" if animal == "llama" and rng.random() < 0.5 else f"A {animal}" if animal != "owl" else "An owl"
        lines.append(
            rng.choice(
                [
                    f"I love {city}, because {reason} and {second}.",
                    f"{rng.choice(NAMES)} wants to visit {city}, because {reason}.",
                    f"{name} is an animal that lives in {HOMES[animal]}. It {DEEDS[animal]}.",
                    f"{name} is a {rng.choice(['kind', 'clever', 'quiet', 'strong'])} animal that {DEEDS[animal]}.",
                    "The opposite of {} is {}.".format(*rng.choice(PAIRS)),
                    f"On a {rng.choice(WEATHER)} day, people like to go to the {rng.choice(PLACES)}.",
                ]
            )
        )
    return " ".join(lines)


def chinese(rng: random.Random) -> str:
    pick = rng.choice
    lines = []
    for _ in range(rng.randint(2, 5)):
        name, friend = rng.sample(CN_NAMES, 2)
        lines.append(
            pick(
                [
                    f"今天是{pick(CN_WEATHER)}，{name}和{friend}一起去{pick(CN_PLACES)}{pick(CN_DEEDS)}。",
                    f"{name}喜欢吃{pick(CN_FOODS)}，{friend}喜欢吃{pick(CN_FOODS)}。",
                    f"{name}在{pick(CN_PLACES)}{pick(CN_DEEDS)}，很高兴。",
                    f"我爱{pick(['北京', '上海'])}，因为那里的人很好，{pick(CN_FOODS)}也很好吃。",
                    f"早上，{name}吃了{pick(CN_FOODS)}，然后去{pick(CN_PLACES)}。",
                    f"{name}说：“你好！”{friend}说：“你好，我们一起{pick(CN_DEEDS)}吧。”",
                ]
            )
        )
    return "".join(lines)


# --- questions ---------------------------------------------------------------------------------------


# Each kind returns the rounds of one dialogue. The first question contains all facts; later questions refer to them.


def _add(rng: random.Random) -> list[Question]:
    a, b = rng.randint(0, 49), rng.randint(0, 49)
    return [Question("add", rng.choice([f"What is {a} + {b}?", f"How much is {a} plus {b}?"]), str(a + b))]


def _subtract(rng: random.Random) -> list[Question]:
    b, a = sorted((rng.randint(0, 49), rng.randint(0, 49)))
    return [Question("subtract", rng.choice([f"What is {a} - {b}?", f"How much is {a} minus {b}?"]), str(a - b))]


def _larger(rng: random.Random) -> list[Question]:
    a, b = rng.sample(range(100), 2)
    return [Question("larger", f"Which number is larger, {a} or {b}?", str(max(a, b)))]


def _next(rng: random.Random) -> list[Question]:
    a = rng.randint(0, 98)
    return [Question("next", f"{rng.choice(NAMES)} counts to {a}. What number comes next?", str(a + 1))]


def _pairs(rng: random.Random) -> list[Question]:
    count = rng.randint(2, 4)
    return _looked_up("pair", rng.sample(THINGS + ANIMALS, count), rng.sample(COLOURS + FOODS, count), rng)


def _teams(rng: random.Random) -> list[Question]:
    names = rng.sample(NAMES, 2 * rng.randint(2, 4))
    return _looked_up("team", names[0::2], names[1::2], rng)


def _looked_up(kind: str, keys: list[str], values: list[str], rng: random.Random) -> list[Question]:
    """Return questions that look up a value by its key.

    The answer repeats the key, because the value follows it in the prompt.
    """
    rows = [f"{key} {value}" for key, value in zip(keys, values, strict=True)]
    rounds = [Question(kind, f"Which {kind} has {key}?", row) for key, row in zip(keys, rows, strict=True)]
    rng.shuffle(rounds)
    first = rounds[0]
    prompt = f"{kind.title()}s: {', '.join(rows)}. {first.prompt}"
    return [Question(kind, prompt, first.answer), *rounds[1:]]


def _word(rng: random.Random) -> list[Question]:
    words = rng.sample(THINGS + ANIMALS + COLOURS, 4)
    which = rng.choice(["first", "last"])
    prompt = f"What is the {which} word in this list: {', '.join(words)}?"
    return [Question("word", prompt, words[0 if which == "first" else -1])]


def _repeat(rng: random.Random) -> list[Question]:
    words = " ".join(rng.sample(THINGS + ANIMALS + COLOURS + FOODS + NAMES, rng.randint(2, 8)))
    return [Question("repeat", f"Say this again: {words}", words)]


def _opposite(rng: random.Random) -> list[Question]:
    pair = rng.choice(PAIRS)
    a, b = pair if rng.random() < 0.5 else pair[::-1]
    return [Question("opposite", f"{rng.choice(NAMES)} asks: what is the opposite of {a}?", b)]


def _chinese_sum(rng: random.Random) -> list[Question]:
    a, b, thing = rng.randint(1, 20), rng.randint(1, 20), rng.choice(CN_THINGS)
    prompt = f"{rng.choice(CN_NAMES)}有{a}个{thing}，又买了{b}个{thing}，一共有几个{thing}？"
    return [Question("chinese", prompt, f"{a + b}个{thing}")]


KINDS: list[Callable[[random.Random], list[Question]]] = [
    _pairs, _pairs, _teams, _teams, _repeat, _add, _add, _subtract, _subtract, _larger, _next, _word, _opposite, _chinese_sum,
]  # fmt: skip


def questions(seed: int, held_out: bool) -> Iterator[list[Question]]:
    """Yield rounds without end. `held_out`: whether all first questions are held out, or none."""
    rng = random.Random(seed)
    while True:
        rounds = rng.choice(KINDS)(rng)
        if rounds[0].held_out == held_out:
            yield rounds


def dialogue(rounds: list[Question]) -> str:
    """Format the rounds in ChatML, as the tokenizer's chat template does, without the initial BOS."""
    return "".join(
        f"{TURN_START}user\n{q.prompt}{TURN_END}\n{TURN_START}assistant\n{q.answer}{TURN_END}\n" for q in rounds
    )


def documents(seed: int) -> Iterator[str]:
    """Yield training documents without end. They depend only on `seed`."""
    rng = random.Random(seed)
    question_texts = questions(rng.randrange(2**32), held_out=False)
    while True:
        kind = rng.random()
        if kind < 0.12:
            yield story(rng)
        elif kind < 0.17:
            yield statement(rng)
        elif kind < 0.22:
            yield chinese(rng)
        else:
            yield dialogue([question for _ in range(rng.randint(1, 4)) for question in next(question_texts)])
