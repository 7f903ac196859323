"""Fine-tune on the synthetic texts once more, and attack the model by membership inference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from gradmm.audits.mia_audit import mia_audit, summarise
from gradmm.config.settings import MiaAuditSettings
from gradmm.data.examples import Examples
from gradmm.evaluation.finetune_eval import Finetuning
from gradmm.evaluation.schedule import Schedule
from gradmm.filters.rows import token_lists
from gradmm.labelling.labelling import probability_matrix
from gradmm.lm.classification import score

#: Members, and non-members, whose losses are computed, as a multiple of the number used by one run of the attack.
POOL = 10


def attack_texts(
    finetuning: Finetuning,
    texts: pd.DataFrame,
    members: Examples,
    non_members: Examples,
    schedule: Schedule,
    settings: MiaAuditSettings,
    epsilon: float | None,
    delta: float | None,
    seed: int,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Attack a model that is fine-tuned on texts: the rows and figures of the stage `mia_audit`.

    Args:
        texts: rows of the stage `labelling`.
        members: records that the target gradient was computed from.
        non_members: unused records from the same source.
        epsilon, delta: the claim; `epsilon=None` for no claim.
        seed: of the records that are drawn, and of the attack. The fine-tuning has the first of its own seeds.
    """
    probabilities = torch.from_numpy(probability_matrix(texts))
    examples = Examples(token_lists(texts), texts["label"].tolist(), probabilities)
    first_seed = finetuning.settings.seeds[0]
    tuned = finetuning.finetune(examples, schedule, first_seed, "fine-tune for the audit")
    pool = POOL * (settings.threshold_records + settings.test_records)

    def losses(records: Examples) -> Float[np.ndarray, " records"]:
        drawn, batch_size = records.sample(pool, seed), finetuning.settings.eval_batch_size
        scores = score(tuned, finetuning.template, drawn.texts, drawn.labels, batch_size)
        return scores.losses.double().numpy()

    frame = mia_audit(losses(members), losses(non_members), settings, seed, epsilon, delta or 0.0)
    return frame, summarise(frame)
