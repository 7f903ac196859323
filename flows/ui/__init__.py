"""The display of a run in Prefect's UI.

- `artifacts`: publishes pages, tables and progress as Prefect artifacts.
- `pages`: the Markdown pages of a stage, a run and a refused run.
- `markdown`: escaping for the two versions of Prefect's UI.
- `plots`: the plot on a stage's page.
"""
