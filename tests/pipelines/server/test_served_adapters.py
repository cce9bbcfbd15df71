"""PEFT's adapters over HTTP with the official client: the answers of adapters that are loaded at the start, requests in
flight, restarts, replicas and ranks. Real processes."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import LlamaForCausalLM

from kernels import build
from tests.helpers.adapters import ALL_LINEAR, write_adapter
from tests.helpers.builders import REPOSITORY
from tests.helpers.processes import engines
from tests.helpers.server import served
from tests.helpers.waiting import LIMIT_S, until

pytestmark = pytest.mark.long

ASKED: dict[str, Any] = {"prompt": [300 + i for i in range(40)], "max_tokens": 12, "temperature": 0, "logprobs": 2}
ENDLESS: dict[str, Any] = {**ASKED, "max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}
RANKS = {"one": 4, "two": 8}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters of the bundled model, by PEFT."""
    folder, base = tmp_path_factory.mktemp("adapters"), REPOSITORY / "models" / "tiny"
    for seed, (name, rank) in enumerate(RANKS.items()):
        write_adapter(folder / name, base, LlamaForCausalLM, seed, r=rank, target_modules=ALL_LINEAR)
    return folder


class Client:
    """An admin's client of the official package."""

    def __init__(self, url: str) -> None:
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="admin-key", max_retries=0, timeout=LIMIT_S)

    def load(self, name: str, path: str | Path, **fields: Any) -> str:
        body = {"lora_name": name, "lora_path": str(path), **fields}
        return self.openai.post("/load_lora_adapter", body=body, cast_to=str)

    def unload(self, name: str) -> str:
        return self.openai.post("/unload_lora_adapter", body={"lora_name": name}, cast_to=str)

    def answer(self, model: str) -> Any:
        """Return text, log probabilities and fingerprint."""
        answer = self.openai.completions.create(model=model, **ASKED)
        return answer.choices[0].text, answer.choices[0].logprobs, answer.system_fingerprint

    def num_cached_tokens(self, model: str) -> int:
        usage = self.openai.completions.create(model=model, **ASKED).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    def names(self) -> list[str]:
        return [model.id for model in self.openai.models.list()]


@contextmanager
def serving(folder: Path, adapters: Path, *arguments: str) -> Iterator[Client]:
    """Serve the bundled model. The adapters `started_one` and `started_two` are loaded with it."""
    folder.mkdir()
    keys = folder / "admins"
    keys.write_text("root admin-key\n")
    keys.chmod(0o600)
    started = [f"+model.adapters.started_{name}={adapters / name}" for name in RANKS]
    options = [f"serve.adapter_folders=[{adapters}]", f"serve.admin_keys={keys}", *started, *arguments]
    with served(folder / "run", *options) as (_, url):
        client = Client(url)
        with client.openai:
            yield client


def kill_engine() -> None:
    before = set(engines())
    os.kill(next(iter(before)), signal.SIGKILL)


def available(answer: Callable[[], Any]) -> bool:
    try:
        answer()
    except openai.InternalServerError:
        return False
    return True


def test_loaded_adapters_answer_as_adapters_of_the_start(adapters: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "served", adapters) as client:
        base, one, two = client.answer("tiny"), client.answer("started_one"), client.answer("started_two")
        assert len({base[0], one[0], two[0]}) == len({base[2], one[2], two[2]}) == 3
        assert client.load("fr", adapters / "one") == "Success: LoRA adapter 'fr' added successfully."
        assert client.answer("fr") == one
        # A request in flight keeps its adapter; new requests use the new one.
        stream = client.openai.completions.create(model="fr", **ENDLESS)
        texts = [next(iter(stream)).choices[0].text]
        client.load("fr", "two", load_inplace=True)
        assert client.answer("fr") == two
        texts += [chunk.choices[0].text for chunk in stream]
        whole = client.openai.completions.create(model="started_one", **ENDLESS)
        assert "".join(texts) == "".join(chunk.choices[0].text for chunk in whole)
        # Unloading waits for the requests in flight.
        stream = client.openai.completions.create(model="fr", **ENDLESS)
        texts = [next(iter(stream)).choices[0].text]
        with ThreadPoolExecutor(1) as thread:
            unloading = thread.submit(client.unload, "fr")
            until(lambda: "fr" not in client.names())
            with pytest.raises(openai.NotFoundError):
                client.answer("fr")
            texts += [chunk.choices[0].text for chunk in stream]
            assert unloading.result() == "Success: LoRA adapter 'fr' removed successfully."
        whole = client.openai.completions.create(model="started_two", **ENDLESS)
        assert "".join(texts) == "".join(chunk.choices[0].text for chunk in whole)
        assert (client.answer("started_one"), client.answer("tiny")) == (one, base)


def test_prefixes_of_an_unloaded_adapter_are_forgotten(adapters: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "served", adapters) as client:
        for name in RANKS:
            client.unload(f"started_{name}")
        client.load("fr", "one")
        assert [client.num_cached_tokens("fr") for _ in range(2)] == [0, 32]
        client.load("same", "one")
        client.unload("fr")
        assert client.num_cached_tokens("same") == 32
        client.unload("same")
        client.load("fr", "one")
        assert client.num_cached_tokens("fr") == 0


def test_paths_and_damage_are_refused(adapters: Path, tmp_path: Path) -> None:
    inner, outer = tmp_path / "adapters", tmp_path / "outer"
    shutil.copytree(adapters, inner)
    shutil.copytree(adapters / "one", outer)
    (inner / "link").symlink_to(outer)
    shutil.copytree(adapters / "one", inner / "damaged")
    (inner / "damaged" / "adapter_model.safetensors").write_bytes(b"\xff" * 1000)
    with serving(tmp_path / "served", inner) as client:
        before = client.names(), [client.answer(model) for model in client.names()]
        messages = set()
        for path in (outer, "/none", "link", "../outer", "/dev", "none"):
            with pytest.raises(openai.NotFoundError) as missing:
                client.load("fr", path)
            messages.add(str(missing.value).replace(str(path), ""))
        assert len(messages) == 1
        for load_inplace in (False, True):
            name = "started_one" if load_inplace else "fr"
            with pytest.raises(openai.BadRequestError, match="adapter_model.safetensors"):
                client.load(name, "damaged", load_inplace=load_inplace)
        with pytest.raises(openai.AuthenticationError):
            client.openai.with_options(api_key="none").post("/load_lora_adapter", body={}, cast_to=str)
        assert (client.names(), [client.answer(model) for model in client.names()]) == before


def test_a_restarted_engine_has_the_adapters(adapters: Path, tmp_path: Path) -> None:
    """The loaded ones, not the unloaded ones. An adapter whose files are gone is lost, and nothing else."""
    folder = shutil.copytree(adapters, tmp_path / "adapters")
    with serving(tmp_path / "served", folder) as client:
        one, two, base = client.answer("started_one"), client.answer("started_two"), client.answer("tiny")
        client.load("fr", "one")
        client.load("de", "two")
        client.unload("started_two")
        kill_engine()
        until(lambda: available(lambda: client.answer("tiny")))
        assert client.names() == ["tiny", "de", "fr", "started_one"]
        assert [client.answer(name) for name in ("tiny", "fr", "de", "started_one")] == [base, one, two, one]
        shutil.rmtree(folder / "one")
        shutil.copytree(folder / "two", folder / "one")  # changed: another adapter under the old name would be wrong
        kill_engine()
        until(lambda: available(lambda: client.answer("tiny")))
        until(lambda: client.names() == ["tiny", "de"])
        assert [client.answer(name) for name in ("tiny", "de")] == [base, two]
        client.load("fr", "one")
        assert client.answer("fr") == two


@pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")
def test_two_ranks(adapters: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "served", adapters, "parallel=tp", "parallel.tp=2") as client:
        base, one, two = (client.answer(name) for name in ("tiny", "started_one", "started_two"))
        for name in RANKS:
            client.unload(f"started_{name}")
        for name, answer in {"one": one, "two": two}.items():
            client.load("fr", name, load_inplace=True)
            assert client.answer("fr") == answer
        client.unload("fr")
        assert client.answer("tiny") == base


@pytest.mark.skipif(find_spec("ray") is None, reason="needs the package ray")
def test_two_replicas(adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the adapter before the answer, also a replica that was restarted."""
    for variable in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    limits = ("serve.replicas=2", "serve.batch_size=1")
    with serving(tmp_path / "served", adapters, *limits) as client:

        def texts(model: str) -> set[str]:
            """Return the texts of two streams at once. Each replica has one of them."""
            streams = [iter(client.openai.completions.create(model=model, **ENDLESS)) for _ in range(2)]
            firsts = [next(stream) for stream in streams]
            return {
                "".join(chunk.choices[0].text for chunk in (first, *stream))
                for first, stream in zip(firsts, streams, strict=True)
            }

        def both_run() -> bool:
            """Return whether two streams run at once: each replica has loaded its model."""
            with ExitStack() as stack:
                for _ in range(2):
                    next(iter(stack.enter_context(client.openai.completions.create(model="fr", **ENDLESS))))
                metrics = httpx.get(str(client.openai.base_url).replace("/v1/", "/metrics")).text
                return 'num_requests_running{model_name="tiny"} 2.0' in metrics

        one, two = texts("started_one"), texts("started_two")
        assert (len(one), len(two), len(one | two)) == (1, 1, 2)
        client.load("fr", "one")
        assert texts("fr") == one
        kill_engine()
        client.load("fr", "two", load_inplace=True)
        until(lambda: available(both_run) and both_run())
        assert texts("fr") == two
        client.unload("fr")
        assert client.names() == ["tiny", "started_one", "started_two"]
