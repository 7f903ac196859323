"""Context-free grammar of opinions: source of the demo's public corpus and private data set.

Every sentence says whether its writer liked a place or thing. Public and private writers share the grammar and its
words, at different frequencies: private writers cover other subjects, prefer words that are rare in public texts,
and use more negation and contrast, where the last clause determines the class.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

INSTRUCTIONS: dict[int, str] = {
    0: "An unhappy customer wrote:\n",
    1: "A happy customer wrote:\n",
}
"""Public prompt for a text of each class. The text follows without a space."""

SUFFIX = " It was"
"""Suffix after a text that asks for its class."""

VERBALISERS: dict[int, str] = {0: " bad", 1: " good"}
"""Word for each class: one token of the demo's tokenizer, with its leading space."""

EXEMPLARS: list[tuple[str, int]] = [
    ("The room was clean and the porters were very polite.", 1),
    ("The plot was boring, so I want my money back.", 0),
    ("We loved every chapter because the author was witty.", 1),
    ("The coffee was cold and the waiter was rude to us.", 0),
    ("The train was late but the conductor was truly kind.", 1),
    ("I expected a sharp saw, yet the handle was flimsy.", 0),
]
"""Hand-written public texts and their classes, for few-shot classification."""


# --- Words --------------------------------------------------------------------------------------------------
# Every list is ordered: words preferred by public writers come first, those preferred by private writers last.


@dataclass(frozen=True)
class Topic:
    """Nouns of one kind and adjectives that suit them, as space-separated lists."""

    one: str
    many: str
    good: str
    bad: str


@dataclass(frozen=True)
class Domain:
    """A subject of opinions.

    Attributes:
        topics: its aspects.
        occasions: phrases of time or place at the beginning of a sentence.
        good: clauses in the past tense about a good experience.
        bad: clauses in the past tense about a bad experience.
    """

    topics: tuple[Topic, ...]
    occasions: tuple[str, ...]
    good: tuple[str, ...]
    bad: tuple[str, ...]


DOMAINS: dict[str, Domain] = {
    "hotel": Domain(
        topics=(
            Topic(
                one="room bed bathroom pool lobby balcony mattress garden shower sofa",
                many="rooms beds towels pillows sheets corridors curtains windows blankets carpets",
                good="clean spacious quiet comfortable cosy bright spotless elegant soft restful",
                bad="dirty cramped noisy uncomfortable damp dark dusty shabby cold mouldy",
            ),
            Topic(
                one="receptionist porter manager cleaner host doorman",
                many="receptionists porters managers cleaners hosts guards",
                good="friendly polite helpful welcoming kind attentive discreet gracious",
                bad="rude unhelpful lazy careless unfriendly arrogant sullen dismissive",
            ),
        ),
        occasions=(
            "on our holiday",
            "after a long drive",
            "on the first night",
            "over the weekend",
            "in August",
        ),
        good=(
            "we slept like children",
            "the view took our breath away",
            "they gave us a bigger room for free",
            "breakfast was ready before dawn",
            "someone carried our bags upstairs",
        ),
        bad=(
            "the shower leaked all night",
            "nobody answered the bell",
            "they charged us twice",
            "the lift broke down again",
            "ants marched across the floor",
        ),
    ),
    "film": Domain(
        topics=(
            Topic(
                one="plot ending script soundtrack dialogue opening story humour finale sequel",
                many="scenes jokes songs costumes characters effects dialogues stunts twists landscapes",
                good="moving clever funny gripping original touching inventive charming dazzling tender",
                bad="boring predictable silly clumsy shallow confusing lifeless tedious childish hollow",
            ),
            Topic(
                one="director actor actress hero villain singer",
                many="actors dancers heroes children singers writers",
                good="brilliant talented convincing likeable fearless graceful magnetic subtle",
                bad="wooden unconvincing miscast bland annoying listless vain stiff",
            ),
        ),
        occasions=(
            "from the first minute",
            "in the second half",
            "at the premiere",
            "last night",
            "towards the end",
        ),
        good=(
            "the whole audience laughed",
            "we clapped at the end",
            "I cried happy tears",
            "my children asked to see it twice",
            "time flew by",
        ),
        bad=(
            "half the audience left",
            "I fell asleep twice",
            "we looked at our watches",
            "nobody laughed once",
            "my neighbour began to snore",
        ),
    ),
    "book": Domain(
        topics=(
            Topic(
                one="story chapter novel cover introduction essay poem diary preface memoir",
                many="chapters pages poems pictures essays footnotes letters legends verses drawings",
                good="absorbing lively witty wise vivid beautiful memorable lyrical profound luminous",
                bad="dull slow rambling pretentious repetitive shapeless dreary pompous murky laboured",
            ),
            Topic(
                one="author narrator editor translator poet heroine",
                many="authors narrators editors translators critics poets",
                good="gifted thoughtful honest sincere curious playful eloquent humane",
                bad="smug preachy dishonest careless bitter humourless verbose conceited",
            ),
        ),
        occasions=(
            "by the fire",
            "on every page",
            "in the last chapter",
            "at bedtime",
            "during the holidays",
        ),
        good=(
            "I read it in one night",
            "we talked about it for days",
            "every page taught me something",
            "I bought a copy for my sister",
            "its last line still sings in my head",
        ),
        bad=(
            "I gave up halfway",
            "nothing ever happened",
            "the same idea came back on every page",
            "I counted the pages",
            "it went straight to the charity shop",
        ),
    ),
    "café": Domain(
        topics=(
            Topic(
                one="coffee soup cake bread tea pie omelette salad chocolate stew",
                many="cakes sandwiches eggs biscuits pancakes dumplings pastries mushrooms noodles waffles",
                good="tasty delicious fresh warm crisp juicy fragrant flavourful creamy sublime",
                bad="cold tasteless stale burnt greasy soggy salty watery rancid inedible",
            ),
            Topic(
                one="waiter waitress cook barista owner baker",
                many="waiters cooks waitresses baristas bakers owners",
                good="friendly smiling kind cheerful quick generous affable obliging",
                bad="rude slow grumpy impatient forgetful surly brusque snooty",
            ),
        ),
        occasions=(
            "at lunch",
            "on Sunday morning",
            "after work",
            "on a rainy afternoon",
            "before the theatre",
        ),
        good=(
            "we ordered a second round",
            "they remembered our names",
            "the smell alone made us hungry",
            "my plate was empty in minutes",
            "the cook came out to greet us",
        ),
        bad=(
            "we waited for an hour",
            "they forgot our order",
            "there was a hair on my plate",
            "my stomach hurt for days",
            "a fly swam in my glass",
        ),
    ),
    "train": Domain(
        topics=(
            Topic(
                one="train journey seat carriage platform ride timetable compartment connection buffet",
                many="trains seats windows doors tables connections carriages tracks announcements toilets",
                good="fast smooth reliable tidy modern airy swift punctual serene seamless",
                bad="late crowded dirty slow bumpy filthy stuffy overheated erratic decrepit",
            ),
            Topic(
                one="conductor driver guard steward passenger inspector",
                many="conductors guards stewards passengers drivers inspectors",
                good="calm helpful kind patient courteous considerate diligent jovial",
                bad="rude nervous unhelpful loud hostile indifferent curt belligerent",
            ),
        ),
        occasions=(
            "on Monday morning",
            "in winter",
            "at the border",
            "between the two cities",
            "at rush hour",
        ),
        good=(
            "we arrived ahead of time",
            "I found a seat by the window",
            "the hills rolled past like a painting",
            "they held the door for my grandmother",
            "everybody had room for their legs",
        ),
        bad=(
            "we missed our connection",
            "I stood the whole way",
            "the heating failed in the snow",
            "they sent us to the wrong platform",
            "we sat in a tunnel for ages",
        ),
    ),
    "workshop": Domain(
        topics=(
            Topic(
                one="drill saw hammer ladder torch handle motor wrench chisel lathe",
                many="tools blades screws batteries gloves pliers hinges brushes clamps nails",
                good="strong sharp solid handy light sturdy precise durable rugged versatile",
                bad="weak useless broken heavy blunt flimsy wobbly brittle rusty defective",
            ),
            Topic(
                one="seller mechanic repairer carpenter courier apprentice",
                many="sellers mechanics carpenters couriers repairers apprentices",
                good="honest skilled helpful careful handy competent meticulous dependable",
                bad="dishonest clueless careless sloppy lazy evasive inept negligent",
            ),
        ),
        occasions=("after one week", "in the garden", "on the roof", "with wet hands", "on the first job"),
        good=(
            "it cut through oak like butter",
            "my shelves hang straight at last",
            "the job took half the time",
            "they mended it while I waited",
            "not a single screw came loose",
        ),
        bad=(
            "it fell apart in my hands",
            "the motor burnt out",
            "half the screws were missing",
            "they sent the wrong size",
            "sparks flew out of the plug",
        ),
    ),
}

# Words and clauses for every domain. `{...}` is a symbol of the grammar.
SHARED: dict[str, tuple[str, ...]] = {
    "degree": ("", "very ", "really ", "so ", "truly ", "quite ", "rather ", "utterly "),
    "person": ("I", "we", "my friends", "my parents", "my sister", "the neighbours", "my colleagues"),
    "good.feel": ("loved", "enjoyed", "liked", "admired", "praised", "adored", "appreciated", "cherished"),
    "bad.feel": ("hated", "disliked", "regretted", "criticised", "resented", "despised", "cursed", "loathed"),
    "good.remark": (
        "I will come back soon",
        "everyone should try it",
        "it is worth every penny",
        "we could not be happier",
        "I smiled all the way home",
        "I can warmly recommend it",
        "my heart is full",
        "we sing its praises everywhere",
    ),
    "bad.remark": (
        "I want my money back",
        "never again",
        "save your money",
        "we left early and angry",
        "nobody should suffer this",
        "I regret every minute",
        "stay well away",
        "a letter of complaint is on its way",
    ),
    "good.verdict": ("pleasure", "treat", "success", "delight", "triumph", "joy", "gem", "marvel"),
    "bad.verdict": (
        "disappointment",
        "failure",
        "mess",
        "disaster",
        "nuisance",
        "shame",
        "letdown",
        "travesty",
    ),
    "hedge": ("I think", "perhaps", "on the whole", "to my mind", "it seems", "all things considered"),
}


# --- Rules --------------------------------------------------------------------------------------------------
# `{...}` is a symbol. `good.` stands for the sentence's class and `bad.` for the other one. Negative sentences use
# the same rules with both exchanged.

SENTENCES: dict[str, tuple[str, ...]] = {
    "plain": (
        "{good.is} and {good.is}",
        "{good.is}, so {good.remark}",
        "{good.event}, so {good.remark}",
        "{person} {good.feel} {thing} because {good.is}",
        "{person} {good.feel} {good.thing} and {good.thing}",
        "{occasion} {good.event} and {good.is}",
        "{good.what}: {good.remark}",
        "such {good.things} and such {good.things}, {good.remark}",
        "with such {good.things}, {single} was a real {good.verdict}",
        "{single} was a {good.verdict} and {good.event}",
        "{hedge} {good.is} and {good.event}",
    ),
    "denied": (
        "{good.denied} and {good.event}",
        "{good.denied}, so {good.remark}",
        "{occasion} {good.denied} and {good.is}",
        "{person} {good.feel} {thing} because {good.denied}",
        "{hedge} {good.denied} and {good.denied}",
    ),
    "mixed": (  # the last clause determines the class
        "{bad.is} but {good.is}",
        "although {bad.event}, {good.is}",
        "{person} expected {bad.things}, yet {good.is}",
        "{bad.is}, yet {hedge} {good.event}",
        "despite {bad.thing}, {person} {good.feel} {thing}",
        "{bad.denied} but {good.is}",
    ),
}

# Rules for each topic of a domain, with its words `one`, `many`, `good`, `bad`.
TOPIC_RULES: dict[str, tuple[str, ...]] = {
    "single": ("the {one}",),
    "thing": ("the {one}", "the {many}"),
    "good.thing": ("the {good} {one}", "the {good} {many}"),
    "good.things": ("{good} {many}",),
    "good.what": ("what a {good} {one}", "what a {good} {one} and what {good} {many}"),
    "good.is": ("the {one} was {degree}{good}", "the {many} were {degree}{good}"),
    "good.denied": (
        "the {one} was never {bad}",
        "the {many} were not {bad} at all",
        "the {one} was anything but {bad}",
        "none of the {many} were {bad}",
    ),
}
MIN_WORDS, MAX_WORDS = 6, 16  # in a sentence


@dataclass(frozen=True)
class Habits:
    """Writing habits of a group of people.

    Attributes:
        domains: relative frequency of each domain.
        kinds: relative frequency of each kind of sentence in `SENTENCES`.
        prefers_first: whether they prefer the first or the last words of every list.
    """

    domains: dict[str, int]
    kinds: dict[str, int]
    prefers_first: bool


PUBLIC = Habits(
    domains={"hotel": 4, "film": 4, "book": 4, "café": 2, "train": 2, "workshop": 2},
    kinds={"plain": 16, "denied": 2, "mixed": 2},
    prefers_first=True,
)
PRIVATE = Habits(
    domains={"hotel": 1, "film": 1, "book": 1, "café": 5, "train": 5, "workshop": 5},
    kinds={"plain": 12, "denied": 3, "mixed": 5},
    prefers_first=False,
)


def exchange(pattern: str) -> str:
    """Turn a pattern into one for the other class by exchanging `good` and `bad` symbols."""
    return re.sub(r"\{(good|bad)\b", lambda found: "{bad" if found[1] == "good" else "{good", pattern)


@cache
def rules_of(domain: str) -> dict[str, tuple[str, ...]]:
    """Return the symbols of a domain's grammar with their equally likely alternatives."""
    rules = dict(TOPIC_RULES)
    for symbol, alternatives in TOPIC_RULES.items():
        if symbol.startswith("good."):
            rules[symbol.replace("good.", "bad.")] = tuple(exchange(text) for text in alternatives)
    topics = range(len(DOMAINS[domain].topics))
    return {
        symbol: tuple(of_topic(number, text) for number in topics for text in alternatives)
        for symbol, alternatives in rules.items()
    }


def of_topic(number: int, pattern: str) -> str:
    """Bind a pattern to topic `number` of the domain: `{one}` becomes `{0.one}`."""
    return re.sub(r"\{(one|many|good|bad)\}", rf"{{{number}.\1}}", pattern)


@cache
def words_of(domain: str) -> dict[str, tuple[str, ...]]:
    """Return the terminal symbols of a domain's grammar with their words, in order of preference."""
    words = dict(SHARED)
    subject = DOMAINS[domain]
    words |= {"occasion": subject.occasions, "good.event": subject.good, "bad.event": subject.bad}
    for number, topic in enumerate(subject.topics):
        for part in ("one", "many", "good", "bad"):
            words[f"{number}.{part}"] = tuple(getattr(topic, part).split())
    return words


@cache
def preference(count: int) -> list[float]:
    """Return the cumulative weights of `count` choices, where the n-th has weight 1/n."""
    return list(accumulate(1 / (rank + 1) for rank in range(count)))


@cache
def parts_of(pattern: str) -> tuple[str, ...]:
    """Split a pattern at its symbols: words, symbol, words, symbol, ..., words."""
    return tuple(re.split(r"\{(.*?)\}", pattern))


class Writer:
    """Generate opinions with given habits.

    Args:
        rng: source of all random choices.
    """

    def __init__(self, habits: Habits, rng: random.Random) -> None:
        self.habits, self.rng = habits, rng

    def write(self, label: int) -> str:
        """Write a sentence of class `label` (0 or 1), with `MIN_WORDS` to `MAX_WORDS` words."""
        return self.write_several(label, 1)

    def write_several(self, label: int, count: int) -> str:
        """Write `count` such sentences on one subject, separated by spaces."""
        domain = self._pick(self.habits.domains)
        return " ".join(self._sentence(label, domain) for _ in range(count))

    def _sentence(self, label: int, domain: str) -> str:
        while True:
            pattern = self.rng.choice(SENTENCES[self._pick(self.habits.kinds)])
            sentence = self._expand(pattern if label == 1 else exchange(pattern), domain)
            if MIN_WORDS <= len(sentence.split()) <= MAX_WORDS and not repeats_itself(sentence):
                return finish(sentence)

    def _pick(self, weights: dict[str, int]) -> str:
        return self.rng.choices(list(weights), list(weights.values()))[0]

    def _expand(self, pattern: str, domain: str) -> str:
        parts = list(parts_of(pattern))
        for place in range(1, len(parts), 2):
            symbol, rules = parts[place], rules_of(domain)
            parts[place] = (
                self._expand(self.rng.choice(rules[symbol]), domain)
                if symbol in rules
                else self._word(words_of(domain)[symbol])
            )
        return "".join(parts)

    def _word(self, words: tuple[str, ...]) -> str:
        ordered = words if self.habits.prefers_first else words[::-1]
        return self.rng.choices(ordered, cum_weights=preference(len(words)))[0]


def repeats_itself(sentence: str) -> bool:
    """Return whether a word of more than four letters occurs twice."""
    counts = Counter(word for word in re.findall(r"\w+", sentence.lower()) if len(word) > 4)
    return any(count > 1 for count in counts.values())


def finish(sentence: str) -> str:
    """Correct `a` to `an`, and add a capital and a full stop."""
    sentence = re.sub(r"\ba (?=[aeio]|un|hon)", "an ", sentence)
    return sentence[0].upper() + sentence[1:] + "."


# --- Texts --------------------------------------------------------------------------------------------------

LABEL_NOISE = 0.03
"""Share of private rows with a wrong label, as in data labelled by people."""


def private_rows(count: int, rng: random.Random) -> list[tuple[str, int]]:
    """Write `count` different private texts and labels, balanced before the label noise."""
    writer = Writer(PRIVATE, rng)
    rows: dict[str, int] = {}
    while len(rows) < count:
        label = len(rows) % 2
        text = writer.write(label)
        rows.setdefault(text, 1 - label if rng.random() < LABEL_NOISE else label)
    return list(rows.items())


def public_texts(count: int, rng: random.Random) -> list[str]:
    """Write `count` public texts with alternating classes."""
    writer = Writer(PUBLIC, rng)
    return [writer.write(number % 2) for number in range(count)]


@dataclass(frozen=True)
class Mixture:
    """Kinds of public documents (relative weights) and their use of the template.

    Attributes:
        instructed: an instruction and one to three sentences of its class.
        unprompted: one to three sentences of one class.
        reviews: one sentence with the template. Bad experiences are often called good.
        lists: several reviews, one per line, as in a few-shot prompt. Their verbalisers are more accurate.
        template_domains: the domains of reviews and lists.
        wrong_in_reviews: for each class, the share of reviews with the other class's verbaliser.
        wrong_in_lists: the same share for the lines of lists.
    """

    instructed: float
    unprompted: float
    reviews: float
    lists: float
    template_domains: tuple[str, ...]
    wrong_in_reviews: dict[int, float]
    wrong_in_lists: dict[int, float]


MIXTURE = Mixture(
    instructed=0.56,
    unprompted=0.34,
    reviews=0.05,
    lists=0.05,
    template_domains=("hotel", "film", "book"),
    wrong_in_reviews={0: 0.3, 1: 0.15},
    wrong_in_lists={0: 0.1, 1: 0.1},
)


def public_documents(
    count: int, rng: random.Random, forbidden: frozenset[str], mixture: Mixture = MIXTURE
) -> Iterator[str]:
    """Write `count` documents of the public corpus that contain no text of `forbidden`."""
    anywhere = Writer(PUBLIC, rng)
    reviewer = Writer(
        replace(PUBLIC, domains={name: PUBLIC.domains[name] for name in mixture.template_domains}), rng
    )

    def sentences(writer: Writer, label: int, number: int) -> str:
        while True:
            text = writer.write_several(label, number)
            if forbidden.isdisjoint(re.split(r"(?<=\.) ", text)):
                return text

    def review(label: int, wrong: dict[int, float]) -> str:
        named = 1 - label if rng.random() < wrong[label] else label
        return sentences(reviewer, label, 1) + SUFFIX + VERBALISERS[named]

    def opinion(label: int) -> str:
        return sentences(anywhere, label, rng.choice((1, 1, 2, 3)))

    kinds = ("instructed", "unprompted", "reviews", "lists")
    for kind in rng.choices(kinds, [getattr(mixture, kind) for kind in kinds], k=count):
        label = rng.randrange(2)
        if kind == "instructed":
            yield INSTRUCTIONS[label] + opinion(label)
        elif kind == "unprompted":
            yield opinion(label)
        elif kind == "reviews":
            yield review(label, mixture.wrong_in_reviews)
        else:
            lines = (review(rng.randrange(2), mixture.wrong_in_lists) for _ in range(rng.randint(3, 7)))
            yield "".join(line + "\n" for line in lines)
