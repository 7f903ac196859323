"""The plots of stages' pages in Prefect's UI. Importing this module imports matplotlib: import it late."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence

from matplotlib.figure import Figure
from PIL import Image

from flows.ui_markdown import escaped
from gradmm_core import plots
from gradmm_core.plot_style import png
from gradmm_core.privacy import gaussian_mechanism
from gradmm_core.recipe import Recipe
from gradmm_core.report import FILTERS, noise_cosines
from gradmm_core.run_record import StageRecord


def plot_markdown(recipe: Recipe, records: Sequence[StageRecord]) -> str:
    """The plot of the last stage of `records` as an image that is its own file, with what it says in words.

    Empty where the figures say it all.
    """
    figure = stage_figure(recipe, records)
    if figure is None:
        return ""
    words = escaped(str(figure.get_label()))
    return f"![{words}](data:image/png;base64,{base64.b64encode(small_png(figure)).decode()})\n\n{words}"


def small_png(figure: Figure) -> bytes:
    """In 32 colours, a third of the size: every run leaves its plots in the server's database."""
    with Image.open(io.BytesIO(png(figure))) as image:
        few = image.convert("RGB").quantize(32, method=Image.Quantize.FASTOCTREE)
    buffer = io.BytesIO()
    few.save(buffer, "png")
    return buffer.getvalue()


def stage_figure(recipe: Recipe, records: Sequence[StageRecord]) -> Figure | None:
    """The plot of the last stage of `records`; those before it are the run's other stages so far."""
    record, names = records[-1], recipe.class_names
    match record.stage:
        case "target_gradient":
            cosines = noise_cosines(recipe, records)
            return plots.cosines(*cosines) if cosines else None
        case "generation":
            rows = record.read(["loss_history"])
            return plots.loss_history(rows) if max(map(len, rows["loss_history"])) > 1 else None
        case "label_filter" | "loss_selection" | "category_balance":
            so_far = [each for each in records if each.stage in ("generation", *FILTERS)]
            counts = [[_left(each).get(label, 0) for label in names] for each in so_far]
            return plots.survivors(list(names.values()), [each.stage for each in so_far], counts)
        case "finetune_eval":
            return plots.accuracy_by_step(record.read(), record.figures)
        case "mia_audit":
            mechanism = gaussian_mechanism(recipe.privacy)
            claim = (mechanism.epsilon, mechanism.delta) if mechanism and mechanism.safe else (None, 0.0)
            return plots.roc(record.read(), record.figures, *claim)
    return None


def _left(record: StageRecord) -> dict[int, int]:
    """Texts of each label after a stage."""
    if record.stage == "generation":
        return dict(Counter(record.read(["label"])["label"].tolist()))
    return {int(label): count for label, count in record.figures["kept_by_label"].items()}
