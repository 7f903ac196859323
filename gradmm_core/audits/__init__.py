"""Empirical audits: lower bounds on epsilon from the mechanism, and attacks on the texts.

mechanism_audit: release canaries many times, and compare what comes out with the claim.
canaries: a target's release whose records are canaries.
checks: how far a canary moves the sums, and how large and independent the noise is.
repeated_draws: lower bounds on epsilon from many releases, each canary in or out.
one_run: lower bounds on epsilon from guesses about many canaries in one release.
mia_audit: membership inference on a model fine-tuned on the synthetic texts, and its power.
contamination: whether the public model has seen the private records before.
memorisation: overlap of the released texts with members and with non-members.
"""
