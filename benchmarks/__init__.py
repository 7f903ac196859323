"""Speed, memory and load of gradmm. Each module is a script: `python -m benchmarks.<name> --help`."""
