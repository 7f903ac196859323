"""The stages of a run as Prefect tasks, one module per stage in the order of the run.

target_space: the space and the centres of the target, from public text.
mechanism_audit: canaries through the mechanism, before private records are read.
target_gradient: the release: the clipped sums over the private records, with noise.
word_tilt: words tilted towards the released token rates.
generation: texts, written or searched to match the target.
label_filter, loss_selection, category_balance: the filters.
labelling: class probabilities of the texts.
finetune_eval: accuracy after fine-tuning on the texts.
mia_audit, memorisation: attacks on the result.
contamination: a check of the public model, by a command of its own.
runtime: the code that all stage tasks share.
studies: the stages of studies.
"""
