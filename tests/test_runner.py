"""The C++ runner compared with the engine: the same tokens from the same export; invalid settings are one line."""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from conf.decoding import DecodeConfig
from conf.quantization import BlockActivations, QuantConfig, QuantScheme
from conf.schema import DType, RunConfig
from kernels import build
from models.exported.description import EXPORT, GRAPH, WEIGHTS
from models.tokenizers import Tokenizer
from models.tokenizers.huggingface import HuggingFaceTokenizer
from models.tokenizers.runner_form import RUNNER_TOKENIZER
from pipelines.loading.load_engine import load_engine
from tests.helpers import small_tokenizers
from tests.helpers.builders import generate, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.exports import FLOATS, INT8, OF_RUNNER, Exports, family_model, llama, wide_llama
from tests.helpers.quantized_models import CALIBRATED, make, quantize_run, random_rows, write_rows
from tests.helpers.random_texts import random_texts
from tests.helpers.real_tokenizers import NPM, REAL, load, load_real
from tests.helpers.runner import call, leaves

pytestmark = [
    pytest.mark.skipif(build.library() is None, reason="the kernels are not built here"),
    pytest.mark.long,  # compiling the runner takes 15 s
]

PROMPTS = [[3, 4, 5], [*range(20, 61)], [9]]
DRAWS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 2**63 + 5}]
# Each family has an operator, or arguments, that the others lack, or multiplies codes in another way.
CHOSEN = [(family, FLOATS) for family in OF_RUNNER if family not in ("baichuan-7b", "mistral")]
CHOSEN += [(family, INT8) for family in ("baichuan-13b", "gpt2", "llama3", "qwen3")]


@pytest.fixture(scope="module")
def export_folder(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports.of(family_model("llama3", tmp_path_factory.mktemp("llama") / "model", INT8))


def check_tokens(runner: Path, folder: Path) -> None:
    run = run_config(folder)
    engine = load_engine(replace(run, model=replace(run.model, dtype=DType.auto)), 3)
    lines = "".join(f"{' '.join(map(str, prompt))}\n" for prompt in PROMPTS)
    for settings in DRAWS:
        decode = DecodeConfig(max_new_tokens=24, **settings)
        expected = [output.completions[0].token_ids for output in generate(engine, PROMPTS, decode)]
        words = [f"decode.{name}={value}" for name, value in {"max_new_tokens": 24, **settings}.items()]
        ran = call(runner, folder, *words, input_text=lines)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert [[*map(int, line.split())] for line in ran.stdout.splitlines()] == expected


@each("family, quant", CHOSEN)
def test_families_give_the_engines_tokens(
    family: str, quant: QuantConfig, runner: Path, exports: Exports, tmp_path: Path
) -> None:
    run = family_model(family, tmp_path / f"{family}-{quant.scheme.name}", quant)
    check_tokens(runner, exports.of(run))


@pytest.mark.matrix
@each("family, quant", [case for case in product(OF_RUNNER, (FLOATS, INT8)) if case not in CHOSEN])
def test_the_other_families_give_the_engines_tokens(
    family: str, quant: QuantConfig, runner: Path, exports: Exports, tmp_path: Path
) -> None:
    run = family_model(family, tmp_path / f"{family}-{quant.scheme.name}", quant)
    check_tokens(runner, exports.of(run))


@each(
    "dtype, quant",
    [
        (DType.float16, FLOATS),
        (DType.bfloat16, FLOATS),  # in 12 bits, if the instruction set has them
        (DType.bfloat16, QuantConfig(QuantScheme.int4, group_size=32, symmetric=False)),
        (DType.bfloat16, QuantConfig(QuantScheme.q4_k_m, block_activations=BlockActivations.none)),
    ],
)
def test_formats_of_weights(dtype: DType, quant: QuantConfig, runner: Path, exports: Exports, tmp_path: Path) -> None:
    check_tokens(runner, exports.of(wide_llama(tmp_path / "model", dtype, quant)))


@each("quant", [FLOATS, INT8])
def test_formats_compared_with_float32(quant: QuantConfig, runner: Path, exports: Exports, tmp_path: Path) -> None:
    check_tokens(runner, exports.of(llama(tmp_path / "model", quant)))


def test_channels_in_another_order(runner: Path, exports: Exports, tmp_path: Path) -> None:
    source, data = tmp_path / "model", write_rows(tmp_path / "rows.jsonl", random_rows(14, 16))
    write_llama(source)
    make(quantize_run(source, CALIBRATED["int4 gptq, groups on the way"], tmp_path / "made", data), tmp_path / "run")
    check_tokens(runner, exports.of(run_config(tmp_path / "made")))


def test_it_needs_no_python(export_folder: Path, runner: Path) -> None:
    libraries = subprocess.run(["ldd", runner], capture_output=True, text=True, check=True).stdout
    assert "libquintet" in libraries or "kernels" in libraries
    assert "python" not in libraries
    assert "torch" not in libraries
    ran = subprocess.run(
        [runner, export_folder, "decode.max_new_tokens=3", "3", "4"], env={}, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_ids_come_as_they_are_computed(export_folder: Path, runner: Path) -> None:
    """A packet pipe keeps each write apart. The next prompt may come after the answer to the previous one."""
    output, end = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    words = ["decode.max_new_tokens=12", "decode.ignore_eos=true"]
    with subprocess.Popen([runner, export_folder, *words], stdin=subprocess.PIPE, stdout=end) as running:
        os.close(end)
        assert running.stdin
        for _ in range(2):
            running.stdin.write(b"3 4 5\n")
            running.stdin.flush()
            packets = [os.read(output, 4096)]
            while not packets[-1].endswith(b"\n"):
                packets.append(os.read(output, 4096))
            assert len(b"".join(packets).split()) == 12
            assert len(packets) >= 12
            assert running.poll() is None
        running.stdin.close()
        assert os.read(output, 4096) == b""
    os.close(output)
    assert running.returncode == 0


def test_the_end_of_a_text(export_folder: Path, runner: Path, tmp_path: Path) -> None:
    words = ("decode.max_new_tokens=24", "3", "4", "5")
    tokens = call(runner, export_folder, *words).stdout.split()
    folder = Path(shutil.copytree(export_folder, tmp_path / "copy"))
    content = json.loads((folder / EXPORT).read_text())
    (folder / EXPORT).write_text(json.dumps({**content, "eos_token_ids": [int(tokens[6])]}))
    assert call(runner, folder, *words).stdout.split() == tokens[: tokens.index(tokens[6]) + 1]
    assert call(runner, folder, "decode.ignore_eos=true", *words).stdout.split() == tokens
    assert call(runner, folder, "decode.ignore_eos=true", "device.threads=1", *words).stdout.split() == tokens


@each(
    "words, line",
    [
        (["3", "512"], "token id=512 is not allowed: give a number from 0 to 511"),
        (["x"], "token id=x is not allowed: give a number from 0 to 511"),
        (["decode.beams=2", "3"], "decode.beams=2 is not a setting of the runner: quintet-runner --help lists the settings"),
        (["decode.max_new_tokens=0", "3"], "decode.max_new_tokens=0 is not allowed: give a number from 1 to 2147483647"),
        (["decode.top_p=nan", "3"], "decode.top_p=nan is not allowed: give a number from 1e-09 to 1"),
        (["decode.ignore_eos=1", "3"], "decode.ignore_eos=1 is not allowed: give true or false"),
        (["decode.temperature=1", "3"], "decode.temperature above 0 needs a seed: give decode.seed"),
        (["decode.max_new_tokens=2048", "3"],
         "decode.max_new_tokens=2048 is more than the 2047 that fit: the model's context length is 2048"),
        (["prompt=a", "3"], "prompt=TEXT and token ids are two prompts: give only one of them"),
        (["input=text", "3"], "input is not used with a prompt: leave it out"),
        (["input=yaml"], "input=yaml is not allowed: give ids, text or json"),
        (["tokenize=true", "3"], "tokenize=true needs texts: give prompt=TEXT, input=text or input=json"),
        (["3"] * 2048, "the prompt has 2048 tokens, which leaves no room for new tokens: the model's context length is 2048"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line(words: list[str], line: str, export_folder: Path, runner: Path) -> None:
    ran = call(runner, export_folder, *words)
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", f"quintet-runner: {line}\n")


def test_settings_that_are_not_used(export_folder: Path, runner: Path) -> None:
    ran = call(runner, export_folder, "decode.max_new_tokens=1", "decode.top_k=4", "3")
    line = "decode.top_k, decode.top_p and decode.min_p are not used with decode.temperature=0"
    assert (ran.returncode, ran.stderr) == (0, f"quintet-runner: {line}\n")


def test_output_that_cannot_be_written(export_folder: Path, runner: Path) -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run([runner, export_folder, "3"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (1, "quintet-runner: the tokens cannot be written\n")


def test_paths_that_are_not_files(export_folder: Path, runner: Path, tmp_path: Path) -> None:
    """A pipe, for which the runner does not wait, and a folder."""
    folder = Path(shutil.copytree(export_folder, tmp_path / "copy"))
    for replacement in (os.mkfifo, os.mkdir):
        (folder / GRAPH).unlink()
        replacement(folder / GRAPH)
        ran = call(runner, folder, "3")
        assert (ran.returncode, ran.stdout) == (1, "")
        assert ran.stderr.endswith("graph.pt2 is not a file\n")


def test_a_weight_that_is_there_twice(export_folder: Path, runner: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(export_folder, tmp_path / "copy"))
    content = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, last = content[8 : 8 + size].rstrip(), [*json.loads(content[8 : 8 + size]).items()][-1]
    twice = header[:-1] + f",{json.dumps(last[0])}:{json.dumps(last[1])}}}".encode()
    twice += b" " * (-len(twice) % 8)
    (folder / WEIGHTS).write_bytes(len(twice).to_bytes(8, "little") + twice + content[8 + size :])
    assert call(runner, folder, "3").stderr.endswith(f"cannot be run: {last[0]} occurs twice\n")


@each("number", ["inf", "-nan", "1e999", "-", "01x", "tru"])
def test_numbers_that_json_does_not_have(number: str, export_folder: Path, runner: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(export_folder, tmp_path / "copy", dirs_exist_ok=True))
    (folder / EXPORT).write_text(f'{{"a": {number}, {(folder / EXPORT).read_text()[1:]}')
    assert call(runner, folder, "3").stderr.endswith("cannot be run: it is not JSON\n")


def test_a_prompt_without_tokens(export_folder: Path, runner: Path) -> None:
    ran = call(runner, export_folder, "decode.max_new_tokens=1", input_text="3\n\n")
    assert (ran.returncode, ran.stderr) == (1, "quintet-runner: the prompt has no tokens\n")


def named_tokenizers(folder: Path) -> Iterator[tuple[str, Tokenizer]]:
    """Yield small tokenizers, one of them with rare steps, and the real ones that are available."""
    llama = small_tokenizers.byte_fallback()
    llama.normalizer, llama.pre_tokenizer = None, pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    for made in (small_tokenizers.byte_level(), small_tokenizers.byte_fallback(), odd_steps(), llama):
        yield "small", HuggingFaceTokenizer(folder, made, {})
    for is_legacy in (False, True):
        small_tokenizers.save_pieces(folder / f"pieces {is_legacy}", is_legacy)
        yield "pieces", load(folder / f"pieces {is_legacy}")
    for name in ("gpt2", "qwen2", "llama2", "llama3", "chatglm2") if REAL.is_dir() else ():
        (folder / name).mkdir()
        yield name, load_real(name, folder / name)
    for name in ("llama3_1", "qwen3", "deepseek_v3"):
        if (NPM / name).is_dir():
            yield name, load(NPM / name)


def odd_steps() -> Backend:
    """Return a tokenizer with added tokens that take white space, and with every treatment of matches."""
    tokenizer = small_tokenizers.byte_level()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace("ab", "b"), normalizers.Prepend("_")]
    )
    cuts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Punctuation("merged_with_next"),
        pre_tokenizers.Split(Regex(r"\s+(?=\S)|x{1,3}?y|[^\W\d_]{1,9}?(?i:s|t$)|(?:a|bc){1,3}"), "contiguous"),
        pre_tokenizers.Split("e", "merged_with_previous"),
        pre_tokenizers.Split(Regex(r"[\p{L}\p{M}]++|.|\n"), "removed", invert=True),
        pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.add_tokens(
        [
            AddedToken(" cab", normalized=True),
            AddedToken("<ab", rstrip=True),
            AddedToken("<ab>", lstrip=True, normalized=False),
        ]
    )
    return tokenizer


def tokenized(runner: Path, tokenizer: Tokenizer, folder: Path, texts: list[str]) -> list[list[int]]:
    """Return the runner's ids for texts, which need no model."""
    (folder / RUNNER_TOKENIZER).write_text(json.dumps(tokenizer.runner_form(), ensure_ascii=False), encoding="utf-8")
    lines = "".join(json.dumps(text, ensure_ascii=bool(i % 2)) + "\n" for i, text in enumerate(texts))
    ran = call(runner, folder, "tokenize=true", "input=json", input_text=lines)
    assert (ran.returncode, ran.stderr) == (0, "")
    return [[*map(int, line.split())] for line in ran.stdout.removesuffix("\n").split("\n")]


def test_texts_become_the_tokenizers_ids(runner: Path, tmp_path: Path) -> None:
    """Random texts, a long text, and one long word, which takes a second if each merge searches all pairs."""
    for name, tokenizer in named_tokenizers(tmp_path):
        texts = [*random_texts([*tokenizer._control_names][:40], 2000), "naïve 今天 \n  x" * 9000, "ab" * 50_000]
        alone = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        expected = [tokenizer.encode(text, True) or alone for text in texts]
        for text, ids, actual in zip(texts, expected, tokenized(runner, tokenizer, tmp_path, texts), strict=True):
            assert actual == ids, (name, text[:200])


def with_text(kind: str, folder: Path, exports: Exports) -> tuple[Path, RunConfig]:
    """Return the export of a random Llama with a tokenizer, and a run of it."""
    write_llama(folder, vocab_size=400)
    if kind.startswith("pieces"):
        small_tokenizers.save_pieces(folder, is_legacy=kind == "pieces, legacy")
    else:
        small_tokenizers.save(getattr(small_tokenizers, kind)(), folder)
    run = run_config(folder)
    run = replace(run, model=replace(run.model, tokenizer=""))
    made = exports.of(run)
    return made, replace(run, model=replace(run.model, path=str(made)))


@each("kind", ["byte_level", "byte_fallback", "pieces", "pieces, legacy"])
def test_texts_match_predict(kind: str, runner: Path, exports: Exports, tmp_path: Path) -> None:
    """A random model generates invalid bytes, special tokens, and ids that the tokenizer lacks."""
    made, run = with_text(kind, tmp_path / "model", exports)
    engine = load_engine(run, 3)
    assert engine.tokenizer
    texts = ["Once upon a time", "今天 </s> x", 'emoji 👩‍👩‍👧\n\n\x00"\\', ""]
    prompts = [engine.tokenizer.encode(text, add_special_tokens=True) for text in texts]
    for seed in range(8):
        settings = {"max_new_tokens": 60, "temperature": 1.5, "seed": seed}
        outputs = generate(engine, prompts, DecodeConfig(**settings, ignore_eos=bool(seed % 2)))
        words = [f"decode.{name}={value}" for name, value in settings.items()]
        words.append(f"decode.ignore_eos={json.dumps(bool(seed % 2))}")
        ran = call(runner, made, *words, "input=json", input_text="".join(map("{}\n".format, map(json.dumps, texts))))
        assert (ran.returncode, ran.stderr) == (0, "")
        expected = [output.completions[0].text for output in outputs]
        assert [json.loads(line) for line in ran.stdout.removesuffix("\n").split("\n")] == expected
    alone = call(runner, made, *words, f"prompt={texts[0]}")
    lines = call(runner, made, *words, "input=text", input_text=f"{texts[0]}\n{texts[1]}\n")
    assert alone.stdout == f"{expected[0]}\n"
    assert lines.stdout == f"{expected[0]}\n{expected[1]}\n"


def test_text_comes_as_it_is_made(runner: Path, exports: Exports, tmp_path: Path) -> None:
    """A packet pipe keeps each write apart: there are many, and each is whole characters."""
    made, _ = with_text("byte_level", tmp_path / "model", exports)
    output, end = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    words = [
        "decode.max_new_tokens=60",
        "decode.temperature=1.5",
        "decode.seed=3",
        "decode.ignore_eos=true",
        "prompt=今天",
    ]
    with subprocess.Popen([runner, made, *words], stdout=end) as running:
        os.close(end)
        packets = [*iter(lambda: os.read(output, 4096), b"")]
    os.close(output)
    assert running.returncode == 0
    assert len(packets) > 20
    assert all(packet.decode() for packet in packets)


def test_texts_that_cannot_be_read(runner: Path, exports: Exports, tmp_path: Path) -> None:
    made, _ = with_text("byte_level", tmp_path / "model", exports)
    for input_text, line in [
        ("\udcff", "the prompt is not UTF-8: convert it first"),
        ('"\\ud800"', "it is not JSON"),
        ("3", "a value is not a text"),
    ]:
        words = [runner, made, f"input={'text' if input_text == chr(0xDCFF) else 'json'}"]
        ran = subprocess.run(words, input=os.fsencode(f"{input_text}\n"), capture_output=True, timeout=60)
        assert (ran.returncode, ran.stdout, ran.stderr.decode()) == (1, b"", f"quintet-runner: {line}\n")
    alone = "quintet-runner: {} takes only token ids, because its tokenizer cannot be used: {}\n"
    folder = Path(shutil.copytree(made, tmp_path / "copy"))
    (folder / RUNNER_TOKENIZER).write_text(json.dumps({"refused": "its model is Unigram"}))
    assert call(runner, folder, "prompt=a").stderr == alone.format(folder, "its model is Unigram")
    assert call(runner, folder, "decode.max_new_tokens=1", "3").returncode == 0
    (folder / RUNNER_TOKENIZER).unlink()
    missing = f"{folder / RUNNER_TOKENIZER} cannot be read (No such file or directory)"
    assert call(runner, folder, "prompt=a").stderr == alone.format(folder, missing)


def test_two_hundred_damaged_tokenizers(runner: Path, tmp_path: Path) -> None:
    """A damaged file gives ids or a line, and never a crash."""
    form, num_refused = HuggingFaceTokenizer(tmp_path, odd_steps(), {}).runner_form(), 0
    for seed in range(200):
        chooser, copy = random.Random(seed), json.loads(json.dumps(form))
        part = chooser.choice([*copy])
        places = leaves(copy[part]) if isinstance(copy[part], list) and copy[part] else [(copy, part)]
        holder, key = chooser.choice(places)
        holder[key] = chooser.choice([0, -1, 1, 2**40, -(2**63), "", "x", None, True, [], {}, 1e300])
        (tmp_path / RUNNER_TOKENIZER).write_text(json.dumps(copy))
        ran = call(runner, tmp_path, "tokenize=true", "prompt=Hello <ab> 12 cab, 今天 world!")
        assert ran.returncode in (0, 1), f"{seed}: {ran.returncode} {ran.stderr}"
        assert len(ran.stderr.splitlines()) == ran.returncode, seed
        num_refused += ran.returncode
    assert num_refused > 50
