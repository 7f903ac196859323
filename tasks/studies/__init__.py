"""The stages that only studies have: one module each, and `tables` with the last stage of every study."""
