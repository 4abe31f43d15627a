"""What a captured step of a GPU consists of: how many kernels, and nothing that needs the host."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
import triton
from meta_device import HostRead, Launches, MetaDevice, recorded_kernels
from step_driver import engine_config

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.attention import ATTENTION_NAME, register
from quire.replica.model.fusion import candidates
from quire.replica.model.fusion import fuse_pass as fuse_module
from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.runner.runner import Runner

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="the kernels are not interpreted"
)
LLAMA_8B = dict(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope_parameters=dict(
        rope_type="llama3",
        rope_theta=500_000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
)


@pytest.fixture
def meta(monkeypatch):
    """Kernels are recorded; on the meta device every comparison of the fuse pass succeeds."""
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: a.is_meta or b.is_meta or equal(a, b))
    for module in (fuse_module, candidates):
        monkeypatch.setattr(module, "deviation", lambda found, expected: 0.0)
    with recorded_kernels():
        yield


def runner_of(config: transformers.PretrainedConfig, folder, **changes: object) -> Runner:
    """A runner of a model without weights."""
    config.save_pretrained(folder)
    spec = ModelSpec.from_checkpoint(folder)
    register()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    values = dict(dtype="bfloat16", deterministic=False, num_blocks=64, block_size=32)
    engine = engine_config(spec, **{**values, **changes})
    pool = KVPool(engine.num_blocks, spec.groups, engine.block_size, torch.bfloat16, "meta")
    return Runner(engine, spec, model.eval(), pool, device=MetaDevice(), attention_backend="triton")


def captured(runner: Runner, key: GraphKey) -> Counter[str]:
    runner.graphs.capture(key)
    return Counter(runner.graphs._graphs[key].graph.launches)


# Kernels of a decode step outside the layers.
OUTSIDE = {
    "index_select": 3,  # last tokens, block tables, sampling limits
    "embedding": 1,
    "arange": 1,
    "_find_runs_kernel": 1,
    "_plan_rows_kernel": 1,
    "_rms_norm_kernel": 1,
    "mm": 1,
    "_survey_kernel": 1,
    "_combine_kernel": 1,
    "_gather_kernel": 1,
    "_sample_kernel": 1,
    "copy_": 1,  # sampled tokens
    "clamp": 1,
    "index_copy_": 1,  # last tokens
}
# Of them transformers' rotation, and its tables to float32; one product is a bmm or a mul, as torch decides.
ROTATION = ("_to_copy", "mul", "bmm", "cat", "cos", "sin")


def test_a_decode_step_of_llama_8b(meta, tmp_path):
    steps = {}
    for layers in (2, 12):
        config = transformers.LlamaConfig(**LLAMA_8B, num_hidden_layers=layers)
        runner = runner_of(config, tmp_path / str(layers), prefix_caching=True)
        assert runner.fused.chains == [layers] and runner.fused.fused["decoders"] == 1
        steps[layers] = captured(runner, GraphKey(16, GraphPart.WHOLE))
    of_10_layers = steps[12] - steps[2]
    layer = Counter({name: count // 10 for name, count in of_10_layers.items()})
    assert of_10_layers.total() == 10 * layer.total()
    # One for rows that are not split, one to merge the others.
    attention = {name: layer.pop(name) for name in ("_decode_kernel", "_merge_kernel")}
    assert set(attention.values()) == {1}
    assert layer == {"mm": 4, "_rms_norm_kernel": 2, "_kv_write_kernel": 1, "_gated_kernel": 1}
    outside = steps[2] - Counter({name: 2 * n for name, n in (layer | attention).items()})
    rotation = sum(outside.pop(name, 0) for name in ROTATION)
    assert rotation == 11
    assert outside == OUTSIDE


def test_a_decode_step_with_adapters(meta, tmp_path):
    """Two kernels for a product, one more for each further layer that it merges, and nothing that needs the host."""
    config = transformers.LlamaConfig(**LLAMA_8B, num_hidden_layers=2)
    runner = runner_of(config, tmp_path, max_loaded_adapters=4)
    plain = captured(runner, GraphKey(16, GraphPart.WHOLE))
    adapted = captured(runner, GraphKey(16, GraphPart.WHOLE, is_adapted=True))
    assert not plain["_down_kernel"]
    added = adapted - plain
    assert (added.pop("_down_kernel"), added.pop("_up_kernel")) == (2 * 4, 2 * (3 + 1 + 2 + 1))
    assert not added, "and no further work"


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x + torch.ones(3),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.new_tensor([1.0, 2.0, 3.0]),
        lambda x: torch.zeros(3).to("meta", non_blocking=True),
        lambda x: x.nonzero(),
    ],
)
def test_work_that_needs_the_host_is_found(work):
    with pytest.raises(HostRead), torch.inference_mode(), Launches():
        work(torch.empty(3, device="meta"))


def test_kernels_are_counted_and_views_are_not():
    with torch.inference_mode(), Launches() as launches:
        x = torch.empty(4, 6, device="meta")
        x.view(6, 4).t()[1:].unsqueeze(0).contiguous()
        torch.nn.functional.linear(x, torch.empty(3, 6, device="meta"))
        x[1].copy_(x[0]).add_(1)
    assert launches.names == ["clone", "mm", "copy_", "add_"]
