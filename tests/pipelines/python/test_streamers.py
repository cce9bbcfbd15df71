"""Streamers: the pieces of every row join to the returned text; ends, exceptions and timeouts reach the consumer."""

import io
import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from pipelines import TextGenerationPipeline, TextIteratorStreamer, TextStreamer, pipeline
from tests.helpers.cases import each
from tests.helpers.small_tokenizers import TRICKY

PROMPTS = ["Once upon a time", TRICKY, "今天天气", "x"]
LENGTHS = {"max_new_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def pipe(chatty: Path) -> TextGenerationPipeline:
    return pipeline(
        "text_generation", model=chatty, device="cpu", overrides=["model.dtype=float32", "predict.batch_size=3"]
    )


def in_thread(
    pipe: TextGenerationPipeline, streamer: TextIteratorStreamer, prompts: Any, **arguments: Any
) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(pipe(prompts, streamer=streamer, **arguments))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


@each("full", [True, False])
@each("prompt", PROMPTS)
def test_pieces_of_one_prompt_join_to_its_text(pipe: TextGenerationPipeline, prompt: str, full: bool) -> None:
    streamer = TextIteratorStreamer(timeout=60)
    thread, results = in_thread(pipe, streamer, prompt, return_full_text=full, **LENGTHS)
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == results[0][0]["text_generation_text"][0]
    assert len(pieces) > 3
    assert next(streamer, "over") == "over"


def test_pieces_of_several_prompts_are_keyed_and_never_mixed(pipe: TextGenerationPipeline) -> None:
    streamer = TextIteratorStreamer(timeout=60)
    thread, results = in_thread(pipe, streamer, PROMPTS, **LENGTHS)
    rows = dict.fromkeys(range(len(PROMPTS)), "")
    order = []
    for row, piece in streamer:
        rows[row] += piece
        order.append(row)
    thread.join()
    assert list(rows.values()) == [row["text_generation_text"][0] for row in results[0]]
    assert order != sorted(order)  # both ran at the same time


def test_skip_prompt_leaves_the_prompt_out(pipe: TextGenerationPipeline) -> None:
    streamer = TextIteratorStreamer(pipe.tokenizer, skip_prompt=True, timeout=60)
    thread, results = in_thread(pipe, streamer, "Once", **LENGTHS)
    assert "Once" + "".join(streamer) == results_of(thread, results)


def results_of(thread: threading.Thread, results: list[Any]) -> str:
    thread.join()
    text: str = results[0][0]["text_generation_text"][0]
    return text


def test_exceptions_reach_the_consumer_and_the_caller(pipe: TextGenerationPipeline) -> None:
    streamer = TextIteratorStreamer(timeout=60)
    thread, results = in_thread(pipe, streamer, "word " * 500, **LENGTHS)
    with pytest.raises(UserError, match="prompt 0: the prompt has"):
        next(streamer)
    assert next(streamer, "over") == "over"
    thread.join()
    assert isinstance(results[0], UserError)


def test_exception_in_the_middle_of_generation(pipe: TextGenerationPipeline) -> None:
    class Broken(TextIteratorStreamer):
        def put(self, row: int, text: str) -> None:
            super().put(row, text)
            if self._queue.qsize() > 3:
                raise OSError("disk on fire")

    streamer = Broken(timeout=60)
    thread, _ = in_thread(pipe, streamer, "Once", **LENGTHS)
    thread.join()
    with pytest.raises(OSError, match="disk on fire"):
        list(streamer)
    assert pipe("Once", max_new_tokens=2)  # the pipeline still works


def test_timeout_is_honoured_and_is_also_queue_empty() -> None:
    streamer = TextIteratorStreamer(timeout=0.01)
    with pytest.raises(TimeoutError, match="no text for 0.01 seconds"):
        next(streamer)
    with pytest.raises(queue.Empty):
        next(streamer)


def test_no_thread_is_left_by_a_consumer_that_walks_away(pipe: TextGenerationPipeline) -> None:
    before = threading.active_count()
    streamer = TextIteratorStreamer(timeout=60)
    thread, _ = in_thread(pipe, streamer, "Once", **LENGTHS)
    next(streamer)
    del streamer
    thread.join(timeout=60)
    assert threading.active_count() == before


def test_a_streamer_serves_one_call_only(pipe: TextGenerationPipeline) -> None:
    streamer = TextIteratorStreamer(timeout=60)
    thread, results = in_thread(pipe, streamer, "Once", **LENGTHS)
    assert "".join(streamer) == results_of(thread, results)
    with pytest.raises(UserError, match="has served a call already: make a new one"):
        pipe("Once", streamer=streamer, **LENGTHS)
    assert next(streamer, "over") == "over"


def test_a_streamer_that_calls_its_pipeline_is_told_so(pipe: TextGenerationPipeline) -> None:
    class Calling(TextStreamer):
        def put(self, row: int, text: str) -> None:
            pipe("Twice")

    with pytest.raises(UserError, match="a streamer cannot call the pipeline that calls it: keep the text"):
        pipe("Once", streamer=Calling(), **LENGTHS)
    assert pipe("Once", max_new_tokens=1)  # its turn is over


def test_text_streamer_prints_rows_whole_and_in_order(pipe: TextGenerationPipeline) -> None:
    out = io.StringIO()
    results = pipe(PROMPTS, streamer=TextStreamer(file=out), max_new_tokens=20)
    assert out.getvalue() == "".join(row["text_generation_text"][0] + "\n" for row in results)


def test_text_streamer_prints_to_standard_output(
    pipe: TextGenerationPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    results = pipe("Once", streamer=TextStreamer(pipe.tokenizer), max_new_tokens=5)
    assert capsys.readouterr().out == results[0]["text_generation_text"][0] + "\n"


SAMPLES = {"n": 3, "temperature": 1.0, "seed": 5, "max_new_tokens": 15}


def test_every_sample_is_a_row_of_its_own(pipe: TextGenerationPipeline) -> None:
    """Counted like the texts of the results, also if a prompt sets its own number of samples."""
    rows = [{"prompt": "Once", "decode": {"n": 2}}, "x"]
    streamer = TextIteratorStreamer(timeout=60)
    thread, results = in_thread(pipe, streamer, rows, **SAMPLES)
    texts = dict.fromkeys(range(5), "")
    for row, piece in streamer:
        texts[row] += piece
    thread.join()
    assert list(texts.values()) == [text for result in results[0] for text in result["text_generation_text"]]
    assert len(set(texts.values())) == 5


def test_text_streamer_prints_samples_one_after_the_other(pipe: TextGenerationPipeline) -> None:
    out = io.StringIO()
    results = pipe(["Once", "x"], streamer=TextStreamer(file=out), **SAMPLES)
    assert out.getvalue() == "".join(f"{text}\n" for result in results for text in result["text_generation_text"])
    with pytest.raises(UserError, match="decode.num_beams=2 cannot be streamed"):
        pipe("Once", num_beams=2, streamer=TextStreamer(file=out))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@each(("stream", "printed"), [(Terminal(), r"a\x1b[2J\x9b"), (io.StringIO(), "a\x1b[2J\x9b")])
def test_text_streamer_shows_control_characters_where_a_terminal_would_obey_them(
    stream: io.StringIO, printed: str
) -> None:
    streamer = TextStreamer(file=stream)
    streamer.start(2)
    streamer.put(1, "\x1b[2J\x9b")  # waits for the other row
    for piece in ("a", "\x1b", "[2J\x9b\n"):
        streamer.put(0, piece)
    streamer.end_row(0)
    streamer.end_row(1)
    assert stream.getvalue() == f"{printed}\n\n{printed[1:]}\n"


def test_text_streamer_takes_a_writer_that_knows_no_terminals() -> None:
    written: list[str] = []

    class Writer:
        write = staticmethod(written.append)

        def flush(self) -> None:
            """Do nothing: no text is held back."""

    streamer = TextStreamer(file=Writer())  # type: ignore[arg-type]
    streamer.start(1)
    streamer.put(0, "a\x1b[2J")
    streamer.end_row(0)
    assert "".join(written) == "a\x1b[2J\n"


def test_a_bad_argument_reaches_the_consumer_too(pipe: TextGenerationPipeline) -> None:
    streamer = TextIteratorStreamer(timeout=60)
    thread, _ = in_thread(pipe, streamer, "Once", max_tokens=3)
    with pytest.raises(UserError, match="argument max_tokens does not exist"):
        next(streamer)
    thread.join()
