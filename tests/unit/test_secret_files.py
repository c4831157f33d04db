"""A generated secret: drawn once, kept, read only from a private file."""

import os

import pytest

from kvtierd.plan.model import SECRET_MARK, FileSpec
from kvtierd.provision.carry_out import sync_files
from kvtierd.secret_files import kept_secret, new_secret, read_secret


@pytest.fixture
def spec(tmp_path):
    return FileSpec(path=str(tmp_path / "key.yaml"), mode="0600", content=f"admin-api-key: {SECRET_MARK}\n")


def test_it_is_drawn_once_and_kept(spec, tmp_path):
    assert sync_files((spec,)) == [spec.path]
    secret = read_secret(spec.path)
    assert (tmp_path / "key.yaml").read_text() == f"admin-api-key: {secret}\n"
    assert (tmp_path / "key.yaml").stat().st_mode & 0o7777 == 0o600
    assert sync_files((spec,)) == []
    assert read_secret(spec.path) == secret
    assert secret not in spec.model_dump_json()


def test_two_are_never_the_same_and_none_looks_like_an_option():
    drawn = {new_secret() for _ in range(200)}
    assert len(drawn) == 200
    assert all(len(s) > 40 and s[0].isalpha() for s in drawn)


@pytest.mark.parametrize("damage", ["open", "link", "other text", "empty", "short", "directory content"])
def test_one_that_others_could_have_seen_or_that_does_not_fit_is_drawn_anew(spec, tmp_path, damage):
    sync_files((spec,))
    old = read_secret(spec.path)
    path = tmp_path / "key.yaml"
    if damage == "open":
        path.chmod(0o644)
    elif damage == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "other text":
        path.write_text(f"admin-api-key: {old}\nmore: {old}\n")
    elif damage == "short":
        path.write_text("admin-api-key: abc\n")
    elif damage == "empty":
        path.write_text("")
    else:
        path.write_text("admin-api-key: ../../../../etc/some thing else\n")
    assert sync_files((spec,)) == [spec.path]
    assert read_secret(spec.path) != old
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o7777 == 0o600


def test_a_changed_surrounding_text_draws_it_anew(spec):
    sync_files((spec,))
    changed = spec.model_copy(update={"content": f"# more\n{spec.content}"})
    assert sync_files((changed,)) == [spec.path]
    assert sync_files((changed,)) == []


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_reading_refuses_what_is_no_private_file(tmp_path):
    good = write(tmp_path / "good", "x: abcdefghijklmnop\n")
    assert read_secret(good) == "abcdefghijklmnop"
    with pytest.raises(ValueError, match="0640"):
        read_secret(write(tmp_path / "open", "x: abcdefghijklmnop\n", 0o640))
    (tmp_path / "link").symlink_to(good)
    with pytest.raises(OSError):
        read_secret(str(tmp_path / "link"))
    with pytest.raises(OSError):
        read_secret(str(tmp_path / "absent"))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="not a file"):
        read_secret(str(tmp_path / "pipe"))
    with pytest.raises(ValueError, match="longer"):
        read_secret(write(tmp_path / "long", "a" * 5000))


@pytest.mark.parametrize(
    "text", ["", "short", "root:$6$salt$abcdefghijklmnop:1:2:::", "abcdefghijk\x07lmnopqrst", "ab\r\n"]
)
def test_a_last_word_that_is_no_secret_is_never_given_out_or_shown(tmp_path, text):
    with pytest.raises(ValueError) as refused:
        read_secret(write(tmp_path / "f", text))
    assert not text or text.strip() not in str(refused.value)


def test_kept_is_exact(tmp_path):
    path = write(tmp_path / "f", "a: abcdefghijklmnop\n")
    assert kept_secret(path, "a: ", "\n") == "abcdefghijklmnop"
    assert kept_secret(path, "a: ", "") is None
    assert kept_secret(path, "b: ", "\n") is None
    assert kept_secret(str(tmp_path / "absent"), "a: ", "\n") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_engines_user_gets_the_file(spec, tmp_path):
    spec = spec.model_copy(update={"user": "nobody"})
    sync_files((spec,))
    import pwd

    assert (tmp_path / "key.yaml").stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert sync_files((spec,)) == []
    secret = read_secret(spec.path)
    os.chown(spec.path, 0, 0)
    assert sync_files((spec,)) == [spec.path], "the owner counts"
    assert read_secret(spec.path) == secret
