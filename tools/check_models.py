"""Random models of any shape for the GPU check, and engines around them whose rounds run as graphs or one by one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from check_run import Setting
from fused_spec import Engine
from fused_spec.drafters import ModelDrafter
from fused_spec.kernels.check import runs_on_triton
from fused_spec.kernels.rms_norm import RMSNorm
from fused_spec.models.config import ModelConfig
from fused_spec.models.linear import DenseLinear, Linear
from fused_spec.models.quantized_linear import Int8Linear
from fused_spec.models.transformer import Transformer
from fused_spec.runner import EagerRunner, GraphRunner, Speculation

DRAFTERS = ("none", "ngram", "self-int8", "self-int4", "model")


def small_config(setting: Setting, architecture: str = "qwen3", **sizes: Any) -> ModelConfig:
    """A model that takes next to no time, tiny where kernels are interpreted."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    if setting.reduced:
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": 96 if setting.reduced else 512,
        "num_layers": 1 if setting.reduced else 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "eos_token_ids": (),
    }
    return ModelConfig(**{**shape, **values, **sizes})


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> Transformer:
    """A model whose activations neither grow nor shrink, and whose logits are about normal."""
    model = Transformer.uninitialised(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)

    def fill(weight: torch.Tensor) -> None:
        weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)

    def neutral(norm: RMSNorm) -> None:
        norm.weight.fill_(norm.weight.shape[-1] ** 0.5)

    fill(model.embedding)
    for product in _products(model):
        if product.dense().data_ptr() != model.embedding.data_ptr():
            fill(product.dense())
        if product.bias is not None:
            product.bias.zero_()
    neutral(model.norm)
    for layer in model.layers:
        for norm in (layer.attention_norm, layer.mlp_norm, layer.qk_norm):
            if norm is not None:
                neutral(norm)
    return model


def _products(model: Transformer) -> list[Linear]:
    layers = [(layer.qkv, layer.attention_out, layer.gate_up, layer.down) for layer in model.layers]
    return [model.head, *(product for layer in layers for product in layer)]


def on_cpu(model: Transformer, dtype: torch.dtype) -> Transformer:
    """A copy for torch's path, its products plain ones in this dtype."""

    def product(of: Linear) -> DenseLinear:
        return DenseLinear(of.dense().to("cpu", dtype), None if of.bias is None else of.bias.to("cpu", dtype))

    def norm(of: RMSNorm) -> RMSNorm:
        return RMSNorm(of.weight.cpu(), of.floor.cpu())

    layers = [
        replace(
            layer,
            attention_norm=norm(layer.attention_norm),
            qkv=product(layer.qkv),
            qk_norm=None if layer.qk_norm is None else norm(layer.qk_norm),
            attention_out=product(layer.attention_out),
            mlp_norm=norm(layer.mlp_norm),
            gate_up=product(layer.gate_up),
            down=product(layer.down),
        )
        for layer in model.layers
    ]
    return Transformer(model.config, model.embedding.to("cpu", dtype), layers, norm(model.norm), product(model.head))


def counting_model(config: ModelConfig, setting: Setting, seed: int, noise: float = 0.0) -> Transformer:
    """After token t most likely comes t + 1, within each dozen: every kind of draft is often right, sometimes wrong.

    `noise` is added to the logits, so to speak.
    """
    dtype = setting.dtypes[0]
    model = random_model(config, dtype, setting.device, seed)
    generator = torch.Generator().manual_seed(1)
    direction = F.normalize(torch.randn(config.vocab_size, config.hidden_size, generator=generator))
    before = torch.tensor([t - t % 12 + (t - 1) % 12 for t in range(config.vocab_size)]).clamp(
        max=config.vocab_size - 1
    )
    blur = noise * torch.randn(direction.shape, generator=generator) / config.hidden_size**0.5
    model.embedding.copy_(direction * 4 * config.hidden_size**0.5)
    model.head.dense().copy_(direction[before] * 6.5 / config.hidden_size**0.5 + blur)
    return model


def counting_engine(drafter: str, setting: Setting, *, eos: tuple[int, ...] = (), **options: Any) -> Engine:
    """An engine over such models. Whatever model drafts is a blurred one, so that it is wrong at times."""
    config, attention = small_config(setting), own_attention(setting.device)
    verifier = counting_model(replace(config, eos_token_ids=eos), setting, 5)
    blurred = counting_model(config, setting, 6, noise=1.0)
    draft = {"none": None, "model": blurred}.get(drafter, drafter)
    most = 4 if not setting.reduced or attention == "auto" else 2
    options = {"num_draft_tokens": most, "max_length": 128, "attention": attention, **options}
    engine = Engine(verifier, draft=draft, **options)
    if drafter.startswith("self-"):
        assert isinstance(engine.drafter, ModelDrafter)
        engine.drafter.model.head = Int8Linear(blurred.head.dense())
    return engine


def own_attention(device: torch.device) -> str:
    """Our own attention, wherever kernels run; torch's elsewhere."""
    return "triton" if runs_on_triton(None, device) else "auto"


def parts_of(engine: Engine) -> Speculation:
    """What a runner of the engine needs."""
    return Speculation(engine.target, engine.cache, engine.drafter, engine.state)


def with_graphs(engine: Engine) -> Engine:
    """The engine as it is on a GPU; elsewhere its graphs are functions that run when they are replayed."""
    if not isinstance(engine.runner, GraphRunner):
        engine.runner = GraphRunner(parts_of(engine), engine.round_sizes, Replayer())
    return engine


def one_by_one(engine: Engine) -> Engine:
    """The engine with rounds that run when they are launched, without graphs."""
    engine.runner = EagerRunner(parts_of(engine))
    return engine


def replays(engine: Engine) -> int:
    """How many graphs were replayed; more than none."""
    assert isinstance(engine.runner, GraphRunner)
    if not engine.runner.replays:
        raise AssertionError("no graph was replayed")
    return engine.runner.replays


class Replayer:
    """Stands in for CUDA graphs on a CPU."""

    pinned = False

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function, and give it back to be run again."""
        function()
        return function

    def mark(self) -> Callable[[], None]:
        """Nothing to wait for."""
        return lambda: None
