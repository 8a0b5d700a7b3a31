"""The EUROPA decoder as a torchtitan ModelSpec."""
