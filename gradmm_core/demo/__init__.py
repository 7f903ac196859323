"""The demo: a synthetic private data set and a tiny language model, built on the user's machine.

grammar: public and private texts of a context-free grammar.
material: data and model files, built once per folder.
shared: the same files for a root in an object store.
"""
