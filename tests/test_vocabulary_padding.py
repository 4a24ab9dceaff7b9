"""A draft whose vocabulary is padded to another size than the verifier's: the law is the same, every id in reach."""

from pathlib import Path

import pytest
import torch
from scipy.stats import chi2
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from cycles import ascii_tokenizer
from families import family_model, saved, some_tokens
from fused_spec import Engine
from fused_spec.errors import InvalidInput
from laws import assert_law, chi_square
from toy import next_laws, toy_model

V, NARROW, WIDE = 16, 12, 20
PROMPT = [1, 2, 15, 3, 14]  # ids that the narrow draft lacks among them
VERIFIER = toy_model(1, vocab_size=V, sharpness=1.5)
RUNS = 1500


def verifier_law() -> torch.Tensor:
    """[V, V, V]: first, second and third token."""
    first = next_laws(VERIFIER, PROMPT)[-1]
    second = torch.stack([next_laws(VERIFIER, [*PROMPT, a])[-1] for a in range(V)])
    third = torch.stack([torch.stack([next_laws(VERIFIER, [*PROMPT, a, b])[-1] for b in range(V)]) for a in range(V)])
    return first[:, None, None] * second[:, :, None] * third


@pytest.mark.parametrize("size", [NARROW, WIDE])
def test_the_law_is_the_verifiers(size: int) -> None:
    """Joint law of three tokens over fresh seeds, and each token's own; one false alarm in 10^7 for each of four."""
    law = verifier_law()
    assert law[NARROW:].sum() > 0.1
    engine = Engine(VERIFIER, draft=toy_model(2, vocab_size=size, sharpness=0.5), num_draft_tokens=3, max_length=64)
    counts, drafted, accepted = torch.zeros(V, V, V), 0, 0
    for seed in range(RUNS):
        out = engine.generate(PROMPT, max_new_tokens=3, seed=seed)
        counts[tuple(out.token_ids)] += 1
        drafted, accepted = drafted + out.stats.drafted, accepted + out.stats.accepted
    assert 0.1 < accepted / drafted < 0.9  # a token is emitted in both ways: accepted, and drawn again
    for axes in ((1, 2), (0, 2), (0, 1)):
        assert_law(counts.sum(axes), law.sum(axes), 1e-7)
    assert_law(counts.flatten(), law.flatten(), 1e-7)
    # the ids that the narrow draft lacks, at half their rate, would be found
    starved = law.sum((0, 2))
    starved[NARROW:] /= 2
    assert chi2.sf(*chi_square(counts.sum((0, 2)).double(), starved / starved.sum())) < 1e-7


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(200, 232), (232, 200), (96, 232)])
def test_from_files(tmp_path: Path, target_rows: int, draft_rows: int) -> None:
    """Greedy text does not depend on who drafts; prompt and text hold ids that one of the vocabularies lacks."""
    folders = []
    for name, rows in (("target", target_rows), ("draft", draft_rows)):
        folders.append(str(saved(family_model("llama", vocab=rows), tmp_path / name)))
        ascii_tokenizer().save_pretrained(folders[-1])
    prompt = some_tokens(target_rows)[:40].tolist()
    texts = []
    for draft in (None, folders[1]):
        engine = Engine.from_pretrained(folders[0], draft=draft, dtype="float32", device="cpu", max_length=128)
        assert engine.tokenizer is not None
        assert len(engine.tokenizer) == 96
        texts.append(list(engine.generate(prompt, max_new_tokens=60, temperature=0).token_ids))
    assert texts[0] == texts[1]
    assert len(texts[0]) == 60
    assert max(texts[0]) < target_rows
    if target_rows > draft_rows:
        assert max(prompt) >= draft_rows


def test_another_tokenizer_is_refused_whatever_the_sizes(tmp_path: Path) -> None:
    target = saved(family_model("mistral"), tmp_path / "target")
    draft = saved(family_model("llama"), tmp_path / "draft")
    ascii_tokenizer().save_pretrained(target)
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"0": 0, "1": 1}, merges=[])))
    other.save_pretrained(draft)
    with pytest.raises(InvalidInput) as caught:
        Engine.from_pretrained(target, draft=draft, dtype="float32", device="cpu", max_length=128)
    assert str(caught.value).startswith(f"draft {draft} and target {target} have different tokenizers: token ")
    assert "\n" not in str(caught.value)
