"""Keys in files: what `reducer keygen` writes, what is refused, and what is noticed of a change."""

import itertools
import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from reducer import config
from reducer.commands.keygen import keygen
from reducer.engine import allow_list
from reducer.engine.allow_list import ANY, LOCAL
from reducer.errors import AuthError, ConfigError
from reducer.keyfiles import KeyPair, is_key
from reducer.runtime.keyring import LOOK_S, Keyring
from reducer.zmtp._keys import make_pair
from tests.commands import REDUCER, run_command, serving
from tests.waits import eventually
from worker_client.client.bootstrap import connect
from worker_client.runtime import credentials as worker_keys

A, B = (make_pair().public for _ in range(2))


def files(home):
    return {
        str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()
    }


def command(*arguments):
    return run_command(*REDUCER, "keygen", *arguments)


def test_the_command_makes_what_each_needs_and_nobody_else_may_read_it(tmp_path):
    home = tmp_path / "new" / "keys"
    done = command(home, "--job", "a", "--job", "b_1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(home / name) for name in ("pool", "jobs/a", "jobs/b_1")]
    made = files(home)
    assert set(made) == {
        *(f"pool/{name}" for name in ("pool.secret", "pool.public", "allowed")),
        *(f"jobs/{job}/{name}" for job in ("a", "b_1") for name in ("job.name", "job.secret")),
        *(f"jobs/{job}/pool.public" for job in ("a", "b_1")),
    }
    for path in (tmp_path / "new").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    secrets = [text for name, text in made.items() if name.endswith(".secret")]
    assert all(is_key(secret) for secret in secrets)
    for secret in secrets:  # no directory holds another one's
        assert sum(secret in text for text in made.values()) == 1
    assert made["jobs/a/job.name"] == "a"
    assert made["jobs/a/pool.public"] == made["pool/pool.public"]


def test_new_keys_stand_beside_the_old_ones(tmp_path):
    assert command(tmp_path).returncode == 0  # those of one job, by default
    for job, rotate, made in (
        ("other", False, ("job.name", "job.secret", "pool.public")),
        ("default", True, ("job.secret",)),
    ):
        before = files(tmp_path)
        keygen(tmp_path, [job], rotate=rotate)
        after = files(tmp_path)
        changed = {name for name in after if after[name] != before.get(name)}
        assert changed == {"pool/allowed", *(f"jobs/{job}/{name}" for name in made)}
        assert after["pool/allowed"].startswith(before["pool/allowed"])
    assert len(allow_list.parse(after["pool/allowed"])) == 3


@pytest.mark.parametrize("jobs", [("one",), ("new", "one")])
def test_nothing_is_overwritten(home, jobs):
    before = files(home)
    arguments = [part for job in jobs for part in ("--job", job)]
    done = command(home, *arguments)
    assert done.returncode == 2
    assert "are not overwritten: remove it, choose another name" in done.stderr
    assert files(home) == before


@pytest.mark.parametrize("job", ["", "a/b", "a.b", "..", "a~b", "-a", "a b", "ä", "x" * 49, "*"])
def test_names_that_no_key_is_bound_to(tmp_path, job):
    with pytest.raises(ConfigError, match="a job's name has letters"):
        keygen(tmp_path / "keys", [job])
    assert not (tmp_path / "keys").exists()


def test_an_allow_list():
    allowed = allow_list.parse(f"# a comment\n\none {A}\ntwo,three_3   {B}\n  four {B}\n")
    assert len(allowed) == 2
    assert allowed.knows(A)
    assert not allowed.knows(A[::-1])
    for key, job, welcome in (
        (A, "one", True),
        (A, "one/named", True),
        (A, "two", False),
        (A, "on", False),
        (A, "/one", False),
        (A, ".one", False),
        (B, "two.1", True),
        (B, "three_3~x.1/one", True),
        (B, "four", True),
        (B, "one", False),
        ("", "one", False),
        (LOCAL, "one", True),
    ):
        refused = allowed.refusal(key, job)
        assert (refused is None) == welcome
        assert refused is None or A not in str(refused)
    anything = allow_list.parse(f"{ANY} {A}")
    assert anything.refusal(A, "what/ever") is None


@pytest.mark.parametrize(
    "line", ["KEY", "oneKEY", "one KEYx", "one ", "a.b KEY", "a, KEY", "a/* KEY", "one KEY two"]
)
def test_a_line_that_is_wrong_is_named_without_its_key(line):
    with pytest.raises(ConfigError, match=r"^line 2 of the allow-list is wrong: write") as error:
        allow_list.parse(f"one {B}\n{line.replace('KEY', A)}\n")
    assert A not in str(error.value)


def test_nothing_of_a_key_shows_by_accident(home):
    ours = worker_keys.load(home / "jobs" / "one")
    shown = repr([KeyPair("public", "secret"), ours, ours.pool, Keyring.load(home / "pool")])
    for text in files(home).values():
        for key in filter(is_key, text.split()):
            assert key not in shown
    assert "secret" not in shown.replace("home", "")


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        *(("pool", name) for name in ("pool.secret", "pool.public", "allowed")),
        *(("jobs/one", name) for name in ("job.secret", "pool.public", "job.name")),
    ],
)
def test_what_a_pool_or_a_worker_lacks_is_named(home, folder, name):
    where = home / folder
    load = Keyring.load if folder == "pool" else worker_keys.load
    if folder != "pool":
        (where / name).write_text("nonsense!")
        with pytest.raises(ConfigError, match=f"/{name} (holds no key|must hold)"):
            load(where)
    (where / name).unlink()
    said = rf"there is no {name} in {where} \(REDUCTION_KEYS, or --keys .*run `reducer keygen"
    with pytest.raises(ConfigError, match=said):
        load(where)


def test_a_directory_that_is_not_there_is_named(home, monkeypatch):
    monkeypatch.chdir(home)
    for load in (worker_keys.load, Keyring.load):
        with pytest.raises(ConfigError, match=rf"there is no directory {home}/nosuch \(REDUCTION"):
            load(Path("nosuch"))
        with pytest.raises(ConfigError, match=rf"there is no \w+\.\w+ in {home} \(REDUCTION_KEYS"):
            load(Path())
        with pytest.raises(ConfigError, match=r"give a pool .*/keys/pool, and a job's workers"):
            load(home)  # a common mistake


@pytest.mark.parametrize(
    ("mode", "who"), [(0o022, "anybody on this machine"), (0o020, "its group")]
)
def test_what_others_can_change_is_refused(home, mode, who):
    pool = home / "pool"
    (pool / "allowed").chmod(0o600 | mode)
    with pytest.raises(ConfigError, match=rf"^{who} can change .*/allowed: run chmod"):
        Keyring.load(pool)
    (pool / "allowed").chmod(0o600)
    pool.chmod(0o700 | mode)
    with pytest.raises(ConfigError, match=rf"^{who} can change .*: run chmod 700"):
        Keyring.load(pool)


def test_a_secret_that_anybody_can_read_is_said(home, caplog):
    secret = home / "jobs" / "one" / "job.secret"
    secret.chmod(0o640)
    (home / "jobs" / "one" / "pool.public").chmod(0o644)
    worker_keys.load(home / "jobs" / "one")
    assert not caplog.records
    secret.chmod(0o644)
    worker_keys.load(home / "jobs" / "one")
    assert [f"can read {secret}" in record.message for record in caplog.records] == [True]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_secret_that_cannot_be_read(home):
    (home / "pool" / "pool.secret").chmod(0)
    with pytest.raises(ConfigError, match="defaultMode: 0440"):
        Keyring.load(home / "pool")


class Clock:
    """Looks at the file as time passes."""

    def __init__(self, keyring):
        self.keyring = keyring
        self.now = 0.0

    def looks(self, times=2):
        """Look, and return how many keys are allowed then."""
        for _ in range(times):
            self.now += LOOK_S
            allowed = self.keyring.refresh(self.now)
        return len(allowed)


def test_a_change_is_noticed_once_it_stays(home):
    path = home / "pool" / "allowed"
    clock = Clock(Keyring.load(home / "pool"))
    first = clock.keyring.allowed
    assert clock.looks() == 2
    assert clock.keyring.refresh(clock.now) is first
    path.write_text(f"one {A}\n")
    clock.keyring.refresh(clock.now + LOOK_S / 2)
    assert clock.looks(1) == 2  # somebody may be writing still
    assert clock.looks(1) == 1
    path.write_text("")
    assert clock.looks() == 0


def test_what_is_wrong_changes_nothing(home, caplog):
    path = home / "pool" / "allowed"
    clock = Clock(Keyring.load(home / "pool"))
    text = path.read_text()
    path.write_text(f"{text}three {A[:20]}")
    assert clock.looks() == 2
    assert "the earlier one holds" in caplog.text
    assert A[:20] not in caplog.text
    path.unlink()
    assert clock.looks() == 2
    path.write_text(f"{text}three {A}")
    assert clock.looks() == 3


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: path.write_bytes(b"#" * ((1 << 20) + 1))],
    ids=["pipe", "folder", "large"],
)
def test_what_is_no_file_of_keys_holds_up_nobody(home, caplog, make):
    ring = Keyring.load(home / "pool")
    before = ring.allowed
    allowed = home / "pool" / "allowed"
    allowed.unlink()
    make(allowed)
    for look in range(1, 4):
        assert ring.refresh(look * LOOK_S) == before
    assert "the earlier one holds" in caplog.text


def mount(secret, source, version):
    """Show a directory's files as Kubernetes does: links through ``..data``, swapped at once."""
    shutil.copytree(source, secret / version)
    for path in (secret / version).iterdir():
        path.chmod(0o444)
        if not (secret / path.name).is_symlink():
            (secret / path.name).symlink_to(Path("..data") / path.name)
    (secret / "..new").symlink_to(version)
    (secret / "..new").replace(secret / "..data")


def test_a_mounted_secret_is_read_as_it_is(home, tmp_path, caplog):
    pool, job = tmp_path / "mounted-pool", tmp_path / "mounted-job"
    for secret, source in ((pool, home / "pool"), (job, home / "jobs" / "one")):
        secret.mkdir()
        secret.chmod(0o3777)
        mount(secret, source, "..2026_01")
    keyring = Keyring.load(pool)
    assert worker_keys.load(job) == worker_keys.load(home / "jobs" / "one")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    keygen(home, ["three"])
    mount(pool, home / "pool", "..2026_02")
    shutil.rmtree(pool / "..2026_01")
    clock = Clock(keyring)
    assert clock.looks() == 3


def test_with_keys_it_may_listen_beyond_this_machine(home):
    assert config.load(bind="tcp://0.0.0.0:0", keys=home / "pool").keys == home / "pool"


def test_a_signal_has_the_list_read_whatever_it_looks_like_and_no_log_has_a_key(home, tmp_path):
    keygen(tmp_path / "other", ["one"])
    stranger = tmp_path / "other" / "jobs" / "one"
    (stranger / "pool.public").write_text((home / "pool" / "pool.public").read_text())
    texts = [*files(home).values(), *files(tmp_path / "other").values()]
    keys = {key for text in texts for key in text.split() if is_key(key)}
    assert len(keys) == 10
    said = []
    jobs, path = home / "jobs", home / "pool" / "allowed"
    options = ("--keys", home / "pool", "--log-level", "debug")
    with serving(*options, stderr=subprocess.PIPE) as (process, address, _):

        def refused(directory, job):
            try:
                connect(servers=address, rank=0, world_size=1, keys=directory, job=job).shutdown()
            except AuthError as error:
                said.append(str(error))
                return True
            return False

        for given in itertools.product(
            (jobs / "one", jobs / "two", stranger, None), ("one", "two")
        ):
            assert refused(*given) == (given[0] != jobs / given[1])
        before = path.stat()
        path.write_text(path.read_text().replace("two ", "#wo "))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        process.send_signal(signal.SIGHUP)
        eventually(lambda: refused(jobs / "two", "two"))
        process.terminate()
        said.append(process.communicate(timeout=60)[1])
        assert process.returncode == 0
    assert "settings" in said[-1]
    assert "refused connections" in said[-1]
    assert not [key for key in keys if any(key in text for text in said)]
