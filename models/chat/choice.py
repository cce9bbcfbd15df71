"""Choose the chat format of a template: a written entry, the probe's description, or none."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from conf.errors import UserError, shortened
from models.chat.description import ChatFormat
from models.chat.entries import entries, matching_entries
from models.chat.history import HistoryForm, Ids
from models.chat.needles import CONTENT, Render, Renderings, answer, user
from models.chat.probe import Turn, derive, find_reasoning, histories, is_split, settled, takes_calls, turn_of
from models.chat.readback import reads_back
from models.chat.switch import Switch, find_switches

PROBED = "probed"


@dataclass(frozen=True)
class Choice:
    """The chat format in use, and how it was found."""

    name: str
    form: ChatFormat
    origin: str
    """config, entry, probe or refused."""
    reason: str = ""
    """Why the format has no calls."""
    history: HistoryForm = HistoryForm()
    switches: tuple[Switch, ...] = ()
    """The template's arguments that switch reasoning."""
    num_renderings: int = 0


def history_of(render: Render, form: ChatFormat) -> tuple[HistoryForm, str]:
    """Return the form of the history in which a template's calls are read by a given description, and a warning.

    The warning is empty if the calls are read back.
    """
    renderings = Renderings(render)
    try:
        written = [(history, turn_of(renderings, history)) for history in histories(renderings)]
        for history, turn in written:
            if turn and reads_back(renderings, form, history, turn):
                return settled(renderings, history), ""
        if written:
            return settled(renderings, written[0][0]), "it does not read the calls that the chat template writes"
        return settled(renderings, HistoryForm(written=form.calls)), ""
    except UserError as error:
        return HistoryForm(), shortened(str(error))


def choose(render: Render, template: str, control_tokens: Collection[str], names: Collection[str] = ()) -> Choice:
    """Return the format of a template.

    `control_tokens`: texts of the vocabulary's control tokens. `names`: the variables that the template reads. An
    entry must match the template or the vocabulary and read the template's calls; then the probe's description must.
    """
    renderings = Renderings(render)
    matching = matching_entries(template, control_tokens)
    try:
        choice = _read_choice(renderings, template, matching) or _unread_choice(renderings, template, matching)
        choice = replace(choice, switches=find_switches(renderings, names))
    except UserError as error:
        choice = Choice(PROBED, ChatFormat(), "refused", shortened(str(error)))
    return replace(choice, num_renderings=renderings.count)


def _read_choice(renderings: Renderings, template: str, matching: list[str]) -> Choice | None:
    """Return the first description that reads back the calls that a template writes."""
    for kind in ("entry", "probe"):
        for history in histories(renderings):
            turn = turn_of(renderings, history)
            if turn is None:
                continue
            if is_split(renderings, history, turn):
                history = replace(history, max_calls=1)
            for name, form in _forms(kind, renderings, history, turn, template, matching):
                if reads_back(renderings, form, history, turn):
                    history = settled(renderings, history)
                    is_named = form.calls is not None and "{name}" in form.calls.id_form
                    history = replace(history, ids=Ids.counted) if is_named else history
                    return Choice(name, form, kind, history=history)
    return None


def _forms(
    kind: str, renderings: Renderings, history: HistoryForm, turn: Turn, template: str, matching: list[str]
) -> Iterator[tuple[str, ChatFormat]]:
    if kind == "entry":
        yield from ((name, entries()[name].form) for name in matching)
    elif form := derive(renderings, history, turn, template):
        yield PROBED, form


def _unread_choice(renderings: Renderings, template: str, matching: list[str]) -> Choice:
    """Return the choice for a template whose calls are not read back.

    If it writes no calls, an entry that matches writes them into the content of the history.
    """
    is_plain = renderings.text([user(), answer(CONTENT)]) is not None
    is_written = next(histories(renderings), None) is not None
    if matching and is_plain and not is_written:
        form = entries()[matching[0]].form
        history = settled(renderings, HistoryForm(written=form.calls))
        return Choice(matching[0], form, "entry", history=history)
    history = settled(renderings, HistoryForm())
    turn = turn_of(renderings, history)
    reasoning = find_reasoning(renderings, history, turn, template) if turn else None
    if is_written:
        reason = "the calls that its chat template writes cannot be read back"
    elif takes_calls(renderings):
        reason = "its chat template writes no calls"
    else:
        reason = shortened(renderings.first_error)
    return Choice(PROBED, ChatFormat(reasoning), "refused", reason, history)
