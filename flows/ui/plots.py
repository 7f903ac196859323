"""The plot on a stage's page in Prefect's UI. Importing this module imports matplotlib: import it late."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

from matplotlib.figure import Figure
from PIL import Image

from gradmm.config.recipe import Recipe
from gradmm.flows.ui.markdown import escaped
from gradmm.outputs import plots
from gradmm.outputs.plot_style import png
from gradmm.outputs.record import StageRecord
from gradmm.outputs.report import noise_cosines, survivors
from gradmm.privacy.release_plan import ReleasePlan


def plot_markdown(recipe: Recipe, plan: ReleasePlan, records: Sequence[StageRecord]) -> str:
    """Return the plot of the last stage of `records` as an embedded image with its description.

    Empty if the stage has no plot.
    """
    figure = stage_figure(recipe, plan, records)
    if figure is None:
        return ""
    words = escaped(str(figure.get_label()))
    return f"![{words}](data:image/png;base64,{base64.b64encode(small_png(figure)).decode()})\n\n{words}"


def small_png(figure: Figure) -> bytes:
    """Render in 32 colours, a third of the size: every run stores its plots in the server's database."""
    with Image.open(io.BytesIO(png(figure))) as image:
        few = image.convert("RGB").quantize(32, method=Image.Quantize.FASTOCTREE)
    buffer = io.BytesIO()
    few.save(buffer, "png")
    return buffer.getvalue()


def stage_figure(recipe: Recipe, plan: ReleasePlan, records: Sequence[StageRecord]) -> Figure | None:
    """Plot the last stage of `records`, which are the stages of a run so far."""
    record, names = records[-1], recipe.class_names
    match record.stage:
        case "target_gradient":
            cosines = noise_cosines(plan, names, records)
            return plots.cosines(*cosines) if cosines else None
        case "generation":
            rows = record.read(["loss_history"])
            return plots.loss_history(rows) if max(map(len, rows["loss_history"])) > 1 else None
        case "label_filter" | "loss_selection" | "category_balance":
            left = survivors(records, names)
            return plots.survivors(
                list(names.values()), [each.stage for each in left], [each.by_class for each in left]
            )
        case "labelling" if recipe.labelling.labels == "soft":
            return plots.confidence(record.read(["label_name", "probabilities"]), list(names.values()))
        case "finetune_eval":
            return plots.accuracy_by_step(record.read(), record.figures)
        case "mia_audit":
            mechanism = plan.mechanism
            claim = (mechanism.epsilon, mechanism.delta) if mechanism and plan.charged else (None, 0.0)
            return plots.roc(record.read(), record.figures, *claim)
    return None
