"""Language models and their prompts, vocabulary and scores.

model_reference: identity of a model, without loading it.
language_model: embeddings, body and head of a Hugging Face model.
loading: reading one from files, on one device or spread over several, and checking it.
bfloat16_product, last_mlp: faster evaluation of the head and of the last layer.
prompt_template, template, free_text: model inputs in words, in token ids, and with free embeddings.
vocabulary, sentences: allowed tokens and sentence boundaries.
prompt, sampling: continuation of a cached instruction, and public texts sampled from it.
perplexity, classification: scores of texts.
token_passes: compute used.
"""
