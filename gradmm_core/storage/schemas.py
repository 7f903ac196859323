"""Parquet schema of every stage's output."""

import pyarrow as pa

# List items are named "element", the Parquet convention.
_MATRICES = [
    ("part", pa.string()),
    ("label", pa.int64()),
    ("row", pa.int64()),
    ("values", pa.large_list(pa.field("element", pa.float32()))),
]
_TEXT = [
    ("id", pa.string()),
    ("label", pa.int64()),
    ("label_name", pa.string()),
    ("text", pa.string()),
    ("token_ids", pa.list_(pa.field("element", pa.int64()))),
    ("matching_loss", pa.float64()),
    ("probe_loss", pa.float64()),
    ("log_perplexity", pa.float64()),
    ("shard", pa.int64()),
    ("token_passes", pa.float64()),
    ("loss_history", pa.list_(pa.field("element", pa.float64()))),
]
_CLASSIFIED = [*_TEXT, ("predicted", pa.int64()), ("probability", pa.float64())]
_DECISION = [("kept", pa.bool_()), ("reason", pa.string())]
_RANKED = [*_CLASSIFIED, ("rank", pa.int64()), *_DECISION]

_LABELLED = [
    *_CLASSIFIED,
    ("rank", pa.int64()),
    ("written_for", pa.int64()),
    # In the order of the recipe's classes.
    ("probabilities", pa.list_(pa.field("element", pa.float64()))),
]

_EVALUATION = [
    ("arm", pa.string()),
    ("seed", pa.int64()),
    ("learning_rate", pa.float64()),
    ("steps", pa.int64()),
    ("step", pa.int64()),
    ("split", pa.string()),
    ("accuracy", pa.float64()),
    ("loss", pa.float64()),
    # Whether each test row is answered correctly.
    ("correct", pa.list_(pa.field("element", pa.bool_()))),
]
# The matrix of test rows by true and by answered class, row by row in ascending order of the labels.
_FINETUNING = [*_EVALUATION, ("confusion", pa.list_(pa.field("element", pa.int64())))]
_READING = [
    (measure, pa.float64())
    for measure in (
        "log_perplexity",
        "distinct_2",
        "self_bleu",
        "frechet_distance",
        "squared_mmd",
        "nearest_distance",
    )
]

_ARM = [
    ("arm", pa.string()),
    ("size", pa.int64()),
    ("texts", pa.float64()),
    ("seeds", pa.int64()),
    ("learning_rate", pa.float64()),
    ("steps", pa.int64()),
    ("accuracy", pa.float64()),
    ("accuracy_half_width", pa.float64()),
    ("accuracy_rows_low", pa.float64()),
    ("accuracy_rows_high", pa.float64()),
    ("best_on_test", pa.float64()),
    ("best_on_test_half_width", pa.float64()),
]
_LEAD = [
    ("against", pa.string()),
    ("against_size", pa.int64()),
    ("difference", pa.float64()),
    ("difference_half_width", pa.float64()),
    ("difference_rows_low", pa.float64()),
    ("difference_rows_high", pa.float64()),
    ("verdict", pa.string()),
]


def _over_seeds(*figures: str) -> list[tuple[str, pa.DataType]]:
    return [(f"{figure}{part}", pa.float64()) for figure in figures for part in ("", "_half_width")]


SCHEMAS: dict[str, pa.Schema] = {
    # Rows of the basis (label -1), of each class's centre, and of the probe's features (label -1).
    "target_space": pa.schema(_MATRICES),
    # One row per row of a class's target matrix. `row` is the index of a token in the target's space or, for the
    # full gradient, of a chunk of the flattened parameters. The sums for the probe follow.
    "target_gradient": pa.schema(_MATRICES),
    # One row per class and token that is tilted.
    "word_tilt": pa.schema(
        [
            ("label", pa.int64()),
            ("token_id", pa.int64()),
            ("token", pa.string()),
            ("tilt", pa.float64()),
            ("wanted", pa.float64()),
            ("written", pa.float64()),
            ("before", pa.float64()),
        ]
    ),
    "generation_shard": pa.schema(_TEXT),
    "generation": pa.schema(_TEXT),
    "label_filter": pa.schema([*_CLASSIFIED, *_DECISION]),
    "loss_selection": pa.schema(_RANKED),
    "category_balance": pa.schema(_RANKED),
    "labelling": pa.schema(_LABELLED),
    "finetune_eval": pa.schema(_FINETUNING),
    "mechanism_audit": pa.schema(
        [
            ("test", pa.string()),
            ("part", pa.string()),
            ("passes", pa.bool_()),
            ("measured", pa.float64()),
            ("low", pa.float64()),
            ("high", pa.float64()),
            ("canaries", pa.int64()),
            ("draws", pa.int64()),
            ("guesses", pa.int64()),
            ("correct", pa.int64()),
            ("certified_epsilon", pa.float64()),
            ("expected_certified_epsilon", pa.float64()),
            ("claimed_epsilon", pa.float64()),
            ("delta", pa.float64()),
            ("confidence", pa.float64()),
            ("auc", pa.float64()),
            ("tpr_at_1_fpr", pa.float64()),
            ("tpr_at_01_fpr", pa.float64()),
        ]
    ),
    "contamination": pa.schema(
        [
            ("planted", pa.bool_()),
            ("score", pa.string()),
            ("read", pa.int64()),
            ("test", pa.int64()),
            ("auc", pa.float64()),
            ("low", pa.float64()),
            ("high", pa.float64()),
            ("detectable_auc", pa.float64()),
        ]
    ),
    "memorisation": pa.schema(
        [
            ("id", pa.string()),
            *(
                (f"{measure}_{side}", kind)
                for measure, kind in (
                    ("nearest", pa.float64()),
                    ("longest_run", pa.int64()),
                    ("longest_substring", pa.int64()),
                    ("ngram_overlap", pa.float64()),
                    ("copy", pa.bool_()),
                )
                for side in ("member", "non_member")
            ),
            ("longest_run_any_member", pa.int64()),
            ("copy_any_member", pa.bool_()),
        ]
    ),
    "mia_audit": pa.schema(
        [
            ("run", pa.int64()),
            ("threshold", pa.float64()),
            ("advantage", pa.float64()),
            ("auc", pa.float64()),
            ("tpr_at_1_fpr", pa.float64()),
            ("tpr_at_01_fpr", pa.float64()),
            ("roc", pa.list_(pa.field("element", pa.float64()))),
            ("power", pa.float64()),
            ("detectable_advantage", pa.float64()),
            ("test_records", pa.int64()),
        ]
    ),
    # `row` is the index in the train split.
    "coresets": pa.schema(
        [("method", pa.string()), ("label", pa.int64()), ("rank", pa.int64()), ("row", pa.int64())]
    ),
    "private_votes": pa.schema(_RANKED),
    "variations": pa.schema(_TEXT),
    # One row per class: the vector by which its texts are steered.
    "private_means": pa.schema(_MATRICES),
    "steered_texts": pa.schema(_RANKED),
    "private_examples": pa.schema(
        [
            ("label", pa.int64()),
            ("rank", pa.int64()),
            ("text", pa.string()),
            ("token_ids", pa.list_(pa.field("element", pa.int64()))),
        ]
    ),
    # One row per trained matrix, with its numbers row by row.
    "private_adapters": pa.schema(
        [("weight", pa.string()), ("values", pa.list_(pa.field("element", pa.float32())))]
    ),
    "adapted_texts": pa.schema(_RANKED),
    "class_shares": pa.schema(_LABELLED),
    "arm_eval": pa.schema([*_FINETUNING, ("size", pa.int64()), ("texts", pa.int64())]),
    # The learning rate and the steps are 0.
    "tfidf_eval": pa.schema([*_EVALUATION, ("size", pa.int64()), ("texts", pa.int64())]),
    "arm_measures": pa.schema(
        [
            ("arm", pa.string()),
            ("size", pa.int64()),
            ("seed", pa.int64()),
            ("texts", pa.int64()),
            *_READING,
        ]
    ),
    # One row per arm and size: means over seeds, half-widths of their intervals, and our lead over the arm.
    # `gap_recovered` is the share of the gap between the model before fine-tuning and all train rows.
    "compare": pa.schema([*_ARM, ("gap_recovered", pa.float64()), *_READING, *_LEAD]),
    # `size` is the number of real rows.
    "scarce": pa.schema([*_ARM, *_LEAD]),
    "transfer": pa.schema([*_ARM, *_LEAD, ("model", pa.string())]),
    "ablate": pa.schema(
        [*_ARM, *_READING, *_LEAD, ("matching_loss", pa.float64()), ("token_passes", pa.float64())]
    ),
    # `making_seconds` is in the study's record: a time would change the table's digest.
    "scale": pa.schema([*_ARM, *_LEAD, ("method", pa.string()), ("token_passes", pa.float64())]),
    "epsilon": pa.schema([*_ARM, *_READING, *_LEAD, ("epsilon", pa.float64()), ("target_cosine", pa.float64())]),
    "distribution": pa.schema(
        [
            ("arm", pa.string()),
            ("texts", pa.int64()),
            ("half", pa.int64()),
            *_READING,
            *(
                (f"{measure}_{end}", pa.float64())
                for measure in ("frechet_distance", "squared_mmd", "nearest_distance")
                for end in ("low", "high")
            ),
        ]
    ),
    # One row per run, step and part of the parameters ("head", "all").
    "gradient_path": pa.schema(
        [
            ("arm", pa.string()),
            ("size", pa.int64()),
            ("texts", pa.int64()),
            ("real_rows", pa.int64()),
            ("seed", pa.int64()),
            ("learning_rate", pa.float64()),
            ("steps", pa.int64()),
            ("step", pa.int64()),
            ("part", pa.string()),
            *(
                (figure, pa.float64())
                for figure in (
                    "real_norm",
                    "arm_norm",
                    "gap",
                    "error",
                    "cosine",
                    "real_loss",
                    "arm_loss",
                    "drift",
                    "real_smoothness",
                    "arm_smoothness",
                    "gap_smoothness",
                )
            ),
        ]
    ),
    # Means over seeds, and half-widths of their intervals.
    "gradients": pa.schema(
        [
            ("arm", pa.string()),
            ("step", pa.int64()),
            ("part", pa.string()),
            ("runs", pa.int64()),
            ("texts", pa.float64()),
            *_over_seeds("error", "cosine", "real_loss", "arm_loss", "difference"),
            ("verdict", pa.string()),
        ]
    ),
    "bounds": pa.schema(
        [
            ("arm", pa.string()),
            ("step", pa.int64()),
            ("runs", pa.int64()),
            *_over_seeds(
                "start_gap",
                "drift",
                "real_smoothness",
                "arm_smoothness",
                "gap_smoothness",
                "gap",
                "gap_bound",
                "sharp_gap_bound",
                "loss_difference",
                "loss_bound",
                "sharp_loss_bound",
            ),
            ("gap_held", pa.int64()),
            ("sharp_gap_held", pa.int64()),
            ("loss_held", pa.int64()),
            ("sharp_loss_held", pa.int64()),
        ]
    ),
}
