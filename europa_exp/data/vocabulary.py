"""The byte-level vocabulary: every byte is a token, and three more ids mark what is no text. No torch here."""

BOS_ID = 256
"""Begins every document."""

EOS_ID = 257
"""Ends every document; only ever a label, never an input (see ``packing``)."""

PAD_ID = 258
"""Fills what holds no token. Packed rows are always full, so training never meets it."""

VOCAB_SIZE = 259
"""Ids of the vocabulary; a model's vocabulary may be larger (for alignment), never smaller."""
