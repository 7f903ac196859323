"""Give each text the class probabilities of the calibrated model and of what was released with the target."""

from __future__ import annotations

from gradmm.config.settings import LabellingSettings, TargetGradientSettings
from gradmm.filters.rows import kept_texts, token_lists
from gradmm.labelling.labelling import labelled_texts, labelling_figures
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task


@stage_task("labelling")
def labelling(
    context: RunContext,
    texts: StageArtifact,
    model: ModelReference,
    prompt_template: PromptTemplate,
    class_names: dict[int, str],
    instructions: dict[int, str],
    matching: TargetGradientSettings,
    settings: LabellingSettings,
    target: StageArtifact | None,
    space: StageArtifact | None,
) -> Outcome:
    """Label the texts that passed the filters. Public texts, written as for the target space, calibrate the model.

    Args:
        target, space: the artifacts of the release; None to label by the calibrated model alone.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.labelling.teacher import read_texts, teacher_of
    from gradmm.target.matched_target import released_moments, released_naive_bayes
    from gradmm.target.target_space import features_from_table, public_texts

    kept = kept_texts(texts.read())
    if settings.labels == "hard":
        labelled = labelled_texts(kept, None, class_names)
        return labelled, labelling_figures(labelled, class_names)
    language_model, template = read_model(context, model, prompt_template)
    features = features_from_table(space.read_table(), language_model.device) if space else None
    public = {
        label: read_texts(language_model, template, features, of_label, settings.batch_size)
        for label, of_label in public_texts(language_model, template, instructions, matching).items()
    }
    moments = released_moments(target, template) if target and features else None
    naive_bayes = released_naive_bayes(target, space, template, matching) if target else None
    if naive_bayes:
        naive_bayes = naive_bayes.with_slope([text for read in public.values() for text in read.texts])
    teacher = teacher_of(public, features, moments, naive_bayes)
    readings = read_texts(language_model, template, features, token_lists(kept), settings.batch_size)
    labelled = labelled_texts(kept, teacher.probabilities(readings).numpy(), class_names)
    names = [str(label) for label in class_names]
    figures = {
        "answer_offset": dict(zip(names, teacher.offset.tolist(), strict=True)),
        "class_shares": dict(zip(names, teacher.log_shares.softmax(dim=0).tolist(), strict=True)),
        "probe_trust": teacher.probe.shrinkage if teacher.probe else None,
        "informative_tokens": naive_bayes.informative_tokens if naive_bayes else None,
        "token_slope": naive_bayes.slope if naive_bayes else None,
    }
    return labelled, labelling_figures(labelled, class_names) | figures
