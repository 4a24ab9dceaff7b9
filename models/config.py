"""Sizes and constants of a decoder-only transformer, read from a Hugging Face config or GGUF metadata.

Defaults are those of transformers' config classes (Hugging Face) and of llama.cpp (GGUF); anything that would change
the arithmetic and is not implemented is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fused_spec.errors import InvalidInput
from fused_spec.kernels.rope import rope_frequencies
from fused_spec.models.config_reader import ConfigReader, shortened
from fused_spec.models.rope_scaling import RopeScaling, YarnScaling, gguf_rope_scaling, hf_rope

_MISTRAL_WINDOW = 4096  # what transformers assumes where a mistral config does not say
_MAX_LAYERS = 1024


@dataclass(frozen=True)
class Family:
    """What sets an architecture apart, and what transformers assumes where its config.json is silent.

    Attributes:
        class_name: what `architectures` must say.
        qkv_bias: the query, key and value projections have a bias.
        qk_norm: each query and key head is RMS-normalised before it is rotated.
        gguf_interleaved: its GGUF files store rotary pairs side by side; None where there are no such files.
        kv_heads, head_dim: None stands for all heads, and for hidden size / heads.
        context, eos: `max_position_embeddings` and `eos_token_id`.
    """

    class_name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_interleaved: bool | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    context: int = 32768
    eos: int | None = None


FAMILIES = {
    "llama": Family("LlamaForCausalLM", gguf_interleaved=True, context=2048, eos=2),
    "mistral": Family("MistralForCausalLM", kv_heads=8, context=131072, eos=2),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, gguf_interleaved=False, kv_heads=32),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, gguf_interleaved=False, kv_heads=32, head_dim=128),
}
"""By `model_type`. GGUF files of Mistral models call themselves llama."""


@dataclass(frozen=True)
class ModelConfig:
    """What the transformer needs to know; every size is positive and the sizes fit each other.

    `eos_token_ids` may be empty (no token ends generation). `vocab_size` is the number of rows of the embedding,
    which may exceed the number of tokens the tokenizer knows.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    rope_scaling: RopeScaling | None = None

    @property
    def family(self) -> Family:
        """The architecture's own traits."""
        return FAMILIES[self.architecture]

    @property
    def rope_frequencies(self) -> torch.Tensor:
        """Radians per position of each rotary pair, [D/2] float32, as scaled."""
        plain = rope_frequencies(self.rope_theta, self.head_dim)
        return plain if self.rope_scaling is None else self.rope_scaling.scale(plain, self.rope_theta)

    @property
    def rope_amplitude(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.amplitude

    @classmethod
    def from_hf(cls, config: dict[str, Any], generation_config: dict[str, Any] | None, where: str) -> ModelConfig:
        """Reads `config.json` and, for the EOS tokens, `generation_config.json` (which wins).

        Understands `rope_parameters` (transformers 5) and `rope_theta`/`rope_scaling` (before). `where` names the
        file in errors. Raises InvalidInput for an unsupported architecture or feature, a missing key or a bad value.
        """
        read = ConfigReader(config, where)
        architecture = _hf_architecture(config, where)
        family = FAMILIES[architecture]
        _refuse_hf_features(read, family)
        _refuse_sliding_windows(read, architecture)
        hidden_size, num_heads = read.size("hidden_size"), read.size("num_attention_heads")
        # a null is not absence here: it asks for what follows from the other sizes
        kv_heads = None if "num_key_value_heads" in config else family.kv_heads
        head_dim = None if "head_dim" in config else family.head_dim
        vocab_size = read.size("vocab_size")
        context = read.size("max_position_embeddings", default=family.context)
        rope_theta, rope_scaling = hf_rope(read, context)
        return _checked(
            cls(
                architecture=architecture,
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                intermediate_size=read.size("intermediate_size"),
                num_layers=read.size("num_hidden_layers", limit=_MAX_LAYERS),
                num_heads=num_heads,
                num_kv_heads=read.size("num_key_value_heads", default=kv_heads or num_heads),
                head_dim=_head_dim(read, "head_dim", hidden_size, num_heads, head_dim),
                rms_norm_eps=read.positive("rms_norm_eps", default=1e-6),
                rope_theta=rope_theta,
                max_position_embeddings=context,
                tie_word_embeddings=read.flag("tie_word_embeddings", default=False),
                eos_token_ids=_hf_eos(config, generation_config, family.eos, vocab_size, where),
                rope_scaling=rope_scaling,
            ),
            where,
        )

    @classmethod
    def from_gguf(cls, fields: dict[str, Any], vocab_size: int, tied: bool, where: str) -> ModelConfig:
        """Reads GGUF metadata. `vocab_size` is the number of embedding rows; `tied` says that no head is stored.

        The EOS tokens are the eos, eot and eom ids of the tokenizer metadata; none of them gives an empty tuple.
        Raises InvalidInput as `from_hf` does.
        """
        architecture = fields.get("general.architecture")
        known = [name for name, family in FAMILIES.items() if family.gguf_interleaved is not None]
        if architecture not in known:
            raise InvalidInput(
                f"{where}: architecture {shortened(architecture)} is not supported; allowed: {', '.join(known)}"
            )
        read = ConfigReader(fields, where, prefix=f"{architecture}.")
        hidden_size, num_heads = read.size("embedding_length"), read.size("attention.head_count")
        head_dim = _head_dim(read, "attention.key_length", hidden_size, num_heads)
        _refuse_gguf_features(read, head_dim)
        context = read.size("context_length")
        return _checked(
            cls(
                architecture=architecture,
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                intermediate_size=read.size("feed_forward_length"),
                num_layers=read.size("block_count", limit=_MAX_LAYERS),
                num_heads=num_heads,
                num_kv_heads=read.size("attention.head_count_kv", default=num_heads),
                head_dim=head_dim,
                rms_norm_eps=read.positive("attention.layer_norm_rms_epsilon"),
                rope_theta=read.positive("rope.freq_base", default=10000.0),
                max_position_embeddings=context,
                tie_word_embeddings=tied,
                eos_token_ids=_gguf_eos(fields, vocab_size, where),
                rope_scaling=gguf_rope_scaling(read, context),
            ),
            where,
        )


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors by their name after `model.layers.{i}.`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.family.qkv_bias:
        shapes |= {
            f"self_attn.{name}_proj.bias": (rows,) for name, rows in zip("qkv", (q_rows, kv_rows, kv_rows), strict=True)
        }
    if config.family.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this config holds, by its Hugging Face name, in the order of use."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config).items()})
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def weights_read(config: ModelConfig) -> int:
    """How many weights a forward pass reads: all matrices, norms and biases, and of the embedding a few rows only."""
    shapes = expected_shapes(config)
    embedding = shapes.pop("model.embed_tokens.weight")
    head = math.prod(embedding) if config.tie_word_embeddings else 0
    return head + sum(map(math.prod, shapes.values()))


def _hf_architecture(config: dict[str, Any], where: str) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        allowed = ", ".join(FAMILIES)
        raise InvalidInput(f"{where}: model_type {shortened(model_type)} is not supported; allowed: {allowed}")
    wanted = [FAMILIES[model_type].class_name]
    if config.get("architectures", wanted) not in (wanted, None):
        raise InvalidInput(f"{where}: architectures is {shortened(config['architectures'])}; allowed: {wanted}")
    return model_type


def _refuse_hf_features(read: ConfigReader, family: Family) -> None:
    read.only("hidden_act", "silu")
    if not family.qkv_bias:
        read.only("attention_bias", False)
    read.only("mlp_bias", False)
    read.only("partial_rotary_factor", 1.0)
    for key, allowed in (("quantization_config", "unquantised weights"), ("vision_config", "text models")):
        if read.get(key) is not None:
            raise read.refuse(key, read.get(key), f"absent ({allowed})")
    for key in ("num_local_experts", "num_experts"):
        if read.get(key) is not None:
            raise read.refuse(key, read.get(key), "absent (no mixture of experts)")


def _refuse_sliding_windows(read: ConfigReader, architecture: str) -> None:
    """Layers that look back at a limited number of tokens are not implemented; a window that is off does not matter."""
    layers = read.get("layer_types", [])
    if not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
        raise read.refuse("layer_types", layers, "'full_attention' for every layer")
    if architecture in ("qwen2", "qwen3"):
        read.only("use_sliding_window", False)
        return
    window = read.values.get("sliding_window", _MISTRAL_WINDOW if architecture == "mistral" else None)
    if window is not None:
        absent = "" if "sliding_window" in read.values else " (assumed: the key is absent)"
        raise InvalidInput(f"{read.where}: sliding_window is {shortened(window)}{absent}; allowed: null (no window)")


def _head_dim(read: ConfigReader, key: str, hidden_size: int, num_heads: int, default: int | None = None) -> int:
    if read.get(key, default) is None and hidden_size % num_heads:
        raise InvalidInput(
            f"{read.where}: hidden size {hidden_size} is not a multiple of {num_heads} heads and no {key} is given"
        )
    head_dim = read.size(key, default=default or hidden_size // num_heads)
    if head_dim % 2:
        raise InvalidInput(f"{read.where}: head dimension {head_dim} is odd; rotary embedding needs an even one")
    return head_dim


def _refuse_gguf_features(read: ConfigReader, head_dim: int) -> None:
    read.only("attention.value_length", head_dim)
    read.only("rope.dimension_count", head_dim)
    read.only("attention.sliding_window", 0)
    read.only("attention.causal", True)
    read.only("expert_count", 0)


def _checked(config: ModelConfig, where: str) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise InvalidInput(
            f"{where}: {config.num_heads} attention heads cannot share {config.num_kv_heads} key/value heads; "
            "the first must be a multiple of the second"
        )
    if isinstance(config.rope_scaling, YarnScaling) and config.rope_theta <= 1:
        raise InvalidInput(f"{where}: rope_theta is {config.rope_theta}; allowed with YaRN: a number above 1")
    return config


def _hf_eos(
    config: dict[str, Any], generation_config: dict[str, Any] | None, default: int | None, vocab_size: int, where: str
) -> tuple[int, ...]:
    value = config.get("eos_token_id", default)  # an explicit null means "no EOS"
    if generation_config is not None and generation_config.get("eos_token_id") is not None:
        value = generation_config["eos_token_id"]
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return _token_ids(ids, vocab_size, f"{where}: eos_token_id")


def _gguf_eos(fields: dict[str, Any], vocab_size: int, where: str) -> tuple[int, ...]:
    found = (fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    ids = [token_id for token_id in found if token_id is not None]
    return _token_ids(ids, vocab_size, f"{where}: tokenizer.ggml.eos_token_id, eot_token_id or eom_token_id")


def _token_ids(ids: list[Any], vocab_size: int, what: str) -> tuple[int, ...]:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidInput(f"{what} is {shortened(token_id)}; allowed: an integer from 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(ids))
