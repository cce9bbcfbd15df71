"""Kernels as a model launches them: its sizes and dtypes, without synchronisation, and captured in graphs.

tests/kernels/triton tests the same kernels on small odd sizes; it uses a GPU if there is one.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels.kv_format import FORMATS, allocate
from tests.helpers.cache_formats import NAMES
from tests.helpers.triton_cases import EXPERT_FORMATS, assert_near, noise

BF16 = torch.bfloat16
LENGTHS = [(1, 700), (1, 33), (130, 130), (64, 400)]  # (new tokens, all tokens)


@pytest.fixture
def _never_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kv_cache", NAMES)
@pytest.mark.parametrize("lengths", [[(1, 1500)] * 2, LENGTHS], ids=["decode", "mixed"])
def test_attention_of_llama(kv_cache: str, lengths: list[tuple[int, int]]) -> None:
    from tests.helpers.triton_attention import check

    check(lengths, 32, 8, 128, dtype=BF16, kv_cache=kv_cache)


@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "options"),
    [
        (12, 2, 128, {}),
        (16, 8, 256, {"window": 100, "soft_cap": 50.0}),
        (40, 40, 128, {"alibi_slopes": torch.rand(40, generator=torch.Generator().manual_seed(0))}),
        (32, 32, 80, {}),
        (64, 8, 64, {"window": 128, "sinks": torch.rand(64, generator=torch.Generator().manual_seed(0))}),
    ],
    ids=["qwen2.5-1.5b", "gemma-2-9b", "baichuan-13b", "bloom-3b", "gpt-oss-20b"],
)
def test_attention_of_other_models(heads: int, groups: int, head_dim: int, options: dict[str, Any]) -> None:
    from tests.helpers.triton_attention import check

    check(LENGTHS, heads, groups, head_dim, dtype=BF16, **options)


@pytest.mark.parametrize("lengths", [[(1, 700)] * 3, LENGTHS], ids=["decode", "mixed"])
def test_attention_over_latents(lengths: list[tuple[int, int]]) -> None:
    from tests.helpers.triton_attention import check

    check(lengths, 16, 1, 576, 512, dtype=BF16)


@pytest.mark.parametrize("rows", [1, 16, 50, 300])
@pytest.mark.parametrize(("bits", "group_size", "zero_points"), [(8, None, False), (4, 128, False), (4, 32, True)])
def test_quantised_products(rows: int, bits: int, group_size: int | None, zero_points: bool) -> None:
    from tests.helpers.triton_products import check_weight

    check_weight(rows, 1536, 4096, bits, group_size, zero_points, BF16)


@pytest.mark.parametrize(
    ("kind", "activations"),
    [("floats", "none"), ("int4 zero points", "none"), ("int8", "dynamic"), ("fp8 blocks", "dynamic")],
)
@torch.inference_mode()
def test_products_of_joined_layers(kind: str, activations: str) -> None:
    """Products of queries, keys and values of an 8B model."""
    from conf.quantization import Activations
    from tests.helpers.triton_layers import check_joined, make_layers

    for rows in (1, 16):
        layers = make_layers(kind, Activations[activations], (4096, 1024, 1024), 4096, BF16)
        check_joined(layers, noise(rows, 4096, dtype=BF16).cuda())


def test_a_graph_of_decoding_follows_new_lengths() -> None:
    """Captured with one set of lengths and tables, replayed with another set."""
    from kernels.paged_attention.triton import paged_attention

    caches = []
    for seed, format in enumerate(FORMATS["none"]):
        cache = allocate(format, (64, 16, 8), 128, BF16, torch.device("cuda"))
        cache.tensors[0].copy_(noise(64, 16, 8, 128, seed=seed))
        caches.append(cache)
    query = noise(4, 32, 128, dtype=BF16).cuda()
    tables = torch.randperm(64, generator=torch.Generator().manual_seed(0)).view(4, 16).cuda()
    lengths, starts = torch.tensor([5, 1, 1, 1]).cuda(), torch.arange(5).cuda()

    def run() -> torch.Tensor:
        return paged_attention(query, caches[0], caches[1], tables, starts, lengths, 128**-0.5)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    lengths.copy_(torch.tensor([200, 3, 256, 0]))
    starts.copy_(torch.tensor([0, 1, 2, 3, 3]))  # the last sequence is padding
    tables.copy_(tables.flip(0))
    graph.replay()
    assert torch.equal(output[:3], run()[:3])


@pytest.mark.usefixtures("_never_waits")
def test_no_launch_waits_for_the_gpu() -> None:
    from tests.helpers.triton_shapes import CASES

    names = ("attention decode 64", "kv_store", "rows", "matmul 16", "sampling", "moe 1 mixtral", "moe 8 mixtral")
    with torch.device("cuda"):
        for name in names:
            launches = [launch for case, launch in CASES.items() if case.startswith(name)]
            assert launches
            for launch in launches:
                launch()


def test_sampling_with_penalties_and_bans() -> None:
    """The logits equal the CPU's bit for bit, without waiting for them or for the token that is only on the GPU."""
    from conf.decoding import DecodeConfig
    from pipelines.engine.logits import process_logits
    from pipelines.engine.request import ContextLimit, SamplingContext
    from pipelines.engine.request_factory import resolve_sampling_params
    from pipelines.engine.sampler import choose

    sequences = []
    for settings in (
        {"repetition_penalty": 1.3, "frequency_penalty": 0.1, "temperature": 0.8, "seed": 1},
        {"logit_bias": {5: 2.0}, "presence_penalty": 0.5},
        {"allowed_token_ids": [3, 4], "min_new_tokens": 9, "stop_token_ids": [4]},
    ):
        decode = DecodeConfig(**{"max_new_tokens": 50, **settings}).resolved({})  # type: ignore[arg-type]
        params = resolve_sampling_params(decode, 3, ContextLimit(100, "limit"), frozenset())
        sequences.append(SamplingContext(params, [7, 8, 7, 5, 5, 9], 3))
    logits, last = 3 * noise(3, 128256), torch.tensor([5, 11, 3])
    on_gpu = logits.cuda(), last.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        processed, tokens = process_logits(on_gpu[0], sequences, on_gpu[1]), choose(on_gpu[0], sequences, on_gpu[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert processed.cpu().equal(process_logits(logits, sequences, last))
    assert tokens.cpu().equal(choose(logits, sequences, last))


def test_sampling_a_large_vocabulary() -> None:
    from kernels.sampling import reference, triton

    rows = 32
    logits = 3 * noise(rows, 128256)
    uniforms = torch.rand(rows, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    settings = torch.cat((torch.tensor([[0.8, 200, 0.95, 0]], dtype=torch.float64).expand(rows, -1), uniforms), dim=1)
    assert torch.equal(triton.draw(logits.cuda(), settings.cuda()).cpu(), reference.draw(logits, settings))


@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_a_mixture(tokens: int) -> None:
    from kernels.linear.gpu_weight import of_floats
    from kernels.moe import reference, route, triton

    x = noise(tokens, 1024, dtype=BF16)
    gate_up, down = noise(16, 512, 1024, dtype=BF16, seed=1) / 32, noise(8, 1024, 512, dtype=BF16, seed=2) / 32
    weights, chosen = route(noise(tokens, 8, seed=3), 2, True)
    result = triton.mixture(x.cuda(), of_floats(gate_up.cuda()), of_floats(down.cuda()), weights.cuda(), chosen.cuda())
    assert_near(result, reference.mixture(x.double(), gate_up.double(), down.double(), weights, chosen))


@pytest.mark.parametrize("kind", EXPERT_FORMATS)
@pytest.mark.parametrize("tokens", [1, 40, 600])
@pytest.mark.parametrize(("experts", "size", "channels"), [(8, 1024, 1792), (60, 512, 704)], ids=["mixtral", "qwen"])
def test_a_quantised_mixture(kind: str, tokens: int, experts: int, size: int, channels: int) -> None:
    from tests.helpers.triton_experts import check_mixture, choose

    check_mixture(kind, choose(tokens, experts, 4), experts, size, channels, BF16)


@pytest.mark.parametrize("kind", ["bf16", *EXPERT_FORMATS])
def test_a_graph_of_a_mixture_follows_new_choices(kind: str) -> None:
    """Captured with all tokens at the same experts, replayed with other experts."""
    from kernels.linear.gpu_weight import of_floats
    from kernels.moe import triton
    from tests.helpers.triton_experts import make_experts

    if kind == "bf16":
        stacked = (of_floats(noise(*shape, dtype=BF16).cuda()) for shape in ((16, 256, 512), (8, 512, 256)))
        rows = None
    else:
        stacked = (make_experts(*shape, kind)[0] for shape in ((16, 256, 512), (8, 512, 256)))
        rows = EXPERT_FORMATS[kind][-1]
    gate_up, down = stacked
    x, logits = noise(20, 512, dtype=BF16).cuda(), torch.arange(8.0).expand(20, 8).contiguous().cuda()

    def run() -> torch.Tensor:
        weights, chosen = triton.route(logits, 2, True)
        return triton.mixture(x, gate_up, down, weights, chosen, rows, rows)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    logits.copy_(noise(20, 8, seed=1))
    graph.replay()
    assert torch.equal(output, run())
