import pytest

from ckptfix.errors import UsageError, WriteError
from ckptfix.report.page import check_page_file, render_page, save_page


def page(text="page"):
    return lambda out: out.write(render_page(text, []))


def test_a_free_place(tmp_path):
    file = tmp_path / "out.html"
    check_page_file(file)
    save_page(file, page())
    assert "<title>page</title>" in file.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


def test_a_page_is_replaced(tmp_path):
    file = tmp_path / "out.html"
    save_page(file, page("first"))
    save_page(file, page("second"))
    assert "<title>second</title>" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [b"PK\x03\x04 a checkpoint", b"<html>somebody's page</html>"])
def test_nothing_else_is(tmp_path, content):
    file = tmp_path / "model.pth"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="is no report of ckptfix"):
        check_page_file(file)
    with pytest.raises(UsageError):
        save_page(file, page())
    assert file.read_bytes() == content


def test_a_folder_is_no_place(tmp_path):
    with pytest.raises(UsageError, match="is no report"):
        check_page_file(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        check_page_file(tmp_path / "nowhere" / "out.html")


def test_an_error_leaves_the_old_page(tmp_path):
    file = tmp_path / "out.html"
    save_page(file, page("first"))

    def fail(out):
        out.write("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(WriteError, match="No space left"):
        save_page(file, fail)
    assert "<title>first</title>" in file.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


def test_a_link_keeps_pointing(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "out.html"
    link.symlink_to(tmp_path / "real" / "page.html")
    save_page(link, page())
    assert link.is_symlink()
    assert (tmp_path / "real" / "page.html").is_file()
