"""Tokenizers from GGUF metadata, byte-level BPE against transformers; and tokenizers of folders."""

import copy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_REGEX

from fused_spec.errors import InvalidInput
from fused_spec.models.byte_level_bpe import LLAMA3_SPLIT, QWEN2_SPLIT
from fused_spec.models.gguf_file import GGUFFile
from fused_spec.models.tokenizer import (
    check_fits,
    check_same_tokenizer,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)
from tokenizer_fields import byte_level_fields

TEXTS = [
    "Hello, world! It's a fine day, isn't it?",
    "12345 + 67.89 = 12412.89 in 2024",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n\n\tif x != None: pass",
    "emoji 🙂🚀 and 👩‍👩‍👧 family",
    "你好、世界。こんにちは 안녕하세요",
    "  leading, trailing  \n\n\n and\ttabs \r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "cafe\u0301 naïve Straße",
    " ",
    "",
]
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]


def pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    return list(tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]))


@pytest.fixture(scope="module")
def real_pair(smollm2_path: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    ours = tokenizer_from_gguf(GGUFFile(smollm2_path).fields)
    path = Path(smollm2_path)
    return ours, AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_real_file_gives_the_ids_of_transformers(
    real_pair: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase], text: str
) -> None:
    ours, theirs = real_pair
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.decode(ours(text)["input_ids"]) == text


def test_real_file_gives_its_special_tokens_and_the_vocabulary_and_chat_of_transformers(
    real_pair: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase], smollm2_path: Path
) -> None:
    """Special tokens against the file's own metadata: transformers 5.17 takes bos for eos here, 5.24 does not."""
    ours, theirs = real_pair
    check_same_tokenizer(ours, theirs, "target", "draft")
    fields = GGUFFile(smollm2_path).fields
    for role, name in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        assert getattr(ours, f"{role}_token_id") == fields[f"tokenizer.ggml.{name}_token_id"]
    for messages in (MESSAGES, MESSAGES[:1], [{"role": "system", "content": "Be brief."}, *MESSAGES]):
        chat = [tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for tok in real_pair]
        assert chat[0] == chat[1]
        assert "<|im_start|>assistant\n" in chat[0]
    ids = ours("<|im_start|>hi<|im_end|>")["input_ids"]
    assert ours.decode(ids, skip_special_tokens=True) == "hi"


def test_real_file_keeps_spaces_before_digits_apart(
    real_pair: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase],
) -> None:
    """The model's own tokenizer.json splits at digits first, so that both spaces form one token; transformers has no
    rule for "smollm" in GGUF files and splits as GPT-2 does. Should this fail, the texts above may hold such a case."""
    ours, theirs = real_pair
    assert pieces(ours, "a  1") == ["a", "ĠĠ", "1"]
    assert pieces(theirs, "a  1") == ["a", "Ġ", "Ġ", "1"]


def test_smollm_splits_like_digits_then_byte_level() -> None:
    reference = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = tokenizer_from_gguf(byte_level_fields("smollm")).backend_tokenizer
    for text in [*TEXTS, "½ ² Ⅳ  ٣"]:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == reference.pre_tokenizer.pre_tokenize_str(text)


def test_published_regexes() -> None:
    assert QWEN2_SPLIT == QWEN2_REGEX
    assert QWEN2_REGEX.replace(r"\p{N}| ?[", r"\p{N}{1,3}| ?[") == LLAMA3_SPLIT


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["12345", "Ġ", "Ġ6"]),
        ("default", ["12345", "Ġ", "Ġ6"]),
        ("smollm", ["1", "2", "3", "4", "5", "ĠĠ", "6"]),
        ("qwen2", ["1", "2", "3", "4", "5", "Ġ", "Ġ", "6"]),
        ("deepseek-r1-qwen", ["1", "2", "3", "4", "5", "Ġ", "Ġ", "6"]),
        ("tekken", ["1", "2", "3", "4", "5", "Ġ", "Ġ", "6"]),
        ("llama-bpe", ["123", "45", "Ġ", "Ġ", "6"]),
        ("llama-v3", ["123", "45", "Ġ", "Ġ", "6"]),
        ("llama3", ["123", "45", "Ġ", "Ġ", "6"]),
    ],
)
def test_pre_tokenizers_group_digits_differently(pre: str, expected: list[str]) -> None:
    split = tokenizer_from_gguf(byte_level_fields(pre)).backend_tokenizer.pre_tokenizer.pre_tokenize_str("12345  6")
    assert [piece for piece, _ in split] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("camelCase HTTPServer McDonald", ["camel", "Case", "ĠHTTPServer", "ĠMc", "Donald"]),
        ("aBC ABc I'm", ["a", "BC", "ĠABc", "ĠI", "'m"]),
        ("http://a/\n/b //\r\n", ["http", "://", "a", "/Ċ/", "b", "Ġ//čĊ"]),
        ("1234 x  y\n z", ["1", "2", "3", "4", "Ġx", "Ġ", "Ġy", "Ċ", "Ġz"]),
    ],
)
def test_tekken_splits_between_lower_and_upper_case(text: str, expected: list[str]) -> None:
    """By hand from the published regex: upper-case letters end a word unless they precede its first lower-case one."""
    split = tokenizer_from_gguf(byte_level_fields("tekken")).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in split] == expected


@pytest.mark.parametrize("alias", ["llama3", "llama-v3"])
def test_names_that_llama_cpp_treats_alike(alias: str) -> None:
    ours, original = (tokenizer_from_gguf(byte_level_fields(pre)) for pre in (alias, "llama-bpe"))
    assert ours.backend_tokenizer.to_str() == original.backend_tokenizer.to_str()


def test_merges_and_round_trip() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_fields())
    assert tokenizer("abcab12é")["input_ids"] == [257, 256, 258, 259]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_token_types() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_fields())
    ids = tokenizer("<s>ab<think>ab</s>")["input_ids"]
    assert ids == [260, 256, 262, 256, 261]
    assert tokenizer.decode(ids) == "<s>ab<think>ab</s>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think>ab"
    assert "[PAD0]" not in tokenizer.get_vocab()
    assert len(tokenizer("[PAD0]")["input_ids"]) == len("[PAD0]")


def test_decoding_never_cleans_up_spaces() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_fields())
    assert tokenizer.clean_up_tokenization_spaces is False
    text = "ab , ab . do n't ab ! '  's"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("pre", "changes", "expected"),
    [
        ("gpt-2", {}, [256]),
        ("gpt-2", {"add_bos_token": False}, [256]),
        ("gpt-2", {"add_bos_token": True}, [260, 256]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [260, 256, 261]),
        ("gpt-2", {"add_eos_token": True}, [256, 261]),
        ("llama-bpe", {}, [260, 256]),
        ("llama-bpe", {"add_bos_token": False}, [256]),
        ("tekken", {}, [260, 256]),
        ("deepseek-r1-qwen", {}, [256]),
        ("deepseek-r1-qwen", {"add_bos_token": True}, [260, 256]),
    ],
)
def test_bos_and_eos_as_the_file_says(pre: str, changes: dict[str, Any], expected: list[int]) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_fields(pre, **changes))
    assert tokenizer("ab")["input_ids"] == expected
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [256]


def test_bos_with_a_colon_in_its_name() -> None:
    fields = byte_level_fields(add_bos_token=True)
    fields["tokenizer.ggml.tokens"][260] = "<s: 1>"
    assert tokenizer_from_gguf(fields)("ab")["input_ids"] == [260, 256]


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken"])
def test_llama_3_and_tekken_take_whole_words_without_merges(pre: str) -> None:
    """Llama 3's tokenizer.json sets ignore_merges: "xyz" is a token that no merge produces."""
    assert pieces(tokenizer_from_gguf(byte_level_fields(pre, add_bos_token=False)), "xyz") == ["xyz"]
    assert pieces(tokenizer_from_gguf(byte_level_fields("gpt-2")), "xyz") == ["x", "y", "z"]


def test_qwen2_normalises_to_nfc() -> None:
    assert tokenizer_from_gguf(byte_level_fields("qwen2"))("e\u0301")["input_ids"] == [259]
    for pre in ("gpt-2", "deepseek-r1-qwen"):
        assert tokenizer_from_gguf(byte_level_fields(pre))("e\u0301")["input_ids"] != [259]


def test_an_unused_token_with_a_role_keeps_its_id() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_fields(padding_token_id=263))
    assert (tokenizer.pad_token_id, len(tokenizer)) == (263, 265)


def test_the_tokenizer_can_still_be_copied() -> None:
    """Building hands transformers a tokenizer that refuses to be copied; that must not last."""
    tokenizer = tokenizer_from_gguf(byte_level_fields())
    copied = copy.deepcopy(tokenizer)
    copied.add_tokens(["new"])
    assert "new" in copied.get_vocab()
    assert "new" not in tokenizer.get_vocab()


def test_token_types_may_be_absent() -> None:
    fields = byte_level_fields()
    del fields["tokenizer.ggml.token_type"]
    assert tokenizer_from_gguf(fields).get_vocab()["[PAD0]"] == 263


def small(vocab: dict[str, int]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_same_tokenizer() -> None:
    check_same_tokenizer(small({"a": 0, "b": 1}), small({"b": 1, "a": 0}), "T", "D")


@pytest.mark.parametrize(
    ("draft", "difference"),
    [
        ({"a": 0, "b": 1, "c": 3}, "token 'c' is id 3 in the draft and id 2 in the target"),
        ({"a": 0, "c": 2}, "token 'b' is absent in the draft and id 1 in the target"),
        ({"a": 0, "b": 1, "c": 2, "d": 3}, "token 'd' is id 3 in the draft and absent in the target"),
    ],
)
def test_different_tokenizers_are_refused_with_the_first_difference(draft: dict[str, int], difference: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_same_tokenizer(small({"a": 0, "b": 1, "c": 2}), small(draft), "T", "D")
    assert str(caught.value) == f"draft D and target T have different tokenizers: {difference}; they must agree"


def test_ids_beyond_the_embedding_are_refused() -> None:
    check_fits(small({"a": 0, "b": 3}), 4, "x")
    with pytest.raises(InvalidInput, match=r"^x: token 'b' has id 3, but the embedding has 3 rows$"):
        check_fits(small({"a": 0, "b": 3}), 3, "x")


def test_folder(tmp_path: Path) -> None:
    assert tokenizer_from_folder(tmp_path) is None
    saved = tokenizer_from_gguf(byte_level_fields("llama-bpe"))
    saved.clean_up_tokenization_spaces = True
    saved.save_pretrained(tmp_path)
    read = tokenizer_from_folder(tmp_path)
    assert read is not None
    assert read.clean_up_tokenization_spaces is False
    check_same_tokenizer(saved, read, "saved", "read")
    for text in TEXTS:
        assert read(text)["input_ids"] == saved(text)["input_ids"]
    assert read.eos_token == "</s>"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": '])
def test_corrupt_folder_is_refused(tmp_path: Path, content: str) -> None:
    tokenizer_from_gguf(byte_level_fields()).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidInput) as caught:
        tokenizer_from_folder(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: the tokenizer cannot be read: ")
    assert "\n" not in str(caught.value)


def test_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    tokenizer_from_gguf(byte_level_fields()).save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass T: pass\n")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}')
    with pytest.raises(InvalidInput, match="contains custom code which must be executed"):
        tokenizer_from_folder(tmp_path)
    assert not (tmp_path / "ran").exists()
