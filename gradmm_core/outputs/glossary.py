"""Definitions of a run's figures, for the report's glossary.

Entries are by the terms that `gradmm.outputs.descriptions` shows, without numbers, arms and remarks in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

GLOSSARY = {
    # The target.
    "coordinates": "dimensions of the space that each class's gradient is projected onto",
    "probe dimensions": "dimensions of the hidden states for the linear probe",
    "unclipped": "length of the mean gradient of public text in the space",
    "plain": "the same of the gradient that a release gives: clipped, unless the space is centred",
    "clip scale": "mean factor that clipping would multiply public gradients by",
    "records": "private records whose gradients were summed",
    "text tokens": "tokens per text, by class",
    "clip fraction": "share of the records whose gradient was longer than the clipping norm",
    "sigma": "standard deviation of the noise in each coordinate; none without a guarantee",
    "cosine": "cosine between the noisy and the clean target: 1 without distortion, 0 for noise only",
    "class sum noise": "standard deviation of the noise in each entry of the sums of hidden states",
    "second moment noise": "standard deviation of the noise in each entry of their second moments",
    "token sum noise": "standard deviation of the noise in each entry of the token sums",
    "probe shrinkage factor": "factor of the probe's logits; smaller where the probe is noisier",
    "target shrinkage factor": "factor of the target; smaller where the target is noisier",
    # The texts.
    "tilted tokens": "tokens whose probability was changed",
    "word distance before": "share of the words that differ from the released rates, before the tilt",
    "word distance": "the same after the tilt",
    "token passes": "tokens that went through the model",
    "token passes per text": "tokens that went through the model for each text",
    "texts": "number of texts",
    "kept": "texts that the filter left",
    "kept by label": "texts that the filter left, by class",
    "mean matching loss": "mean distance of a text's gradient from its class's target; lower is better",
    "set matching loss": "distance of the mean gradient of all texts from the target; lower is better",
    "set matching loss before": "the same for the texts before the filter",
    "mean probe loss": "mean loss of the texts under the linear probe; lower is better",
    "mean log perplexity": "negative log-likelihood of a token under the model, in nats; lower is more fluent",
    "distinct bigrams": "distinct pairs of neighbouring words, as a share of all; higher is more diverse",
    "self-BLEU": "mean BLEU of a text against all others: 1 for copies, near 0 for unrelated texts",
    "vocabulary": "number of distinct words",
    "words that the other side has too": "share of all words, with repetitions, that also occur on the other side",
    # The labels.
    "texts by label": "texts by their likeliest class",
    "expected by label": "sum of the probabilities of each class",
    "agreement": "share of the texts whose likeliest class is the one that they were written for",
    "confidence": "mean probability of the likeliest class",
    "entropy": "mean entropy of the class probabilities, in nats",
    "answer offset": "mean logit of each class's answer, which calibration subtracts",
    "classifier offset": "mean score of each class by the released classifiers over the texts, also subtracted",
    "class shares": "share of each class among the records, as released",
    "informative tokens": "tokens that change a class's naive Bayes score by more than 0.1 nats",
    "token slope": "coefficient of the naive Bayes classifier's score",
    # Fine-tuning.
    "accuracy before fine-tuning": "share of the test rows that the model classifies correctly as it is",
    "accuracy on": "the same after fine-tuning; of the checkpoint with the best accuracy on validation",
    "precision": "share of the rows answered with a class that are of the class",
    "recall": "share of the rows of a class that are answered with it",
    "F1": "harmonic mean of precision and recall",
    # The attack on the fine-tuned model.
    "advantage": "true positive rate (TPR) minus false positive rate (FPR) of the attack; 0 for guessing",
    "area under the ROC curve": "probability that a member ranks above a non-member; 0.5 if guessed",
    "TPR at 1% FPR": "share of the members found where 1% of the non-members are taken for members",
    "TPR at 0.1% FPR": "share of the members found where 0.1% of the non-members are taken for members",
    "records attacked": "members and non-members in the attack of one split",
    "advantage detected with 80% power": "smallest advantage that a test on these records finds in 80% of cases",
    "power to detect the largest advantage under the guarantee": "how often that test finds the largest advantage",
    # The audit of the mechanism.
    "claimed epsilon": "epsilon that the noise was calibrated for",
    "largest change of the sums by one unit": "in clipping norms C; more than 1 is a bug",
    "standard deviation of the noise, as a share of the claim": "100% for correct noise",
    "confidence of each lower bound": "probability that a lower bound on epsilon holds",
    "lower bound from canaries": "epsilon that the audit proves at least, from repeated draws",
    "lower bound from many canaries in one release": "the same from one draw",
    # The check of the public model.
    "area by the model's loss": "probability that the model finds a train row likelier than a test row",
    "area by the loss less that of neighbouring texts": "the same, each compared with itself, its words exchanged",
    # Memorisation.
    "copies of members": "texts that equal a record used for the target, apart from case and white space",
    "similarity of the nearest record": "cosine of TF-IDF vectors of character n-grams; 1 for a copy",
    "longest common run in words": "most consecutive words that a text has in common with a record",
    "longest common substring in characters": "most consecutive characters in common with a record",
    "share of 8-grams in common": "share of a text's runs of eight words that occur in a record",
    "texts nearer to a member than to a non-member": "50% without memorisation; a tie counts as a half",
    "p-value of a sign test": "probability of so uneven a share without memorisation; too small for similar texts",
}


def entry(term: str) -> str:
    """Return the key in `GLOSSARY` of a term as shown; it may be missing there."""
    term = re.sub(r"( \(|, of ).*$", "", term)
    if term.startswith("accuracy on "):
        return "accuracy on"
    return re.sub(r"from [\d,]+ canaries in and as many out$", "from canaries", term)


def meanings(terms: Iterable[str]) -> list[tuple[str, str]]:
    """Return the entries of the terms with their meanings, each once, in the order of `GLOSSARY`."""
    shown = {entry(term) for term in terms}
    return [(term, meaning) for term, meaning in GLOSSARY.items() if term in shown]
