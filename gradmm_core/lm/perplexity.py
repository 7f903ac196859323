"""Log-perplexity of texts under a language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import length_bucketed


@torch.no_grad()
def log_perplexities(
    language_model: LanguageModel, texts: Sequence[list[int]], batch_size: int = 32
) -> list[float]:
    """Compute the mean token negative log-likelihood (nats) of each text.

    Each text is a separate document after the beginning-of-sequence token. A model without that token does not
    predict the first token, which is excluded; the log-perplexity of a one-token text is then NaN.
    """
    start = language_model.tokenizer.bos_token_id
    context = [] if start is None else [start]
    out = [float("nan")] * len(texts)
    for rows in length_bucketed([len(t) for t in texts], batch_size):
        sequences = [torch.tensor([*context, *texts[i]], device=language_model.device) for i in rows]
        ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        hidden = language_model.hidden_states(input_ids=ids)[:, :-1]
        for i, states, sequence in zip(rows, hidden, sequences, strict=True):
            logits = language_model.logits(language_model.augment(states[: len(sequence) - 1]))
            out[i] = float(F.cross_entropy(logits, sequence[1:]))
    return out
