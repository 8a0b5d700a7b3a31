"""Names that hold secrets, told by their words: ``WANDB_API_KEY``, ``db.passwd``, ``authToken``, ``FOO_PASS``.

A word counts as a whole (``bypass``, ``passes``, ``monkey`` and ``tokenizer`` hold no secret), and what stands before it
may say that it is another kind of token, pass or key: ``eos_token``, ``backward_pass``, ``sort_key``.
"""

from __future__ import annotations

import re

_SURE = re.compile(r"pass(?:words?|wd|phrase|code)|pwd|secrets?|credentials?|creds")
_GLUED = re.compile(
    r".*(?:password|passwd|passphrase|secret|token|(?:api|access|auth|secret|private)_?key)"
    r"|(?:db|ftp|ldap|mail|my|pg|root|smtp|ssh|sudo|user)(?:pass|pwd)"
)
"""Words that are written without a border, as in ``PGPASSWORD``."""

_OF_A_SECRET_KEY = re.compile(
    r"access|account|api|auth|deploy|encryption|license|private|secret|service|signing|ssh"
)
_OTHER_PASSES = re.compile(
    r"back|backward|bwd|by|compiler|custom|extra|final|first|forward|fusion|fwd|grad|graph|half|high|"
    r"joint|last|low|main|max|min|multi|n|next|num|one|optimizer|per|post|pre|second|single|test|"
    r"third|two|warmup"
)
_OTHER_TOKENS = re.compile(
    r"bos|cls|each|end|eod|eos|first|image|last|mask|max|min|n|next|num|pad|padding|per|prev|sep|"
    r"special|start|stop|text|unk"
)
_OTHER_KEYS = re.compile(
    r"attention|attn|cache|column|config|data|dict|env|field|first|foreign|group|hash|head|id|index|"
    r"join|last|lookup|map|metric|n|num|object|partition|primary|public|query|registry|row|schema|"
    r"shard|sort|state|step|table|tie|unique"
)
_NOT_ITSELF = re.compile(
    r"age|count|dir|dirs|expiry|field|file|files|folder|id|ids|len|length|limit|manager|max|min|mode|"
    r"name|names|path|paths|policy|provider|size|source|type|uri|url"
)
"""Last words of names that speak about a secret and don't hold it, such as TOKEN_FILE."""

_DRESS = re.compile(r"b64|base64|plain|str|string|text|value")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+\d*|[A-Z]+(?=[A-Z][a-z])|\d+")


def is_secret_name(name: str, *, in_code: bool = False) -> bool:
    """True for names of variables, fields and flags that hold secrets.

    In code most keys are those of tables and sorts, and many a secret is only spoken of: with ``in_code`` a key needs a word such
    as ``api`` before it, and the last word decides.
    """
    words = [w.lower() for w in _WORDS.findall(name)]
    if name.rpartition(".")[2] in ("PWD", "OLDPWD"):  # where a shell is
        return False
    while words and (words[-1].isdigit() or _DRESS.fullmatch(words[-1])):
        words.pop()
    if not words or _NOT_ITSELF.fullmatch(words[-1]):
        return False
    before, last = words[-2] if len(words) > 1 else "", words[-1].rstrip("0123456789")
    if _SURE.fullmatch(last) or (not in_code and any(map(_SURE.fullmatch, words))):
        return True
    if last == "pass":
        return not _OTHER_PASSES.fullmatch(before)
    if last == "token":
        return not _OTHER_TOKENS.fullmatch(before)
    if last == "key" and not in_code:
        return before != "" and not _OTHER_KEYS.fullmatch(before)
    if last in ("key", "keys"):
        return _OF_A_SECRET_KEY.fullmatch(before) is not None
    return _GLUED.fullmatch(last) is not None
