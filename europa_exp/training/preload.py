"""Everything that a rank imports, for the process that ranks are forked from: they then start in a fraction of a second."""

import europa_exp.training  # noqa: F401
