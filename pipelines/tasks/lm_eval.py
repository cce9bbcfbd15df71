"""The engine as a model of lm-evaluation-harness.

The model is registered when this module is imported. Tokens, windows and stop strings follow lm_eval's `--model hf`, so
that results agree.
"""

import json
import math
import os
from collections.abc import Iterator
from itertools import groupby
from numbers import Real
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.tasks import EvaluateConfig
from pipelines.engine import Engine
from pipelines.jobs.scoring import Window, likelihoods
from pipelines.loading.load_engine import load_engine
from pipelines.tasks.evaluate_samples import DOCUMENT, Sample

BATCH_SIZE = 16
OPTIONS = ("model", "parallel", "quant", "decode", "device")
"""Config groups that `--model_args` may name; any other name is a setting such as quant.group_size."""
Numbers = dict[str, dict[str, Any]]
"""Metrics by task."""
BOOTSTRAP_DRAWS = 1000  # of metrics whose standard error has no formula
Z95 = 1.959963984540054  # standard errors from the mean to the end of a normal distribution's 95 % interval


@register_model("quintet")
class QuintetLM(TemplateLM):
    """An engine with the interface of lm_eval. `tokenizer` is the engine's tokenizer, from models/tokenizers."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        if engine.tokenizer is None:
            raise UserError("lm_eval asks by text, but there is no tokenizer: give model.tokenizer=PATH")
        if engine.capabilities.needs_whole_prompt:
            problem = "lm_eval scores tokens by those before them, but this model's prompts see themselves whole"
            raise UserError(f"{problem}: give another model")
        self._engine = engine
        self.tokenizer = engine.tokenizer
        self._max_length = engine.config.context.num_tokens

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "QuintetLM":
        """Return the model of `--model_args`: options of config groups, settings, and `pretrained` for model.path.

        Of the command's own arguments only `--batch_size` and `--device cpu` have an effect. With any other device, a
        GPU is used if there is one. Raises UserError for an unknown name or value.
        """
        from conf.compose import compose_run_config  # here, as in text_pipeline

        command, arguments = additional_config or {}, dict(arg_dict)
        path = arguments.pop("pretrained", None)
        size = arguments.pop("batch_size", command.get("batch_size") or BATCH_SIZE)
        if not str(size).isdecimal() or int(size) < 1:
            raise UserError(f"batch_size={size} is not allowed: give a number above 0")
        # lm_eval passes cuda:0 if the user gives no device, also on a machine without a GPU.
        arguments.setdefault("device", "cpu" if command.get("device") == "cpu" else "auto")
        if unknown := [name for name in arguments if name not in OPTIONS and "." not in name]:
            remedy = f"give one of {', '.join(OPTIONS)}, pretrained=FOLDER, or a setting such as quant.group_size=64"
            raise UserError(f"model_args has {unknown[0]}={arguments[unknown[0]]}, which does not exist: {remedy}")
        overrides = [f"{name}={_typed(value)}" for name, value in arguments.items()]
        run = compose_run_config(overrides, {} if path is None else {"model.path": str(path)})
        return cls(load_engine(run, int(size)))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "QuintetLM":
        """Return the model of `--model_args` as one string, "name=value,name=value"."""
        pairs = [pair.partition("=") for pair in arg_string.split(",") if pair]
        return cls.create_from_arg_obj({name.strip(): value for name, _, value in pairs}, additional_config)

    @property
    def eot_token_id(self) -> int:
        return self._special(self.tokenizer.eos_token_id, self.tokenizer.bos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text that has no context: BOS, else EOS."""
        return self._special(self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.source).replace("/", "__")

    def _special(self, *ids: int | None) -> int:
        for id in ids:
            if id is not None:
                return id
        problem = f"the tokenizer in {self.tokenizer.source} has neither BOS nor EOS, and lm_eval needs one"
        raise UserError(f"{problem}: give tokenizer_config.json its bos_token or eos_token")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return token ids, with special tokens unless the text begins with the prefix token or the caller decides."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id], False))
        return self.tokenizer.encode(string, add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the chat template, which lm_eval stores with its results."""
        if isinstance(chat_template, str):
            raise UserError(f"apply_chat_template={chat_template} is not allowed: give it without a name")
        return self.tokenizer.chat_template or "" if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text. Raises UserError as `Tokenizer.encode_messages` does."""
        text, _ = self.tokenizer.encode_messages(chat_history, None, add_generation_prompt)
        return text

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log likelihood, and whether it is greedy.

        A request is (name, context, continuation).
        """
        windows = []
        for _, context, continuation in requests:
            token_ids = (context + continuation)[-(self._max_length + 1) :]
            if not continuation:
                raise UserError("a continuation has no tokens in this model's vocabulary: give another one")
            if len(continuation) >= len(token_ids):
                limit = f"more than the model takes after one token of context ({self._engine.config.context})"
                raise UserError(f"a continuation has {len(continuation)} tokens, {limit}: give a shorter one")
            windows.append(Window(token_ids, len(continuation)))
        return [(score.log_likelihood, score.is_greedy) for score in likelihoods(self._engine, windows)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log likelihood of each text, in disjoint windows that follow one token of context."""
        pairs = [list(self._rolling(request.args[0])) for request in requests]
        scores = iter(self._loglikelihood_tokens([(None, *pair) for windows in pairs for pair in windows]))
        return [math.fsum(next(scores)[0] for _ in windows) for windows in pairs]

    def _rolling(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self._max_length,
            context_len=1,
        )
        return map(make_disjoint_window, windows)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each (prompt, settings), cut before its first stop string."""
        prepared, stops = [], []
        for index, request in enumerate(requests):
            text, settings = request.args
            num_tokens, decode = decode_of(settings)
            stops.append(decode.stop)
            room = self._max_length - num_tokens
            if room < 1:
                raise UserError(
                    f"max_gen_toks={num_tokens} leaves no room for a prompt ({self._engine.config.context}): give fewer"
                )
            prepared.append(self._engine.request(index, self.tok_encode(text)[-room:], decode))
        texts = [""] * len(requests)
        for output in self._engine.generate(prepared):
            if output.error:
                raise output.error
            # As in --model hf, the answer is decoded by itself, so a tokenizer may drop its first space.
            texts[output.request_id] = self.tokenizer.decode(output.completions[0].token_ids, skip_special_tokens=True)
        return [postprocess_generated_text(text, list(stop), None) for text, stop in zip(texts, stops, strict=True)]


def decode_of(settings: dict[str, Any]) -> tuple[int, DecodeConfig]:
    """Return the maximum of new tokens and the decode settings of a task's `generation_kwargs`.

    Raises UserError for an unknown name, and for values that are not allowed.
    """
    known = dict(normalize_gen_kwargs(settings))
    until = known.pop("until") or []
    sampled, temperature = known.pop("do_sample", False), known.pop("temperature", 1.0)
    num_tokens = int(known.pop("max_gen_toks"))
    decode: dict[str, Any] = {"max_new_tokens": num_tokens, "stop": [stop for stop in until if stop]}
    decode["temperature"] = temperature if sampled else 0.0
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "seed"):
        if name in known:
            decode[name] = known.pop(name)
    if known:
        name, value = next(iter(known.items()))
        raise UserError(f"generation_kwargs has {name}={value}, which lm_eval with quintet does not take: leave it out")
    return num_tokens, DecodeConfig(**decode)


def evaluate_tasks(engine: Engine, evaluate: EvaluateConfig) -> tuple[Numbers, list[Sample]]:
    """Return the metrics of `evaluate.tasks` with lm_eval's standard errors, and a sample per document.

    Raises UserError for an unknown task.
    """
    manager = TaskManager(include_path=evaluate.tasks_folder)
    if unknown := [name for name in evaluate.tasks if name not in manager.all_tasks]:
        remedy = "give one that lm_eval has, or the folder of its YAML file by evaluate.tasks_folder"
        raise UserError(f"evaluate.tasks={unknown[0]} does not exist: {remedy}")
    # lm_eval starts a process per core for the draws of a bootstrap, of which one works.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    results = simple_evaluate(
        model=QuintetLM(engine),
        tasks=list(evaluate.tasks),
        task_manager=manager,
        num_fewshot=evaluate.num_fewshot,
        limit=evaluate.limit,
        log_samples=True,
        bootstrap_iters=BOOTSTRAP_DRAWS,
    )
    samples = [sample for task, documents in results["samples"].items() for sample in _samples(task, documents)]
    return {task: _numbers(metrics) for task, metrics in results["results"].items()}, samples


def _samples(task: str, documents: list[dict[str, Any]]) -> Iterator[Sample]:
    """Yield a sample per document and answer filter."""
    for document in documents:
        yield {
            "kind": DOCUMENT,
            "id": f"{task}:{document['doc_id']}:{document['filter']}",
            "task": task,
            "filter": document["filter"],
            "input": f"{document['doc_hash'][:8]}{document['prompt_hash'][:8]}",
            "metrics": {name: float(document[name]) for name in document["metrics"] if _is_number(document[name])},
            "answer": json.loads(json.dumps(document["filtered_resps"], default=str), parse_constant=str),
        }


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return a task's metrics by name, each with `_stderr` and `_ci95`, or None where lm_eval has no standard error.

    The name includes the answer filter if a metric has several filters.
    """
    parts = [(name.partition(","), value) for name, value in metrics.items() if isinstance(value, int | float)]
    parts = [part for part in parts if part[0][1] and not part[0][0].endswith("_stderr")]
    numbers: dict[str, Any] = {}
    for metric, group in groupby(sorted(parts, key=lambda part: part[0]), key=lambda part: part[0][0]):
        filtered = list(group)
        for (_, _, name), value in filtered:
            full_name = metric if len(filtered) == 1 else f"{metric}.{name}"
            stderr = metrics.get(f"{metric}_stderr,{name}")
            stderr = float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None
            interval = None if stderr is None else [value - Z95 * stderr, value + Z95 * stderr]
            numbers |= {full_name: float(value), f"{full_name}_stderr": stderr, f"{full_name}_ci95": interval}
    return numbers


def _typed(value: object) -> str:
    return "null" if value is None else str(value)
