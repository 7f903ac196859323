"""Purpose, result and figures of each stage in plain text.

The terminal's summary, the pages in Prefect's UI and the report show them, each with its own escaping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradmm.config.recipe import Recipe
from gradmm.outputs.formatting import number, percent, points
from gradmm.outputs.record import RunRecord, StageRecord

#: The purpose of each stage, in the order of a run; the stages of studies come last. README.md has the same lines.
STAGES = {
    "target_space": "derive a small space from text that the model writes",
    "mechanism_audit": "test clipping and noise with canaries",
    "target_gradient": "sum clipped gradients, a probe's moments and token rates; add noise once if private",
    "word_tilt": "tilt words towards the released rates",
    "generation": "write texts; or search for those that match the gradient, or use ADMM",
    "label_filter": "if enabled, drop texts that model and probe assign to another class",
    "loss_selection": "drop near duplicates; after a search, keep the best matches",
    "category_balance": "after a search or ADMM, trim classes that match worse",
    "labelling": "give each text class probabilities, by the calibrated model and what was released",
    "finetune_eval": "fine-tune on these texts and on as many real ones",
    "mia_audit": "attack the fine-tuned model by membership inference",
    "memorisation": "search the texts for copies of private rows",
    "contamination": "test whether the public model was trained on the train rows",
    "coresets": "select real rows by herding and k-center",
    "private_votes": "keep the texts that most records vote for, with noise (Private Evolution)",
    "variations": "write variations of the texts that were kept",
    "private_means": "release the classes' mean hidden states, with noise (EPSVec)",
    "steered_texts": "write texts, steered by the released means",
    "private_examples": "write examples by noisy sums of the answers to records (DP few-shot)",
    "private_adapters": "train adapters of the model by DP-SGD",
    "adapted_texts": "write texts by the adapted model",
    "class_shares": "multiply a rival's soft labels by the classes' released shares",
    "arm_eval": "fine-tune on one arm, at one size and with one seed",
    "tfidf_eval": "train a TF-IDF classifier on one arm, with one seed",
    "arm_measures": "measure one arm's fluency, diversity and distance to real text",
    "compare": "compare the accuracy of all arms",
    "scarce": "compare texts generated from few real rows with these rows",
    "transfer": "train other models on the same texts",
    "ablate": "compare the recipe with variants that lack one part",
    "scale": "compare more and more texts of each generation method",
    "epsilon": "compare the recipe's texts under several guarantees",
    "distribution": "measure each arm's distance to real text, with intervals",
    "gradient_path": "compare one arm's gradients with real ones along fine-tuning",
    "gradients": "compare the gradient errors of all arms",
    "bounds": "compare the theory's bounds with observed values",
}

#: Figures whose stored names are not plain words.
FIGURE_NAMES = {
    "distinct_2": "distinct bigrams",
    "self_bleu": "self-BLEU",
    "probe_shrinkage": "probe shrinkage factor",
    "target_shrinkage": "target shrinkage factor",
}

MEMORISATION_MEASURES = {
    "nearest": "similarity of the nearest record",
    "longest_run": "longest common run in words",
    "longest_substring": "longest common substring in characters",
    "ngram_overlap": "share of 8-grams in common",
}

CONTAMINATION_SCORES = {
    "loss": "area by the model's loss",
    "neighbours": "area by the loss less that of neighbouring texts",
}


def stage_title(name: str) -> str:
    return name.replace("_", " ")


def stage_sentence(name: str) -> str:
    """Return the purpose of a stage as a sentence."""
    return f"{STAGES[name][:1].upper()}{STAGES[name][1:]}."


def stage_result(record: StageRecord, recipe: Recipe) -> str:
    """Return what a stage found, in one line.

    Raises:
        KeyError: if a figure is missing.
    """
    figures = record.figures
    match record.stage:
        case "target_space":
            probe = figures["probe_dimensions"]
            coordinates = f"{number(figures['coordinates'])} coordinates per class"
            return f"{coordinates}, {probe} probe dimensions" if probe else coordinates
        case "mechanism_audit":
            return (
                f"noise {percent(figures['noise'])} of what is claimed; lower bound on epsilon "
                f"{figures['certified_epsilon']:.2f} ({figures['expected_certified_epsilon']:.2f} expected, "
                f"{figures['claimed_epsilon']:g} claimed)"
            )
        case "target_gradient":
            records = number(sum(figures["records"].values()))
            parts = [f"{records} records", f"{percent(figures['clip_fraction'])} clipped"]
            if "probe_shrinkage" in figures:
                parts.append(f"probe shrinkage factor {figures['probe_shrinkage']:.2f}")
            if figures["sigma"] is None:
                return ", ".join([*parts, "no noise"])
            cosines = ", ".join(f"{cosine:.2f}" for cosine in figures["cosine"].values())
            parts += [f"noise sigma {figures['sigma']:.3g}", f"cosine with the clean target {cosines}"]
            return ", ".join(parts)
        case "word_tilt":
            before, after = (
                ", ".join(percent(distance, digits=0) for distance in figures[name].values())
                for name in ("word_distance_before", "word_distance")
            )
            tokens = _by_class(figures["tilted_tokens"], recipe)
            return f"tokens tilted: {tokens}; words that differ from those released: {after} ({before} before)"
        case "generation":
            factors = [f"{factor:.2f}" for factor in figures["target_shrinkage"].values() if factor is not None]
            shrinkage = f"target shrinkage factor {', '.join(factors)}, " if factors else ""
            passes = f"{figures['token_passes_per_text']:,.0f} token passes per text"
            return f"{number(record.rows)} texts, {shrinkage}{_quality(figures)}, {passes}"
        case "label_filter" | "loss_selection" | "category_balance":
            left = f"{number(figures['kept'])} of {number(record.rows)} texts left"
            quality = f", {_quality(figures)}" if figures["kept"] else ""
            return f"{left}{quality} ({_by_class(figures['kept_by_label'], recipe)})"
        case "labelling":
            texts = f"{number(record.rows)} texts ({_by_class(figures['texts_by_label'], recipe)})"
            if recipe.labelling.labels == "hard":
                return f"{texts}, labelled as they were written"
            tokens = figures.get("informative_tokens")
            rates = "" if tokens is None else f", {number(tokens)} informative tokens"
            return (
                f"{texts}{rates}, mean probability of the likeliest class {percent(figures['confidence'])}; "
                f"{percent(figures['agreement'])} are likeliest of the class that they were written for"
            )
        case "finetune_eval":
            before = percent(figures["accuracy_before"])
            synthetic, real = (_accuracy(figures, arm, recipe) for arm in ("synthetic", "real"))
            texts, rows = (figures.get(f"texts_{arm}", 0) for arm in ("synthetic", "real"))
            many = "as many" if rows == texts else f"all {number(rows)}"  # where there are fewer
            return f"accuracy before {before}, on synthetic texts {synthetic}, on {many} real texts {real}"
        case "mia_audit":
            spread = _spread(figures, "advantage", recipe.mia_audit.runs)
            return (
                f"advantage {points(figures['advantage'], spread)}, AUC {figures['auc']:.3f} "
                f"({_attacked(figures)}; detectable with 80% power: {_detectable(figures)})"
            )
        case "memorisation":
            copies, longest = (figures[n] for n in ("copies_of_any_member", "longest_run_any_member_max"))
            copied = "copy of a member" if copies == 1 else "copies of members"
            return f"{number(copies)} {copied}, longest common run {number(longest)} words"
        case "contamination":
            found = "the model may have read the train rows" if figures["found"] else "no sign of it"
            return f"{found}: area {_area(figures['areas']['neighbours'])}"
    return f"{number(record.rows)} rows"


def stage_figures(record: StageRecord, recipe: Recipe) -> list[tuple[str, str]]:
    """Return a stage's figures as terms and values.

    Raises:
        KeyError: if a figure is missing.
    """
    figures = record.figures
    match record.stage:
        case "finetune_eval":
            before, *arms = accuracy_rows(figures, recipe)
            after = [
                (f"accuracy on {arm}", f"{own} (best on test {best}, rate {rate}, {steps} steps)")
                for arm, own, best, rate, steps in arms
            ]
            return [("accuracy before fine-tuning", before[1]), *after]
        case "mia_audit":
            rates = ("advantage", "auc", "tpr_at_1_fpr", "tpr_at_01_fpr")
            advantage, auc, at_1, at_01 = ((figures[n], _spread(figures, n, recipe.mia_audit.runs)) for n in rates)
            no_false_positive = " (no false positive)" if figures["test_records"] < 1000 else ""
            power = "no guarantee" if figures["power"] is None else percent(figures["power"])
            return [
                ("advantage (TPR - FPR)", points(*advantage)),
                ("area under the ROC curve", " ± ".join(f"{each:.3f}" for each in auc if each is not None)),
                ("TPR at 1% FPR", percent(*at_1)),
                (f"TPR at 0.1% FPR{no_false_positive}", percent(*at_01)),
                ("records attacked", _attacked(figures)),
                ("advantage detected with 80% power", _detectable(figures)),
                ("power to detect the largest advantage under the guarantee", power),
            ]
        case "mechanism_audit":
            draws = number(figures["draws"])
            return [
                ("claimed epsilon", f"{figures['claimed_epsilon']:g}"),
                ("largest change of the sums by one unit", f"{figures['sensitivity']:.6f} C"),
                (
                    "standard deviation of the noise, as a share of the claim",
                    f"{percent(figures['noise'], digits=2)} (of a correct mechanism: "
                    f"{percent(figures['noise_low'], digits=2)} to {percent(figures['noise_high'], digits=2)})",
                ),
                ("confidence of each lower bound", percent(figures["confidence"])),
                (f"lower bound from {draws} canaries in and as many out", _lower_bound(figures, "")),
                ("lower bound from many canaries in one release", _lower_bound(figures, "one_run_")),
                ("area under the ROC curve", f"{figures['auc']:.3f}"),
                ("TPR at 1% FPR", percent(figures["tpr_at_1_fpr"])),
                ("TPR at 0.1% FPR", percent(figures["tpr_at_01_fpr"], digits=2)),
            ]
        case "memorisation":
            return [
                ("copies of members", number(figures["copies_of_any_member"])),
                *((words, _both_sides(figures, measure)) for measure, words in MEMORISATION_MEASURES.items()),
                ("texts nearer to a member than to a non-member", percent(figures["share_nearer_member"])),
                ("p-value of a sign test", number(figures["sign_test_p"])),
            ]
        case "contamination":
            return [
                (f"{CONTAMINATION_SCORES[name.removeprefix('planted ')]}, of {_compared(name)}", _area(area))
                for name, area in figures["areas"].items()
            ]
    return [
        (FIGURE_NAMES.get(name, name.replace("_", " ")), _value(value, recipe)) for name, value in figures.items()
    ]


def accuracy_rows(figures: Mapping[str, Any], recipe: Recipe) -> list[tuple[str, str, str, str, str]]:
    """Return name, accuracy, accuracy of the checkpoint best on test, learning rate and steps of each arm.

    The first row is the accuracy before fine-tuning. With several seeds, accuracies have a standard deviation.

    Args:
        figures: of the stage `finetune_eval`.
    """
    arms = [name.removeprefix("learning_rate_") for name in figures if name.startswith("learning_rate_")]
    return [
        ("nothing (before)", percent(figures["accuracy_before"]), "–", "–", "–"),
        *(
            (
                f"{arm} texts",
                _accuracy(figures, arm, recipe),
                _accuracy(figures, f"{arm}_best_on_test", recipe),
                f"{figures[f'learning_rate_{arm}']:g}",
                number(figures[f"steps_{arm}"]),
            )
            for arm in sorted(arms, key=lambda arm: arm != "synthetic")
        ),
    ]


def verdict(run: RunRecord) -> list[tuple[str, str]]:
    """Return the main results of a run as terms and values."""
    labelled = run.stage("labelling").figures
    generated = number(run.stage("generation").rows)
    by_class = _by_class(labelled["texts_by_label"], run.recipe)
    return [
        ("texts", f"{number(labelled['texts'])} left of {generated}: {by_class}"),
        ("fine-tuning", stage_result(run.stage("finetune_eval"), run.recipe)),
        ("privacy", run.guarantee.sentence),
        ("membership inference", stage_result(run.stage("mia_audit"), run.recipe)),
    ]


def _quality(figures: Mapping[str, Any]) -> str:
    parts = []
    if "mean_matching_loss" in figures:  # texts that are kept as written have none
        parts.append(f"matching loss {figures['mean_matching_loss']:.3f}")
    if "set_matching_loss" in figures:
        before = figures["set_matching_loss_before"]
        of_set = "as a set" if parts else "matching loss as a set"
        parts.append(f"{of_set} {figures['set_matching_loss']:.3f} ({before:.3f} before)")
    if "mean_probe_loss" in figures:
        parts.append(f"probe loss {figures['mean_probe_loss']:.3f}")
    return ", ".join([*parts, f"log-perplexity {figures['mean_log_perplexity']:.2f}"])


def _accuracy(figures: Mapping[str, Any], name: str, recipe: Recipe) -> str:
    spread = _spread(figures, f"accuracy_{name}", len(recipe.finetune_eval.seeds))
    return percent(figures[f"accuracy_{name}"], spread)


def _by_class(counts: Mapping[str, int], recipe: Recipe) -> str:
    return ", ".join(f"{number(counts[str(label)])} {name}" for label, name in recipe.class_names.items())


def _spread(figures: Mapping[str, Any], name: str, repeats: int) -> float | None:
    """Return a figure's standard deviation; None for a single repeat."""
    return figures[f"{name}_std"] if repeats > 1 else None


def _attacked(figures: Mapping[str, Any]) -> str:
    records = number(figures["test_records"])
    return f"{records} members and {records} non-members"


def _detectable(figures: Mapping[str, Any]) -> str:
    advantage = figures["detectable_advantage"]
    return "none" if advantage is None else f"{100 * advantage:.1f} points"


def _lower_bound(figures: Mapping[str, Any], test: str) -> str:
    expected = figures[f"{test}expected_certified_epsilon"]
    return f"{figures[f'{test}certified_epsilon']:.3f} ({expected:.3f} expected of a correct mechanism)"


def _both_sides(figures: Mapping[str, Any], measure: str) -> str:
    return ", ".join(
        f"{words} {number(figures[f'{measure}_{side}_mean'])} (max {number(figures[f'{measure}_{side}_max'])})"
        for side, words in (("member", "members"), ("non_member", "non-members"))
    )


def _area(comparison: Mapping[str, Any]) -> str:
    ends = f"{comparison['low']:.3f} to {comparison['high']:.3f}"
    return f"{comparison['auc']:.3f} ({ends}; found from {comparison['detectable_auc']:.3f})"


def _compared(name: str) -> str:
    """Say what a comparison of the stage `contamination` compares."""
    if name.startswith("planted "):
        return "a copy that has read half of the train rows, against the other half"
    return "train rows against test rows"


def _value(value: Any, recipe: Recipe) -> str:
    """Format a figure, or one per label with class names as keys."""
    if not isinstance(value, dict):
        return number(value)
    names = {str(label): name for label, name in recipe.class_names.items()}
    return ", ".join(f"{names.get(key, key)} {number(each)}" for key, each in value.items())
