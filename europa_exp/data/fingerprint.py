"""What the data of a run are, as a short string. Two runs with the same fingerprint read the same documents.

No torch and no numpy here: a login node asks before anything is submitted.
"""

from __future__ import annotations

import hashlib

from europa_exp.config.schema import Data, DataSource
from europa_exp.data.corpus import Documents, TextFolder, open_documents

WHOLE_CONTENT_BYTES = 2**30
"""Up to this size the whole content is hashed."""

END_BYTES = 2**20
"""Of larger folders so many bytes at both ends of each file are, with its size and time of last change."""

CHUNK_BYTES = 8 * 2**20


def fingerprint(data: Data) -> str:
    """Fingerprint of the data that ``data`` asks for.

    - ``sample-<hash>``: names and whole content of all documents.
    - ``sample-partial-<hash>``, for more than 1 GiB of files: names, sizes, times of last change, first and last MiB. A
      copy of the folder with new times has another fingerprint; a change in the middle that restores the time, the same.
    - ``synthetic-<hash>``: the parameters that the tokens are drawn from.

    The document order (``data.shuffle_seed``) is not part of a sample's fingerprint; it is part of the configuration.

    Raises:
        DataError: the documents can't be read (see ``corpus``).
    """
    if data.source is DataSource.synthetic:
        return synthetic_fingerprint(data.shuffle_seed, data.mean_document_length)
    return documents_fingerprint(open_documents(data.path))


def documents_fingerprint(documents: Documents) -> str:
    """Fingerprint of opened documents; see ``fingerprint``."""
    digest = hashlib.blake2b(digest_size=8)
    partial = isinstance(documents, TextFolder) and documents.total_bytes > WHOLE_CONTENT_BYTES
    for index, (name, size) in enumerate(zip(documents.names, documents.sizes, strict=True)):
        # Lengths first, so that no two lists of documents run into the same bytes.
        digest.update(f"{len(name)} {size} ".encode() + name)
        if partial:
            assert isinstance(documents, TextFolder)
            digest.update(f" {documents.mtimes_ns[index]} ".encode())
            digest.update(documents.read(index, 0, min(END_BYTES, size)))
            digest.update(documents.read(index, max(size - END_BYTES, 0), size))
        else:
            for start in range(0, size, CHUNK_BYTES):
                digest.update(documents.read(index, start, min(start + CHUNK_BYTES, size)))
    return f"sample-{'partial-' if partial else ''}{digest.hexdigest()}"


def synthetic_fingerprint(shuffle_seed: int, mean_document_length: int | None) -> str:
    """Fingerprint of random tokens; see ``fingerprint``."""
    parameters = f"{shuffle_seed} {mean_document_length}".encode()
    return f"synthetic-{hashlib.blake2b(parameters, digest_size=8).hexdigest()}"
