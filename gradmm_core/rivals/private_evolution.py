"""Private Evolution: texts of the model, which the data only choose (Lin et al., 2024; Aug-PE, Xie et al., 2024).

For each class, with N texts to release, L variations and T iterations:

    S = N (L + 1) texts that the model writes from the class's instruction
    T times:
        every record of the class votes for the text of S whose features are nearest to its own
        h = votes + noise of standard deviation sigma sqrt(T)
        keep the N texts with the largest h
        S = these, and L variations of each

The texts that were kept last are released. A record has one vote in each of T histograms. Together these are one
release of the Gaussian mechanism with sensitivity 1 and standard deviation sigma, because Gaussian mechanisms
compose exactly (Dong, Roth and Su, 2022).

The features are those of the public target space, whitened on the model's own texts. A model that takes no
instructions cannot paraphrase on request: a variation keeps the beginning of a text, of random length, and the
model writes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradmm.config.settings import GenerationSettings, TargetGradientSettings
from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.filters.rows import token_lists
from gradmm.generation.constraints import TextConstraints
from gradmm.generation.result import released_texts
from gradmm.gradients.head_gradient import products_one_by_one
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.perplexity import log_perplexities
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sampling import write_texts
from gradmm.lm.sentences import PAD, SentenceEnds
from gradmm.lm.template import TokenisedTemplate, tokenise_split
from gradmm.lm.token_passes import ComputeMeter
from gradmm.lm.vocabulary import allowed_tokens
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.rivals.releases import UNFILTERED, counted_records
from gradmm.storage.artifacts import StageOutput
from gradmm.target.features import TextFeatures, means_in_batches
from gradmm.target.record_batches import RecordBatches
from gradmm.target.target_space import features_from_table, from_table

#: Columns of texts that the records have voted for.
VOTED = ["rank", "predicted", *UNFILTERED]


def votes_of_records(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: pd.DataFrame,
    data: LabelledTexts,
    space: StageOutput,
    matching: TargetGradientSettings,
    per_class: int,
) -> dict[int, Int[np.ndarray, " candidates"]]:
    """Count the records' votes for the texts of their class, by label and in the order of the texts; private.

    Formal guarantee: a record enters the histogram of one class, with one vote that depends on this record and on
    the texts alone, which the data have reached through earlier histograms at most. Adding or removing a record
    changes the histograms of all classes, as one vector, by at most 1 in norm.

    Args:
        texts: of the stage `generation` or `variations`.
        space: its features measure the distances.
        per_class: the number of texts that are to be kept.

    Raises:
        InputError: if the space has no features, or a class has fewer candidates than texts to keep.
    """
    table = space.read_table()
    features = features_from_table(table, language_model.device)
    if features is None:
        problem, fix = "private-evolution compares texts by the probe's features", "set it to more than 0"
        raise InputError(problem, "target_gradient.probe_share", fix)
    candidates = {label: token_lists(texts[texts["label"] == label]) for label in template.labels}
    for label, of_class in candidates.items():
        if len(of_class) < per_class:
            problem = f"{len(of_class)} candidates of label {label} are fewer than the {per_class} to keep"
            raise InputError(problem, "generation.per_class", "ask for fewer texts")
    where = from_table(table, template, matching, language_model.device)
    record_batches = RecordBatches(language_model, template, where, matching.batch_size, private=True)
    return count_votes(language_model, template, candidates, data, features, record_batches)


def voted_texts(
    texts: pd.DataFrame,
    votes: Mapping[int, Int[np.ndarray, " candidates"]],
    mechanism: GaussianMechanism,
    per_class: int,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Keep the texts with the most noisy votes: the rows and figures of the stage `private_votes`.

    Every call draws fresh noise: one more release.

    Args:
        votes: see `votes_of_records`.
        mechanism: of this histogram, see `mechanism_of_part`.

    Returns:
        The kept texts of each class, the one with the most votes first, with the columns of a filter; and, by
        label, the number of candidates, the sum of the noisy votes of those kept, and that of all, which is the
        noisy number of records.
    """
    noisy = noisy_votes(votes, mechanism)
    kept, of_kept = [], {}
    for label, of_class in noisy.items():
        best = np.argsort(-of_class, kind="stable")[:per_class]
        kept.append(texts[texts["label"] == label].iloc[best].assign(rank=np.arange(1, per_class + 1)))
        of_kept[str(label)] = float(of_class[best].sum())
    rows = pd.concat(kept, ignore_index=True).assign(**UNFILTERED, predicted=pd.NA)
    candidates = {str(label): len(of_class) for label, of_class in votes.items()}
    counted = counted_records(
        {label: float(of_class.sum()) for label, of_class in noisy.items()},
        {label: mechanism.sigma * len(of_class) ** 0.5 for label, of_class in noisy.items()},
    )
    return rows, {"candidates": candidates, "noisy_votes_of_kept": of_kept} | counted


@torch.no_grad()
def count_votes(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    candidates: Mapping[int, Sequence[list[int]]],
    data: LabelledTexts,
    features: TextFeatures,
    record_batches: RecordBatches,
) -> dict[int, Int[np.ndarray, " candidates"]]:
    """Count, for each candidate, the records of its class whose features are nearest to its own.

    The first of equally near candidates has the vote. A record without finite features does not vote.

    Args:
        candidates: token ids of texts, by label.
    """
    tokens = tokenise_split(language_model.tokenizer, data.texts, template.max_text_tokens, None)
    votes = {}
    for label, texts in candidates.items():
        points = candidate_features(language_model, template, features, texts)
        half_squares = points.square().sum(dim=1) / 2
        counts = np.zeros(len(texts), dtype=np.int64)
        records = data.of_class(label)
        for part, vectors in record_batches(tokens, records, label):
            assert vectors.features is not None  # the space has features
            # Each record by itself: another in the batch must not change its vote.
            products = products_one_by_one(vectors.features, points.mT)[:, 0]
            nearest = (products - half_squares).argmax(dim=1)
            valid = vectors.features[:, 0].isfinite().all(dim=1)
            chosen = nearest[: len(part)][valid[: len(part)]]
            np.add.at(counts, chosen.cpu().numpy(), 1)
        votes[label] = counts
    return votes


def candidate_features(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    features: TextFeatures,
    texts: Sequence[list[int]],
    batch_size: int = 64,
) -> Float[Tensor, "candidates features"]:
    """Compute public texts' features, in the form in which records have theirs, see `RecordBatches`."""
    points = torch.zeros(len(texts), len(features.map) + 1, dtype=torch.float64, device=language_model.device)
    for rows, means in means_in_batches(language_model, template, texts, batch_size):
        points[rows] = features.with_constant(means)
    return points


def noisy_votes(
    votes: Mapping[int, Int[np.ndarray, " candidates"]], mechanism: GaussianMechanism | None
) -> dict[int, Float[np.ndarray, " candidates"]]:
    """Add noise to all classes' votes, which are one vector. Every call draws fresh noise: one more release."""
    counts = np.concatenate([*votes.values()]).astype(np.float64)
    noisy = counts if mechanism is None else counts + mechanism.noise(counts.shape)
    bounds = np.cumsum([len(of_class) for of_class in votes.values()])[:-1]
    return dict(zip(votes, np.split(noisy, bounds), strict=True))


def vary_texts(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    kept: pd.DataFrame,
    instructions: Mapping[int, str],
    text_tokens: Mapping[int, int],
    generation: GenerationSettings,
    variations: int,
    seeds: tuple[int, int],
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the kept texts with variations of each: the rows and figures of the stage `variations`.

    A variation keeps the beginning of its text, from one token to all but one, each length being equally likely.
    Variations that contain a class's answer are left out.

    Args:
        kept: of the stage `private_votes`.
        text_tokens: the length to which variations are written before they are cut, by label.
        seeds: the run's, and the number of the iteration.
    """
    parts = [kept.drop(columns=VOTED)]
    for label in template.labels:
        of_class = kept[kept["label"] == label]
        arguments = (instructions[label], text_tokens[label], generation, variations, seeds)
        parts.append(_variations_of_class(language_model, template, of_class, *arguments))
    texts = pd.concat(parts, ignore_index=True)
    return texts, {"variations": len(texts) - len(kept)}


def _variations_of_class(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    kept: pd.DataFrame,
    instruction: str,
    tokens: int,
    generation: GenerationSettings,
    variations: int,
    seeds: tuple[int, int],
) -> pd.DataFrame:
    allowed = allowed_tokens(language_model, generation.projection.language)
    constraints = TextConstraints(language_model, template)
    ends = SentenceEnds(language_model) if generation.whole_sentences else None
    prompt_cache = PromptCache(language_model, instruction)
    parents = kept.loc[kept.index.repeat(variations)].reset_index(drop=True)
    randoms = [
        np.random.default_rng([*seeds, int(label), int(rank), number])
        for number, (label, rank) in enumerate(zip(parents["label"], parents["rank"], strict=True))
    ]
    # A text of one token keeps it; one that is longer than texts are written keeps less than that.
    lengths = [max(1, min(len(text), tokens) - 1) for text in parents["token_ids"]]
    begun = np.array([random.integers(1, length + 1) for random, length in zip(randoms, lengths, strict=True)])
    uniforms = np.stack([random.random(tokens) for random in randoms])
    ids = torch.full((len(parents), tokens), PAD, device=language_model.device)
    with ComputeMeter(language_model) as meter:
        for length in np.unique(begun).tolist():
            rows = np.flatnonzero(begun == length)
            beginnings = torch.tensor([list(text[:length]) for text in parents["token_ids"].iloc[rows]])
            ids[rows] = write_texts(
                language_model,
                allowed,
                prompt_cache,
                uniforms[rows],
                generation.written.top_k,
                ends=ends,
                beginnings=beginnings.to(ids),
            )
    released = released_texts(language_model, template, ids)
    written = parents.assign(
        text=released["text"],
        token_ids=released["token_ids"],
        id=[f"{parent}.{number % variations}" for number, parent in enumerate(parents["id"])],
        token_passes=meter.token_passes / len(parents),
    )
    written = written[constraints.without_answer(ids).cpu().numpy() & (written["token_ids"].map(len) > 0)]
    perplexities = log_perplexities(language_model, written["token_ids"].tolist())
    return written.drop(columns=VOTED).assign(log_perplexity=perplexities)
