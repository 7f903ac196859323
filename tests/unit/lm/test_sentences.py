"""Sentence ends by token, compared with a regular expression on the decoded text."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradmm.lm.language_model import LanguageModel
from gradmm.lm.sentences import PAD, SentenceEnds
from gradmm.lm.vocabulary import allowed_tokens
from tests.conftest import examples

END = re.compile(r"""[.!?][\"')]*(?=\s|$)""")


def as_text(phi: LanguageModel, ids: Tensor) -> str:
    return phi.decode([token for token in ids.tolist() if token != PAD])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("late again . the soup", "late again ."),
        ("late again! the soup", "late again!"),
        ("late? again, the soup was", "late? again, the soup was"),  # the end is in the first half
        ("late again", "late again"),
        ("late. again. the", "late. again."),
        ('late again." the', 'late again."'),
        ("late (again!) the", "late (again!)"),
        ("late again... the", "late again..."),
        ("late, at 3.5 again", "late, at 3.5 again"),
        ("late, at 3.5 again.", "late, at 3.5 again."),
    ],
)
def test_texts_are_cut_after_their_last_sentence(phi: LanguageModel, text: str, left: str) -> None:
    ends = SentenceEnds(phi)
    (cut,) = ends.cut(torch.tensor([phi.encode(text)]))
    assert as_text(phi, cut).strip() == left
    assert bool(ends.complete(cut[None])) == left.endswith((".", "!", ")", '"'))
    assert torch.equal(ends.cut(cut[None])[0], cut)  # idempotent


@examples(200)
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 12))
def test_a_cut_text_ends_at_its_last_sentence_end_in_the_second_half(
    phi: LanguageModel, seed: int, tokens: int
) -> None:
    ends, allowed = SentenceEnds(phi), allowed_tokens(phi, "english").ids
    random = torch.Generator().manual_seed(seed)
    endings = torch.tensor([phi.encode(f"late{end}")[-1] for end in (".", "!", "?", '"', ")")])
    pool = torch.cat([allowed, endings.repeat(len(allowed) // 12)])
    ids = pool[torch.randint(len(pool), (4, tokens), generator=random)]
    for text, cut in zip(ids, ends.cut(ids), strict=True):
        length = int((cut != PAD).sum())
        assert torch.equal(cut[:length], text[:length])
        assert bool((cut[length:] == PAD).all())
        whole = as_text(phi, text)
        found = [match.end() for match in END.finditer(whole)]
        at = [place for place in range(1, tokens + 1) if len(as_text(phi, text[:place])) in found]
        late = [place for place in at if 2 * place > tokens]
        assert length == (late[-1] if late else tokens)
        assert bool(ends.complete(cut[None])) == bool(late)


def test_some_scripts_end_sentences_without_a_space(phi: LanguageModel) -> None:
    """The tiny tokenizer has no token for such characters, so the masks are set by hand."""
    ends = SentenceEnds(phi)
    first, second = phi.encode("late again")[:2]
    assert not ends(torch.tensor([[first, second]])).any()
    ends.tokens[first] = ends._without_space[first] = True
    assert ends(torch.tensor([[first, first]])).tolist() == [[True, True]]
