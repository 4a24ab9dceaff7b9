"""Sizes and constants of a decoder-only transformer, read from a Hugging Face config or GGUF metadata.

Defaults are those of transformers' `LlamaConfig` (Hugging Face) and of llama.cpp's `llama` architecture (GGUF);
anything that would change the arithmetic and is not implemented is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fused_spec.errors import InvalidInput

# architecture -> what its `architectures` entry must say. A further architecture is one more line here, plus the
# tensors it adds in `layer_shapes` (qwen2: qkv bias; qwen3: q/k norm).
ARCHITECTURES = {"llama": "LlamaForCausalLM"}
_MAX_LAYERS = 1024
_MAX_SIZE = 2**31 - 1
_REQUIRED: Any = object()


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

    @classmethod
    def from_hf(cls, config: dict[str, Any], generation_config: dict[str, Any] | None, where: str) -> ModelConfig:
        """Reads `config.json` and, for the EOS tokens, `generation_config.json` (which wins).

        Understands `rope_parameters` (transformers 5) and `rope_theta`/`rope_scaling` (before). `where` names the
        file in errors. Raises InvalidInput for an unsupported architecture or feature, a missing key or a bad value.
        """
        read = _Reader(config, where)
        architecture = _hf_architecture(config, where)
        _refuse_hf_features(read)
        hidden_size, num_heads = read.size("hidden_size"), read.size("num_attention_heads")
        vocab_size = read.size("vocab_size")
        return _checked(
            cls(
                architecture=architecture,
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                intermediate_size=read.size("intermediate_size"),
                num_layers=read.size("num_hidden_layers", limit=_MAX_LAYERS),
                num_heads=num_heads,
                num_kv_heads=read.size("num_key_value_heads", default=num_heads),
                head_dim=_head_dim(read, "head_dim", hidden_size, num_heads),
                rms_norm_eps=read.positive("rms_norm_eps", default=1e-6),
                rope_theta=_hf_rope_theta(read),
                max_position_embeddings=read.size("max_position_embeddings", default=2048),
                tie_word_embeddings=read.flag("tie_word_embeddings", default=False),
                eos_token_ids=_hf_eos(config, generation_config, vocab_size, where),
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
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            raise InvalidInput(f"{where}: architecture {_short(architecture)} is not supported; allowed: {_allowed()}")
        read = _Reader(fields, where, prefix=f"{architecture}.")
        hidden_size, num_heads = read.size("embedding_length"), read.size("attention.head_count")
        head_dim = _head_dim(read, "attention.key_length", hidden_size, num_heads)
        _refuse_gguf_features(read, head_dim)
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
                max_position_embeddings=read.size("context_length"),
                tie_word_embeddings=tied,
                eos_token_ids=_gguf_eos(fields, vocab_size, where),
            ),
            where,
        )


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors by their name after `model.layers.{i}.`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
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


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this config holds, by its Hugging Face name, in the order of use."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config).items()})
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


class _Reader:
    """Typed access to a dictionary that came out of a file; a null counts as absent, as in transformers."""

    def __init__(self, values: dict[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where, self.prefix = values, where, prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        if value is None and default is _REQUIRED:
            raise InvalidInput(f"{self.where}: {self.prefix + key} is missing")
        return default if value is None else value

    def refuse(self, key: str, value: Any, allowed: str) -> InvalidInput:
        return InvalidInput(f"{self.where}: {self.prefix + key} is {_short(value)}; allowed: {allowed}")

    def size(self, key: str, default: int = _REQUIRED, limit: int = _MAX_SIZE) -> int:
        value = self.get(key, default)
        # bool is a subclass of int, and `true` is not a size
        if type(value) is not int or not 1 <= value <= limit:
            raise self.refuse(key, value, f"an integer from 1 to {limit}")
        return value

    def positive(self, key: str, default: float = _REQUIRED) -> float:
        value = self.get(key, default)
        # compared before any conversion: an integer beyond the range of a float would overflow in float()
        if type(value) not in (int, float) or not 0 < value <= 1e30:
            raise self.refuse(key, value, "a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.refuse(key, value, "true or false")
        return value

    def only(self, key: str, allowed: Any) -> None:
        """Refuses a stated value other than `allowed`; equal numbers of different type are the same."""
        value = self.get(key, allowed)
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            raise self.refuse(key, value, f"{allowed!r} or absent")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _allowed() -> str:
    return ", ".join(sorted(ARCHITECTURES))


def _hf_architecture(config: dict[str, Any], where: str) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise InvalidInput(f"{where}: model_type {_short(model_type)} is not supported; allowed: {_allowed()}")
    wanted = [ARCHITECTURES[model_type]]
    if config.get("architectures", wanted) not in (wanted, None):
        raise InvalidInput(f"{where}: architectures is {_short(config['architectures'])}; allowed: {wanted}")
    return model_type


def _refuse_hf_features(read: _Reader) -> None:
    read.only("hidden_act", "silu")
    read.only("attention_bias", False)
    read.only("mlp_bias", False)
    read.only("partial_rotary_factor", 1.0)
    if read.get("quantization_config") is not None:
        raise read.refuse("quantization_config", read.get("quantization_config"), "absent (unquantised weights)")


def _hf_rope_theta(read: _Reader) -> float:
    """The rotary base; `rope_parameters` and the older `rope_scaling` may only describe plain RoPE."""
    theta = read.positive("rope_theta", default=10000.0)
    for key in ("rope_parameters", "rope_scaling"):
        rope = read.get(key, {})
        if not isinstance(rope, dict):
            raise read.refuse(key, rope, "an object or null")
        rope_reader = _Reader(rope, f"{read.where}: {key}")
        for type_key in ("rope_type", "type"):
            if rope_reader.get(type_key, "default") not in ("default", "none"):
                raise rope_reader.refuse(type_key, rope[type_key], "'default' (no rope scaling)")
        rope_reader.only("partial_rotary_factor", 1.0)
        rope_reader.only("factor", 1.0)
        # one dictionary per layer type instead of one for all: not a Llama
        if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
            raise read.refuse(key, nested, "one set of parameters for all layers")
        theta = rope_reader.positive("rope_theta", default=theta)
    return theta


def _head_dim(read: _Reader, key: str, hidden_size: int, num_heads: int) -> int:
    if read.get(key) is None and hidden_size % num_heads:
        raise InvalidInput(
            f"{read.where}: hidden size {hidden_size} is not a multiple of {num_heads} heads and no {key} is given"
        )
    head_dim = read.size(key, default=hidden_size // num_heads)
    if head_dim % 2:
        raise InvalidInput(f"{read.where}: head dimension {head_dim} is odd; rotary embedding needs an even one")
    return head_dim


def _refuse_gguf_features(read: _Reader, head_dim: int) -> None:
    read.only("attention.value_length", head_dim)
    read.only("rope.dimension_count", head_dim)
    read.only("rope.scaling.type", "none")
    # llama.cpp takes a factor without a type for linear scaling; scale_linear is its older name
    read.only("rope.scaling.factor", 1.0)
    read.only("rope.scale_linear", 1.0)
    read.only("expert_count", 0)


def _checked(config: ModelConfig, where: str) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise InvalidInput(
            f"{where}: {config.num_heads} attention heads cannot share {config.num_kv_heads} key/value heads; "
            "the first must be a multiple of the second"
        )
    return config


def _hf_eos(
    config: dict[str, Any], generation_config: dict[str, Any] | None, vocab_size: int, where: str
) -> tuple[int, ...]:
    # An explicit null means "no EOS"; a config that is silent has LlamaConfig's documented 2.
    value = config.get("eos_token_id", 2)
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
            raise InvalidInput(f"{what} is {_short(token_id)}; allowed: an integer from 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(ids))
