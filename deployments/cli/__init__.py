"""The command `gradmm`.

entry: where the command starts.
main: all commands but the studies, and their exit statuses.
study_commands: a command for each study.
options: options that several commands share.
summary: what `run`, `privacy` and `audit` print.
history: finished runs: `runs`, `diff`, and finding a run by its id or folder.
contamination: what `audit --contamination` computes and prints.
clean: removing files that nothing refers to.
terminal: tables and JSON on standard output.
"""
