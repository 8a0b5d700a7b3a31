"""The EUROPA decoder as a torchtitan ModelSpec. Importing this package loads torchtitan (seconds)."""

from europa_exp.model.spec import model_spec

__all__ = ["model_spec"]
