"""The journal of a process: what outlives it, and whom it says to be dead."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from celery_relock.backends.off import NoLocks
from celery_relock.engine import crash as journals
from celery_relock.engine import engine, ids
from celery_relock.engine.crash import Entry, Journal, Reaper
from celery_relock.engine.engine import Engine
from celery_relock.engine.parking import Parking
from celery_relock.engine.protocol import Claim, HoldInfo, LockState, Released
from celery_relock.errors import LockUnavailable
from celery_relock.options import LockOptions
from celery_relock.workflow import steps
from celery_relock.workflow.steps import StepHold, WorkflowLock
from tests.support.programs import said_by
from tests.support.waiting import wait_for


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(journals.tempfile, "gettempdir", lambda: str(tmp_path))
    return journals.folder()


@pytest.fixture
def journal():
    made = Journal()
    made.on = True
    return made


def _note(journal: Journal, entry: Entry) -> None:
    journal.note(entry.attempt_id, entry)


def _entry(number: int = 1, names: tuple[str, ...] = ("account:42",)) -> Entry:
    return Entry("backend", f"execution{number}", f"attempt{number}", names)


def _written(folder) -> list[Entry]:
    return list(journals.read(folder / journals.process_name(os.getpid())))


def test_what_is_held_is_written_and_what_is_released_is_not(folder, journal):
    _note(journal, _entry(1, ("a", "ü {braces}")))
    _note(journal, _entry(2))
    journal.remove("attempt2")
    journal.remove("never noted")

    assert _written(folder) == [_entry(1, ("a", "ü {braces}"))]


def test_what_a_claim_was_for_is_written_with_it(folder, journal):
    told = Entry("backend", "execution", "attempt", ("a", "b"), "owner", "app.charge", "1234-5678")
    _note(journal, told)

    assert _written(folder) == [told]


def test_the_successor_of_a_claim_is_written_in_its_place(folder, journal):
    _note(journal, _entry(1))
    _note(journal, _entry(2))
    left = _entry(1)._replace(successors="next other", keep=300.5)
    journal.change(left)
    journal.change(_entry(3))  # never noted
    journal.change(_entry(2)._replace(successors="x" * 4000))  # no room: it stays as it was

    assert sorted(_written(folder)) == [left, _entry(2)]
    journal.remove("attempt1")
    journal.remove("attempt2")
    assert _written(folder) == []


def test_the_successors_for_which_there_is_no_room_are_not_all_written_out_each_time(
    folder, journal, monkeypatch
):
    monkeypatch.setattr(steps, "journal", journal)
    written, record = [], Entry.record
    monkeypatch.setattr(Entry, "record", lambda entry: written.append(entry) or record(entry))
    made = Engine(NoLocks())
    lease = made.lease(Claim("execution", "attempt", "owner", ("account:42",), (1,), 30.0, "label"))
    _note(journal, lease.entry())
    lock = WorkflowLock.of(ids.new_id(), lease, LockOptions())
    hold = StepHold(lock, made, lease, None)
    sent = [ids.new_id() for _ in range(1000)]
    for each in sent:
        hold.leave_to(each)

    (noted,) = _written(folder)
    assert 75 < len(noted.successors.split()) == len(written) - 2 < 90
    assert noted.successors.split() == sent[: len(written) - 2]
    assert hold.successor().execution_id.split() == sent


def test_an_entry_of_another_layout_is_passed_over(folder, journal):
    _note(journal, _entry())
    path = folder / journals.process_name(os.getpid())
    short = b"backend\nexecution\nattempt\na"
    (folder / "other").write_bytes(len(short).to_bytes(2, "big") + short + path.read_bytes())

    assert list(journals.read(folder / "other")) == []


def test_the_same_claim_sent_again_is_noted_once(folder, journal):
    _note(journal, _entry())
    _note(journal, _entry())
    journal.remove("attempt1")

    assert _written(folder) == []


def test_off_it_writes_nothing_and_makes_no_file(folder, monkeypatch, runs):
    off = Journal()
    monkeypatch.setattr(engine, "journal", off)
    process = runs()

    process.release(process.held("a"))

    assert list(folder.iterdir()) == []
    off.on = True
    process.held("a")
    assert len(_written(folder)) == 1


def test_what_is_about_to_be_sent_is_noted_in_every_process_and_by_each_thread(folder):
    journal, entries = Journal(), [_entry(number)._replace(attempt_id="-") for number in range(20)]
    both = threading.Barrier(len(entries))

    def note(entry: Entry) -> None:
        both.wait(20)
        journal.note(entry.execution_id, entry)

    threads = [threading.Thread(target=note, args=(entry,)) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(_written(folder)) == sorted(entries)

    journal.remove("execution7")
    assert sorted(_written(folder)) == sorted(entries[:7] + entries[8:])


def test_a_process_that_ends_takes_its_journal_along_unless_something_is_noted(folder, journal):
    _note(journal, _entry())
    journal.close()
    assert _written(folder) == [_entry()]

    journal.remove("attempt1")
    journal.close()
    assert list(folder.iterdir()) == []
    journal.close()


def test_who_opens_a_journal_throws_away_those_of_the_long_dead(folder, journal):
    old, young = folder / "1-1", folder / "1-2"
    alive = folder / journals.process_name(os.getppid())
    _note(journal, _entry())
    written = (folder / journals.process_name(os.getpid())).read_bytes()
    for path in (old, young, alive):
        path.write_bytes(written)
    for path in (old, alive):
        os.utime(path, (0, 0))

    _note(Journal(), _entry())

    assert not old.exists()
    assert young.exists()
    assert alive.exists()


def test_who_opens_a_journal_throws_away_those_of_the_dead_with_nothing_noted(folder, journal):
    """A forked child leaves such a one, as it ends without the handlers of `atexit`."""
    empty, noted = folder / "1-1", folder / "1-2"
    own = folder / journals.process_name(os.getpid())
    _note(journal, _entry())
    noted.write_bytes(own.read_bytes())
    journal.remove("attempt1")
    empty.write_bytes(own.read_bytes())

    _note(Journal(), _entry())

    assert not empty.exists()
    assert noted.exists()


def test_who_opens_a_journal_throws_away_old_ones_of_other_containers_and_boots(folder, journal):
    """Each start of a container has a process namespace of its own, and may keep its /tmp."""
    gone, mixed = folder.parent / "boot-1-4", folder.parent / "boot-2-4"
    old, young = [gone / "1-1", gone / "7-1", mixed / "1-1"], mixed / "7-1"
    for path in (*old, young):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    for path in old:
        os.utime(path, (0, 0))

    _note(journal, _entry())

    assert sorted(folder.parent.iterdir()) == sorted([folder, mixed])
    assert list(mixed.iterdir()) == [young]


def test_a_journal_grows_with_the_claims(folder, journal):
    entries = [_entry(number) for number in range(300)]
    for entry in entries:
        _note(journal, entry)
    assert sorted(_written(folder)) == sorted(entries)


def test_of_more_than_there_is_room_for_the_oldest_are_left_to_the_leases(
    folder, journal, monkeypatch
):
    monkeypatch.setattr(journals, "_MOST", 1)
    for number in range(300):
        _note(journal, _entry(number))
    _note(journal, Entry("backend", "long", "long", ("x" * 4000,)))
    kept = _written(folder)
    for number in range(300):
        journal.remove(f"attempt{number}")
    _note(journal, _entry(1000))

    assert {entry.attempt_id for entry in kept} == {f"attempt{n}" for n in range(172, 300)}
    assert _written(folder) == [_entry(1000)]


def test_a_claim_that_changes_where_there_is_no_room_takes_none_from_another(folder, journal):
    entries = [_entry(number) for number in range(128)]
    for entry in entries:
        _note(journal, entry)
    entries[100] = entries[100]._replace(successors="next")
    journal.change(entries[100])
    assert sorted(_written(folder)) == sorted(entries)

    too_long = entries[101]._replace(successors="x" * 4000)
    journal.change(too_long)
    assert sorted(_written(folder)) == sorted(entries)


def test_a_forked_child_begins_with_an_empty_journal(folder, journal):
    _note(journal, _entry())
    journal._reset()  # what os.register_at_fork does in the child

    _note(journal, _entry(2))

    assert journal.on
    assert _written(folder) == [_entry(2)]


def test_without_a_place_to_write_it_goes_on_without(tmp_path, monkeypatch, journal):
    monkeypatch.setattr(journals.tempfile, "gettempdir", lambda: str(tmp_path / "none"))

    _note(journal, _entry())
    journal.remove("attempt1")


ON_A_FULL_DISK = """
import os, tempfile
from celery_relock.engine.crash import Entry, Journal, folder
disk = tempfile.gettempdir()
folder()
with open(f"{disk}/full", "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
journal = Journal()
for number in range(200):
    journal.note(f"a{number}", Entry("backend", "e", f"a{number}", ("x" * 300,)))
"""


def test_where_the_disk_is_full_it_goes_on_without(tmp_path):
    disk = f"mount -t tmpfs -o size=128k none {tmp_path} && exec "
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c", disk + '"$@"', "sh"]
    if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [*mounted, sys.executable, "-c", ON_A_FULL_DISK]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("length", "noted"), [(1500, True), (4096, False)])
def test_names_of_some_length_are_noted_with_their_claim(folder, journal, length, noted):
    entry = _entry(1, ("x" * length,))
    _note(journal, entry)
    assert _written(folder) == [entry] * noted


def test_a_journal_that_is_broken_off_is_read_as_far_as_it_goes(folder, journal):
    _note(journal, _entry())
    path = folder / journals.process_name(os.getpid())
    data = path.read_bytes()

    (folder / "cut").write_bytes(data[: len(data) - 2036])
    (folder / "wild").write_bytes(b"\xff\xff" * 2000)

    assert list(journals.read(folder / "missing")) == []
    assert list(journals.read(folder / "wild")) == []
    assert list(journals.read(folder / "cut")) == []


def test_a_process_is_alive_until_it_is_a_zombie_and_a_reused_pid_is_another_process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    name = journals.process_name(child.pid)
    assert journals.alive(name)
    assert not journals.alive(f"{child.pid}-1")

    child.kill()
    # Dead, though nobody has waited for it yet.
    wait_for(lambda: not journals.alive(name), what="its death")
    child.wait()


def test_a_process_that_cannot_be_looked_at_is_not_called_dead():
    program = """
import os, resource
from celery_relock.engine import crash as journal
from tests.support import wait_for
name = journal.process_name(os.getpid())
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
try:
    print(journal.alive(name))
except OSError:
    print("cannot tell")
"""
    assert said_by(program) == "cannot tell\n"


IN_A_PROC_THAT_HIDES = """
import os, signal
from celery_relock.engine import crash
from tests.support import wait_for
os.setgid(65534)
os.setuid(65534)
said, told = os.pipe()
child = os.fork()
if child == 0:
    os.write(told, crash.process_name(os.getpid()).encode())
    signal.pause()
name = os.read(said, 100).decode()
try:
    print(crash.alive(name))
finally:
    os.kill(child, signal.SIGKILL)
wait_for(lambda: not crash.alive(name), what="its death")  # as a zombie
os.waitpid(child, 0)
print(crash.alive(name))
"""


@pytest.mark.parametrize("how", ["1", "2"])
def test_a_process_that_has_changed_its_user_is_not_called_dead_where_proc_hides_it(how):
    proc = f"mount -t proc -o hidepid={how} proc /proc && exec "
    mounted = ["unshare", "--mount", "sh", "-c", proc + '"$@"', "sh"]
    if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount /proc")
    command = [*mounted, sys.executable, "-c", IN_A_PROC_THAT_HIDES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\nFalse\n", "")


def test_journals_of_another_format_are_left_to_those_who_can_read_them(folder, monkeypatch):
    monkeypatch.setattr(journals, "_FORMAT", journals._FORMAT + 1)
    assert journals.folder() != folder


class _Backend:
    """Records what it is asked to release. What the release does is the engine tests' matter."""

    def __init__(self, name: str, holder: str = "attempt1") -> None:
        self.id = name
        self.released: list[str] = []
        self.holder = holder

    def inspect(self, name, only):
        return LockState((HoldInfo(only[0], 30.0, 1, self.holder, "o", "label"),), 0)

    def release(self, request):
        self.released.append(request.attempt_id)
        return Released(True)


def _reaper(backend: _Backend) -> Reaper:
    return Reaper(Parking(backend))  # type: ignore[arg-type]


def test_the_reaper_releases_only_what_the_dead_noted_for_its_own_backend(folder, journal):
    _note(journal, _entry(1))
    _note(journal, Entry("another", "execution2", "attempt2", ("b",)))
    mine = folder / journals.process_name(os.getpid())
    dead = folder / "1-1"
    dead.write_bytes(mine.read_bytes())
    backend, another = _Backend("backend"), _Backend("another")

    _reaper(backend).look()
    assert backend.released == ["attempt1"]
    assert dead.exists()  # the other store's reaper may come
    _reaper(another).look()
    assert another.released == ["attempt2"]


def test_the_journal_of_a_dead_process_that_names_another_backend_is_read_once(folder, journal):
    _note(journal, _entry(1))
    _note(journal, Entry("another", "execution2", "attempt2", ("b",)))
    (folder / "1-1").write_bytes((folder / journals.process_name(os.getpid())).read_bytes())
    backend = _Backend("backend")
    reaper = _reaper(backend)

    for _ in range(3):
        reaper.look()

    assert backend.released == ["attempt1"]


def test_a_process_whose_journal_another_reaper_removed_is_watched_no_longer(folder, journal):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = folder / journals.process_name(process.pid)
    path.write_bytes(b"")
    reaper = _reaper(_Backend("backend"))
    reaper.look()
    path.unlink()
    process.kill()
    process.wait()
    assert reaper._deaths.poll(30_000), "its death is heard"

    reaper.look()

    assert reaper._deaths.poll(0) == []
    process.stdin.close()


def test_what_cannot_be_freed_yet_is_tried_again_and_told_once(folder, journal, caplog):
    class Away(_Backend):
        def release(self, request):
            self.released.append(request.attempt_id)
            raise LockUnavailable("away")

    _note(journal, _entry(1))
    (folder / "1-1").write_bytes((folder / journals.process_name(os.getpid())).read_bytes())
    backend = Away("backend")
    reaper = _reaper(backend)

    for _ in range(2):
        reaper.look()

    assert backend.released == ["attempt1"] * 2
    [told] = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert told.startswith("releasing the locks of dead processes failed, trying again: away")


def test_what_nobody_came_for_is_thrown_away_after_a_day(folder, journal):
    _note(journal, Entry("nobody's", "execution", "attempt", ("b",)))
    dead = folder / "1-1"
    dead.write_bytes((folder / journals.process_name(os.getpid())).read_bytes())
    _reaper(_Backend("backend")).look()
    os.utime(dead, (0, 0))
    reaper = _reaper(_Backend("backend"))
    reaper.look()
    assert dead.exists(), "its process can have died just now: on tmpfs notes change no time"

    reaper._found["1-1"] -= journals.FORGET_AFTER
    reaper._foreign.clear()
    reaper.look()

    assert not dead.exists()


def test_the_journal_of_a_process_that_lives_grows_not_old(folder, journal):
    _note(journal, _entry())
    mine = folder / journals.process_name(os.getpid())
    os.utime(mine, (0, 0))
    _reaper(_Backend("backend")).look()
    assert mine.stat().st_mtime > time.time() - 60


@pytest.mark.parametrize("holder", ["attempt1", "another"])
def test_who_only_waited_for_a_lock_is_not_said_to_have_held_it(folder, journal, caplog, holder):
    _note(journal, _entry(1))
    (folder / "1-1").write_bytes((folder / journals.process_name(os.getpid())).read_bytes())
    caplog.set_level(logging.INFO)
    _reaper(_Backend("backend", holder)).look()
    assert any("reclaimed" in text for text in caplog.messages) == (holder == "attempt1")


def test_of_several_reapers_the_one_that_has_freed_a_lock_tells_of_it(
    folder, journal, monkeypatch, runs, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(engine, "journal", journal)
    process = runs()
    process.held("a")
    (folder / "1-1").write_bytes((folder / journals.process_name(os.getpid())).read_bytes())
    parking = process.engine.parking
    inspect = parking.backend.inspect

    def inspect_and_be_overtaken(*asked):
        found = inspect(*asked)
        monkeypatch.setattr(parking.backend, "inspect", inspect)
        Reaper(parking).look()
        return found

    monkeypatch.setattr(parking.backend, "inspect", inspect_and_be_overtaken)
    Reaper(parking).look()

    assert ["reclaimed" in text for text in caplog.messages].count(True) == 1


def test_where_proc_is_that_of_other_processes_nobody_is_called_dead():
    command = ["unshare", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a pid namespace")
    code = "from celery_relock.engine.crash import folder; folder()"
    run = [*command, sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "OSError: /proc does not show this process by its id" in done.stderr


def test_where_no_journals_can_be_there_is_no_reaper(tmp_path, monkeypatch):
    monkeypatch.setattr(journals.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    reaper = _reaper(_Backend("backend"))

    reaper.start()

    assert reaper._thread is None


@pytest.mark.parametrize("how", ["no such call", "not allowed", "as usual"])
def test_the_dead_are_found_at_once_without_pidfds_too(folder, journal, monkeypatch, how):
    if how == "not allowed":  # as in gVisor, or under seccomp
        monkeypatch.setattr(os, "pidfd_open", lambda pid: os.open("/none", os.O_RDONLY))
    else:
        monkeypatch.setattr(journals, "LOOK_EVERY", 60.0)
    if how == "no such call":
        monkeypatch.delattr(os, "pidfd_open")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    _note(journal, _entry(1))
    mine = folder / journals.process_name(os.getpid())
    of_child = folder / journals.process_name(child.pid)
    of_child.write_bytes(mine.read_bytes())
    mine.rename(folder.parent / "aside")
    backend = _Backend("backend")
    reaper = _reaper(backend)
    try:
        reaper.start()
        time.sleep(0.3)
        assert not backend.released
        child.kill()
        wait_for(lambda: backend.released == ["attempt1"], what="the end of its hold")
    finally:
        reaper.stop()
        child.kill()
        child.wait()
