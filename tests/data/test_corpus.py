"""Which files are documents, and what happens to those that are not."""

import os
import sys

import pytest

from europa_exp.data import corpus
from europa_exp.data.corpus import DataError, HelpTexts, TextFolder, open_documents


def contents(documents):
    return {
        name: documents.read(i, 0, size)
        for i, (name, size) in enumerate(zip(documents.names, documents.sizes, strict=True))
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "two.txt").write_bytes(b"second")
    (tmp_path / "a.md").write_text("ä first")
    return tmp_path


def test_help_texts_are_real_text_in_a_fixed_order():
    documents = open_documents(None)
    assert isinstance(documents, HelpTexts)
    assert documents.names == sorted(set(documents.names))
    assert documents.total_bytes > 300_000
    assert b"for" in documents.names
    assert contents(documents)[b"for"].startswith(b"The")


def test_python_without_help_texts_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"data\.path=None: .*pydoc_data.*data=synthetic"):
        open_documents(None)


def test_folder_is_read_recursively_in_the_order_of_paths(folder):
    assert contents(TextFolder(str(folder))) == {b"a.md": "ä first".encode(), b"b/deep/two.txt": b"second"}
    assert TextFolder(str(folder)).names == [b"a.md", b"b/deep/two.txt"]


def test_bytes_that_are_no_utf8_are_kept(folder):
    (folder / "latin.txt").write_bytes(b"caf\xe9 \xff\xfe")
    assert contents(TextFolder(str(folder)))[b"latin.txt"] == b"caf\xe9 \xff\xfe"


def test_names_that_are_no_utf8_are_kept(folder):
    with open(os.fsencode(folder) + b"/n\xff.txt", "wb") as file:
        file.write(b"text")
    assert contents(TextFolder(str(folder)))[b"n\xff.txt"] == b"text"


def test_what_is_no_text_is_left_out_and_counted(folder):
    (folder / "empty.txt").touch()
    (folder / "image.bin").write_bytes(b"\x89PNG\0\0")
    (folder / ".hidden").write_text("no")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("no")
    (folder / "dangling").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")  # opening it would wait for ever
    (folder / "link.txt").symlink_to(folder / "a.md")
    (folder / "loop").symlink_to(folder)
    documents = TextFolder(str(folder))
    assert documents.names == [b"a.md", b"b/deep/two.txt", b"link.txt"]
    assert documents.left_out == {"empty": 1, "binary": 1, "not regular": 2}
    assert documents.description.endswith("left out: 1 binary, 1 empty, 2 not regular")


@pytest.mark.parametrize("kept_bytes", [10**6, 0])
def test_parts_of_a_document(folder, monkeypatch, kept_bytes):
    monkeypatch.setattr(corpus, "KEEP_IN_MEMORY_BYTES", kept_bytes)
    documents = TextFolder(str(folder))
    assert documents.read(1, 0, 6) == b"second"
    assert documents.read(1, 2, 4) == b"co"
    assert documents.read(1, 3, 3) == b""


def test_a_file_that_changes_under_a_run_is_noticed(folder, monkeypatch):
    monkeypatch.setattr(corpus, "KEEP_IN_MEMORY_BYTES", 0)
    documents = TextFolder(str(folder))
    (folder / "a.md").write_text("much longer than before")
    with pytest.raises(DataError, match=r"a\.md had 8 bytes .* and has 23 now"):
        documents.read(0, 0, 4)
    (folder / "a.md").unlink()
    with pytest.raises(DataError, match=r"can't read .*a\.md: No such file"):
        documents.read(0, 0, 4)


def test_folder_without_text(tmp_path):
    with pytest.raises(DataError, match=r"data\.path=.*: the folder holds no files; put text files there"):
        open_documents(str(tmp_path))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"no text in this folder \(left out: 1 empty\)"):
        open_documents(str(tmp_path))


def test_no_folder_and_a_file_for_a_folder(folder):
    with pytest.raises(DataError, match=r"data\.path=.*/none: no such folder; "):
        open_documents(str(folder / "none"))
    with pytest.raises(DataError, match=f"not a folder; give the folder of the file, {folder}$"):
        open_documents(str(folder / "a.md"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_folder_is_an_error_not_less_data(folder):
    (folder / "b").chmod(0)
    try:
        with pytest.raises(DataError, match=r"can't read .*/b: Permission denied"):
            open_documents(str(folder))
    finally:
        (folder / "b").chmod(0o755)
