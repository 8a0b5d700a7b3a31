"""Where tokens come from: documents, packed into rows, handed out the same whatever the number of ranks.

- ``corpus``: the documents (Python's help texts or a folder of text files); no torch.
- ``fingerprint``: what the data are, as a short string; no torch, so that a login node can ask.
- ``vocabulary``, ``tokenizer``: bytes as tokens.
- ``packing``: an endless stream of documents cut into rows; segment lengths of any batch.
- ``text``, ``synthetic``: the two sources of rows.
- ``loader``: torchtitan dataloaders over them, and ``dataloader_config`` and ``tokenizer_config``.

This package itself imports nothing heavy: ``europa_exp.data.fingerprint`` must load in milliseconds.
"""
