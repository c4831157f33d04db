import pwd
from pathlib import Path

import pytest

from kvtierd.errors import HostError, HugepageError
from kvtierd.plan.model import FileSpec, HugepagePlan, NodePlan, UnitSpec
from kvtierd.provision import carry_out
from kvtierd.settings import Settings


@pytest.fixture
def settings(tmp_path):
    paths = {n: str(tmp_path / n) for n in ("state", "runtime", "logs")}
    return Settings(pool={"dram": "1GiB"}, paths=paths)


def test_files_are_written_once_and_mended_when_somebody_changes_them(tmp_path):
    path = tmp_path / "conf" / "a.conf"
    files = (FileSpec(path=str(path), mode="0640", content="x = 1\n"),)
    assert carry_out.sync_files(files) == [str(path)]
    assert carry_out.sync_files(files) == []
    path.write_text("x = 2\n")
    assert carry_out.sync_files(files) == [str(path)]
    path.chmod(0o600)
    assert carry_out.sync_files(files) == [str(path)]
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert carry_out.sync_files(files) == [str(path)]
    assert not path.is_symlink()
    assert carry_out.sync_files(files) == []


def unit(**fields):
    return UnitSpec(id="kvtier-engine-e", kind="engine", name="e", argv=("x",), **fields)


def test_directories_of_units_are_made(settings):
    carry_out.make_directories(settings, NodePlan(node="n", series="A3", units=(unit(),)))
    assert (Path(settings.paths.state) / "engines" / "e").is_dir()
    assert (Path(settings.paths.logs) / "memcache").is_dir()


def test_an_unknown_user_is_named(settings, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(KeyError):
        pwd.getpwnam("no-such-user-here")
    with pytest.raises(HostError, match="no-such-user-here"):
        carry_out.make_directories(
            settings, NodePlan(node="n", series="A3", units=(unit(user="no-such-user-here"),))
        )


def test_the_plan_in_force_survives_and_a_damaged_one_is_none(settings):
    plan = NodePlan(node="n", series="A3", units=(unit(),))
    carry_out.save_plan(settings, plan)
    assert carry_out.last_plan(settings) == plan
    file = Path(settings.paths.state) / carry_out.LAST_PLAN
    file.write_text(file.read_text()[:-20])
    assert carry_out.last_plan(settings) is None
    file.unlink()
    assert carry_out.last_plan(settings) is None


class Keeper:
    def __init__(self, answer):
        self.answer = answer
        self.calls = []

    def reserve(self, plan):
        self.calls.append("reserve")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def raised(self):
        return self.answer

    def release(self):
        self.calls.append("release")


async def test_a_refusal_of_the_kernel_is_told_not_raised(settings, monkeypatch):
    keeper = Keeper(HugepageError("cannot write nr_hugepages", why="needs root"))
    monkeypatch.setattr(carry_out, "hugepage_keeper", lambda _: keeper)
    state = await carry_out.reserve_hugepages(settings, HugepagePlan(pages=4), 0)
    assert state.got_pages is None
    assert state.problem == "cannot write nr_hugepages (needs root)"


async def test_a_plan_without_pages_gives_back_what_was_raised_and_only_then(settings, monkeypatch):
    for raised, calls in [((), []), (("entry",), ["release"])]:
        keeper = Keeper(raised)
        monkeypatch.setattr(carry_out, "hugepage_keeper", lambda _, keeper=keeper: keeper)
        assert (await carry_out.reserve_hugepages(settings, HugepagePlan(), 0)).problem == ""
        assert keeper.calls == calls
