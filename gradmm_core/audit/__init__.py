"""Empirical audits: lower bounds on epsilon from the mechanism, and attacks on the texts.

mechanism_audit: put canaries through clipping and noise, and compare the epsilon they certify with the claim.
repeated_draws: lower bounds on epsilon from many releases with and without one canary.
one_run: lower bounds on epsilon from guesses about many canaries in one release.
canaries: the clipping and the noise of a target's release, applied to canaries.
mia_audit: membership inference on a model fine-tuned on the synthetic texts, and its power.
memorisation: overlap of the released texts with members and with non-members.
"""
