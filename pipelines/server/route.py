"""A route that reads a body: its request, its function and its answer."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from pipelines.server.api.answer_shapes import AnswerShape
from pipelines.server.api.conversation import Chat
from pipelines.server.api.requests import Body
from pipelines.server.engine_response import Result
from pipelines.server.engine_session import EngineSession


class Route(NamedTuple):
    """A route that reads a body."""

    kind: type[Body]
    answer: Callable[[Any, EngineSession, Chat], Coroutine[Any, Any, Result]]
    shape: type[AnswerShape]
    """Shape of a response that is not streamed."""
    prefix: str = ""
    """Prefix of the answer's id."""
    num_prompts: Callable[[Any], int] = lambda body: 1
    has_samples: bool = False
    """Whether the body and the server's settings can ask for several samples of a prompt. False: one sample."""
    statuses: tuple[int, ...] = ()
    """Further statuses of responses."""
    in_parts: bool = False
    """Whether the prompts of a request are computed in parts of at most `EngineSession.max_part`."""

    def num_sequences(self, body: Any, decode: Mapping[str, Any]) -> int:
        """Return the number of sequences of a request. `decode`: the server's defaults."""
        if not self.has_samples:
            return self.num_prompts(body)
        num_samples = getattr(body, "n", None) or decode.get("n") or 1
        return self.num_prompts(body) * max(
            num_samples, decode.get("num_return_sequences") or 1, decode.get("num_beams") or 1
        )
