"""The outputs of a run: its record, the release folder, the private report and the plots.

- `record`: the content of run.json.
- `folder`: the folder of one run.
- `release`: the release folder, a Hugging Face data set with its card.
- `publish`: upload of a release folder to the Hugging Face hub.
- `tracking`: record of a run in an MLflow tracking store.
- `report`: the private HTML report.
- `comparison`: the comparison with other ways that belongs to a run.
- `descriptions`: each stage's description, result and figures in plain text.
- `grades`: the verdict in one line, and how it is worked out.
- `glossary`: the meaning of every figure.
- `formatting`: numbers as text, nested values by dotted names.
- `markdown`: escaped text and tables in Markdown.
- `plots`: the plots of a run.
- `plot_style`: the common look of all plots, SVG and PNG.
- `housekeeping`: the files under a root that nothing refers to.
"""
