"""Same data, same fingerprint; other data, another; and cheap enough for a login node."""

import os
import subprocess
import sys

import pytest

from europa_exp.config.schema import Data, DataSource
from europa_exp.data import fingerprint as module
from europa_exp.data.fingerprint import fingerprint


def sample(path=None, seed=0):
    return Data(source=DataSource.sample, path=None if path is None else str(path), shuffle_seed=seed)


def synthetic(seed=0, mean=None):
    return Data(source=DataSource.synthetic, shuffle_seed=seed, mean_document_length=mean)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    root.mkdir()
    (root / "a.txt").write_text("ab")
    (root / "b.txt").write_text("c")
    return root


def test_needs_neither_torch_nor_numpy():
    code = (
        "import sys\n"
        "from europa_exp.config.schema import Data, DataSource\n"
        "from europa_exp.data.fingerprint import fingerprint\n"
        "print(fingerprint(Data(source=DataSource.sample, shuffle_seed=0)))\n"
        "heavy = {'torch', 'torchtitan', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == fingerprint(sample())


def test_help_texts_and_order():
    assert fingerprint(sample()).startswith("sample-")
    # The order is part of the configuration, not of the data.
    assert fingerprint(sample(seed=1)) == fingerprint(sample(seed=0))


def test_follows_content_and_names_wherever_the_folder_is(folder, tmp_path):
    first = fingerprint(sample(folder))
    assert first != fingerprint(sample())
    os.utime(folder / "a.txt", (1, 1))
    moved = folder.rename(tmp_path / "elsewhere")
    (moved / ".hidden").write_text("not data")
    assert fingerprint(sample(moved)) == first

    (moved / "a.txt").write_text("aB")
    changed = fingerprint(sample(moved))
    (moved / "a.txt").write_text("ab")
    (moved / "b.txt").rename(moved / "c.txt")
    renamed = fingerprint(sample(moved))
    assert len({first, changed, renamed}) == 3


def test_the_cut_between_documents_counts(folder):
    first = fingerprint(sample(folder))
    (folder / "a.txt").write_text("a")
    (folder / "b.txt").write_text("bc")
    assert fingerprint(sample(folder)) != first


def test_large_folders_are_hashed_in_part_and_say_so(folder, monkeypatch):
    monkeypatch.setattr(module, "WHOLE_CONTENT_BYTES", 100)
    monkeypatch.setattr(module, "END_BYTES", 10)
    whole = fingerprint(sample(folder))
    assert not whole.startswith("sample-partial-")

    large = folder / "large.txt"

    def write(text):
        large.write_bytes(text)
        os.utime(large, ns=(5, 5))
        return fingerprint(sample(folder))

    first = write(b"x" * 200)
    assert first.startswith("sample-partial-")
    assert write(b"x" * 100 + b"y" + b"x" * 99) == first, "what it can't see, as documented"
    assert write(b"y" + b"x" * 199) != first
    assert write(b"x" * 199 + b"y") != first
    assert write(b"x" * 201) != first
    write(b"x" * 200)
    os.utime(large, ns=(6, 6))
    assert fingerprint(sample(folder)) != first


def test_reads_in_chunks_change_nothing(folder, monkeypatch):
    first = fingerprint(sample(folder))
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    assert fingerprint(sample(folder)) == first


def test_synthetic_follows_its_parameters():
    prints = {fingerprint(synthetic(*p)) for p in [(0, None), (1, None), (0, 10), (0, 11), (1, 10)]}
    assert len(prints) == 5
    assert all(p.startswith("synthetic-") for p in prints)
    # Recorded in old runs: it must not change.
    assert fingerprint(synthetic(0, None)) == "synthetic-c2d33759c1dab8e8"
