"""Statistics of text sets, repeated measurements and classifiers' scores.

words: a text's words, in scripts with and without spaces.
diversity: distinct-n, self-BLEU and near duplicates.
text_figures: number, mean losses, perplexity and diversity of a table of texts.
distribution: Fréchet distance, MMD and nearest neighbours of embeddings.
resemblance: lengths, vocabulary and a map of synthetic texts and as many real ones.
intervals: means over seeds with Student intervals.
roc: area under the ROC curve, and true positive rates at small false positive rates.
"""
