"""Generation of one class's texts. Their gradients match the class's target, unless they are kept as written.

generation: generate the texts of one shard by the chosen method, and score them as released.
search: generate by discrete search among texts that the model writes.
admm: generate by Algorithm 1 of the paper.
written: keep texts as the model writes them, without a target.
sampler: draw texts from the class's instruction.
endpoint: draw them from a model that another process serves.
word_tilt: fit a tilt of words, so that texts have the words that were released.
projection: the projection step of ADMM, from free embeddings to tokens.
objectives: the matching loss of a batch of free embeddings.
constraints: the constraints on a text, other than its loss.
result: the texts and losses that a method returns, and the texts as released.
per_class: the length of a class's texts, and its number of records.
shards: the division of a class's examples into shards.
parts_that_fit: the division of work that does not fit into memory.
"""
