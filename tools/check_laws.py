"""Which tokens come out, counted over many seeds and compared with the law that follows from the definitions.

The first three tokens of texts of a tiny model: the first is drawn from the prompt's last row, the others are drafts
that were tested, or what took their place. With at least two drafts per round each of them was tested, in whichever
round. So, with q the verifier's law, p the draft's, a the probability of acceptance and r the residual of a rule,

    P(t1 t2 t3) = q(t1) h(t2 | t1) h(t3 | t1 t2),   h(x) = p(x) a(x) + sum_n p(n) (1 - a(n)) r_n(x)

and h = q for speculative sampling whatever the draft. Seeds are fixed, so that the outcome is always the same; for a
right implementation the chance that they had been unlucky is `FALSE_ALARM` per table of counts. Where kernels are
interpreted, which is slow, texts take torch's path.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from check_models import own_attention, random_model, replays, small_config, with_graphs
from check_run import Check, Finding, Setting
from fused_spec import Cactus, Engine, SpeculativeSampling
from fused_spec.kernels.acceptance_reference import acceptance_reference
from fused_spec.kernels.check import default_backend
from fused_spec.models.transformer import Transformer
from fused_spec.rules import Rule

VOCAB, LENGTH, M = 6, 3, 2
PROMPT = [0, 1, 2, 3, 4, 5, 0, 2]
FALSE_ALARM = 1e-6


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Chance of counts [N] at least as unlikely under a law [N], by chi-square; 0 if something impossible was drawn.

    Cells are pooled, from the rarest on, until 5 are expected of each pool: the approximation is good from there on.
    """
    if counts[law == 0].sum() > 0:
        return 0.0
    expected = law * counts.sum()
    pools: list[list[float]] = [[0.0, 0.0]]
    for cell in expected.argsort().tolist():
        if pools[-1][1] >= 5:
            pools.append([0.0, 0.0])
        pools[-1][0] += counts[cell].item()
        pools[-1][1] += expected[cell].item()
    if len(pools) > 1 and pools[-1][1] < 5:
        seen, due = pools.pop()
        pools[-1] = [pools[-1][0] + seen, pools[-1][1] + due]
    if len(pools) == 1:
        raise AssertionError("too few counts to say anything")
    statistic = sum((seen - due) ** 2 / due for seen, due in pools)
    halves = torch.tensor([len(pools) - 1, statistic], dtype=torch.float64) / 2
    return torch.special.gammaincc(halves[0], halves[1]).item()


def emitted(rule: Rule, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """h [V], the law of the token that a tested slot gives."""
    law = torch.zeros_like(q)
    for token in p.nonzero()[:, 0].tolist():
        accept, _, residual = acceptance_reference(rule, p, q, token)
        law[token] += p[token] * accept
        law += p[token] * (1 - accept) * residual
    return law


def joint_law(rule: Rule, verifier: Transformer, draft: Transformer | None) -> torch.Tensor:
    """[V, V, V] float64; without a draft the verifier's own law."""
    law = torch.zeros((VOCAB,) * LENGTH, dtype=torch.float64)
    first = next_law(verifier, PROMPT)

    def following(text: list[int]) -> torch.Tensor:
        q = next_law(verifier, text)
        return q if draft is None else emitted(rule, next_law(draft, text), q)

    for a in range(VOCAB):
        second = following([*PROMPT, a])
        for b in range(VOCAB):
            law[a, b] = first[a] * second[b] * following([*PROMPT, a, b])
    return law


def next_law(model: Transformer, text: list[int]) -> torch.Tensor:
    """[V] float64 on the CPU: what follows a text, at T = 1."""
    cache = model.new_cache(len(text), attention=own_attention(model.device))
    tokens = torch.tensor(text, device=model.device)
    logits = model.forward(tokens, torch.arange(len(text), device=model.device), cache, last_only=True)
    return logits[0].double().softmax(0).cpu()


def draw(engine: Engine, runs: int) -> tuple[torch.Tensor, int, int]:
    """([V, V, V] counts of the first tokens over fresh seeds, drafts accepted, and tested or not, in all)."""
    counts = torch.zeros((VOCAB,) * LENGTH, dtype=torch.float64)
    accepted = drafted = 0
    for seed in range(runs):
        out = engine.generate(PROMPT, max_new_tokens=LENGTH, seed=seed)
        counts[tuple(out.token_ids)] += 1
        accepted, drafted = accepted + out.stats.accepted, drafted + out.stats.drafted
    return counts, accepted, drafted


def check_law(rule: Rule, drafter: str, setting: Setting) -> Finding:
    """The joint law of three tokens and all its marginals: a bias spread thin over 216 cells is thick in six."""
    with default_backend("torch") if setting.reduced else nullcontext():
        verifier, model = (_tiny(setting, seed) for seed in (1, 2))
        draft: Any = model if drafter == "model" else drafter
        options: dict[str, Any] = {"rule": rule, "num_draft_tokens": M, "max_length": 32}
        engine = with_graphs(Engine(verifier, draft=draft, attention=own_attention(setting.device), **options))
        law = joint_law(rule, verifier, model if drafter == "model" and rule != SpeculativeSampling() else None)
        counts, accepted, drafted = draw(engine, 400 if setting.reduced else 3000)
    if not 0 < accepted < drafted:
        raise AssertionError(f"{accepted} of {drafted} drafts accepted: nothing is learnt from that")
    chances = []
    for axes in ((), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        parts = [table.sum(axes).flatten() if axes else table.flatten() for table in (counts, law)]
        chances.append(p_value(*parts))
    if min(chances) < FALSE_ALARM:
        raise AssertionError(f"the tokens do not follow their law: chance {min(chances):.1e}, at least {FALSE_ALARM}")
    numbers = {"texts": int(counts.sum()), "accepted": accepted, "drafted": drafted, "smallest_p": min(chances),
               "false_alarm": FALSE_ALARM, "replays": replays(engine)}  # fmt: skip
    key = f"{numbers['texts']} texts, smallest p {min(chances):.2g} of 7 (alarm below {FALSE_ALARM:g})"
    return Finding(key, numbers)


def _tiny(setting: Setting, seed: int) -> Transformer:
    """In float32, so that laws computed here are those that tokens are drawn from."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
    }
    config = small_config(setting, vocab_size=VOCAB, num_layers=1, **sizes)
    return random_model(config, torch.float32, setting.device, seed)


CHECKS: dict[str, Check] = {
    "laws/speculative": partial(check_law, SpeculativeSampling(), "model"),
    "laws/speculative-self-int4": partial(check_law, SpeculativeSampling(), "self-int4"),
    "laws/cactus": partial(check_law, Cactus(0.1), "model"),
    "laws/cactus-exact": partial(check_law, Cactus(0.1, solver="exact"), "model"),
}
