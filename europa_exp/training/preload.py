"""Everything that a rank imports, for the process that ranks are forked from: they then start in a fraction of a second."""

from importlib import import_module

from europa_exp.runs import tracking

# Before torch, as the tracker's own rule has it; it starts no thread, which a fork could not take along.
tracking.preload()
for module in ("europa_exp.training", "pydoc_data.topics"):
    import_module(module)
