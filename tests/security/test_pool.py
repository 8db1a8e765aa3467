"""A pool with keys: who gets in, what others cannot reach, and what a refused worker hears."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import pytest

from hostile.lines import Encrypted
from reducer import keyfiles
from reducer.commands.keygen import keygen
from reducer.errors import AuthError, ConfigError, MembershipError, RemoteProtocolError
from reducer.runtime.keyring import LOG_S, Keyring
from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Hello, decode_error, encode
from tests.conftest import local_pool, reducer_here
from tests.integration.calls import all_reduce, errors_of, ones
from tests.security.conftest import WAIT_S, busy, reduces
from tests.waits import eventually
from worker_client.client.bootstrap import connect

M = MessageType


def refusal(pool, **arguments):
    """What a worker hears that is refused; at once, not when it has waited long enough."""
    arguments["connect_timeout"] = 60  # longer than this test may take
    with pytest.raises(AuthError) as error:
        connect(servers=pool.address, rank=0, world_size=1, **arguments)
    return str(error.value)


def test_jobs_with_keys_of_their_own_share_a_pool(pool):
    one, two = pool.join("one"), pool.join("two", 3)
    for _ in range(5):
        all_reduce(one)
        all_reduce(two)
    works = [client.all_reduce(ones(), name="by name") for client in two]
    assert all((work.wait(10) == 1).all() for work in works)
    assert pool.members == {"one": 2, "two": 3, "two/named": 3}
    assert pool.counters.unauthenticated == 0


def test_who_is_refused_hears_why(pool, tmp_path):
    keygen(tmp_path / "other", ["one"])
    own, stranger = pool.home / "jobs" / "one", tmp_path / "other" / "jobs" / "one"
    with busy(pool.join("two")):
        for job in ("two", "onetwo"):
            assert f"is for job one, not for {job!r}" in refusal(pool, keys=own, job=job)
        assert pool.counters.unauthenticated == 2
        assert "this worker has none: set REDUCTION_KEYS" in refusal(pool)
        assert "is not of the pool that this worker's keys are for" in refusal(pool, keys=stranger)
        (stranger / "pool.public").write_text((own / "pool.public").read_text())
        assert "refuses this worker's key" in refusal(pool, keys=stranger)  # not just its HELLO
        eventually(lambda: pool.counters.unauthenticated >= 4)


def test_with_a_key_where_the_pool_has_none(home):
    keys = home / "jobs" / "one"
    with local_pool(1) as servers, pytest.raises(AuthError, match="has no keys, and this worker"):
        connect(servers=servers, rank=0, world_size=1, keys=keys, connect_timeout=60)


def test_many_refusals_are_one_line(pool, caplog):
    host, port = pool.address.split(":")
    begun = time.monotonic()
    for _ in range(30):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"\xff" + bytes(7) + b"\x01\x7f\x03\x01NULL".ljust(56, b"\0"))
            while stranger.recv(100):
                pass
    eventually(lambda: pool.counters.unauthenticated == 30)
    lines = [record for record in caplog.records if "refused connections" in record.message]
    assert 1 <= len(lines) <= 1 + (time.monotonic() - begun) / LOG_S
    assert "without a key" in lines[0].message


def says(line, header, payload):
    """Say something; return the error that is answered, None of a WELCOME."""
    line.say(header.pack(), payload)
    while True:
        try:
            frame, body = line.hear()
        except TimeoutError:  # the machine is busy
            continue
        if Header.unpack(frame).type is M.WELCOME:
            return None
        if Header.unpack(frame).type is M.ERROR:
            return decode_error(body)


def hello(job, *, claims=None, **change):
    """A HELLO whose body names a job, and whose header perhaps another one."""
    header = Header(M.HELLO, job=fingerprint(claims or job), window=1 << 20)._replace(**change)
    return header, encode(Hello(job=job, world_size=2, reducers=1, reducer_index=0))


def test_a_tenant_cannot_speak_for_another_job(pool):
    one, two = fingerprint("one"), fingerprint("two")
    numbers = {"dtype": DType.FLOAT32, "op": ReduceOp.SUM, "wire_dtype": DType.FLOAT32}
    with ExitStack() as stack, busy(pool.join("one")) as made:
        frame = Header(
            M.CONTRIBUTION, job=one, sequence=made[0], total_bytes=280_000, nbytes=64, **numbers
        )
        lines = []
        for member, says_then, kind in (
            (False, hello("one"), AuthError),
            (False, hello("one", rank=1, generation=1), AuthError),
            (False, hello("two", claims="one"), RemoteProtocolError),
            # What a member of the other job would say, or one has said.
            (False, (frame, bytes(64)), MembershipError),
            *(
                (True, (frame._replace(**change), bytes(64)), RemoteProtocolError)
                for change in (
                    {},
                    {"rank": 1},
                    {"type": M.ABORT},
                    {"type": M.RETAINED},
                    {"type": M.GOODBYE},
                    {"job": two, "generation": 1},
                    {"job": two, "rank": 1},
                )
            ),
        ):  # each as somebody new: who was found out is not heard any more
            lines.append(Encrypted(pool.address, pool.home / "jobs" / "two"))
            stack.enter_context(closing(lines[-1]))
            assert not member or says(lines[-1], *hello("two")) is None
            assert isinstance(says(lines[-1], *says_then), kind)
        count = made[0]
        eventually(lambda: made[0] > count + 20)
        for line in lines:
            assert {M.PING} >= set(rest(line)), "it hears something of others"


def rest(line):
    """What is said until the reducer hangs up, or says no more."""
    with suppress(OSError):
        while True:
            yield Header.unpack(line.hear()[0]).type


def test_a_revoked_key_is_out_at_once(pool):
    kept, revoked = pool.join("one"), pool.join("two")
    with busy(kept) as made:
        all_reduce(revoked)
        waiting = revoked[0].all_reduce(ones())
        pool.allow("one")
        with pytest.raises(AuthError):  # in the middle of an all-reduce
            waiting.wait(20)
        eventually(lambda: "two" not in pool.members)
        for error in errors_of([client.all_reduce(ones()) for client in revoked]):
            assert isinstance(error, AuthError)
            assert "not on the pool's allow-list" in str(error)
        assert "revoked" in refusal(pool, keys=pool.home / "jobs" / "two")
        assert pool.counters.unauthenticated >= 2
        pool.allow("one", "two")
        late = pool.home / "jobs" / "two"
        eventually(lambda: admitted(pool, late))
        count = made[0]
        eventually(lambda: made[0] > count)
    all_reduce(kept)


def admitted(pool, keys):
    job = f"{keys.name}/a look"
    try:
        connect(servers=pool.address, rank=0, world_size=1, keys=keys, job=job).shutdown()
    except AuthError:
        return False
    return True


def test_rotation_under_load(pool):
    clients = pool.join("one")
    allowed = pool.home / "pool" / "allowed"
    (old,) = [line for line in allowed.read_text().splitlines() if line.startswith("one ")]
    with busy(clients):
        keygen(pool.home, ["one"], rotate=True)
        assert old in allowed.read_text()
        eventually(lambda: admitted(pool, pool.home / "jobs" / "one"))
        # Who starts now has the new key, in a run of its own.
        successors = pool.join("one", job="one/next")
        all_reduce(successors)
    for client in clients:
        client.shutdown()
    allowed.write_text(allowed.read_text().replace(old, "# revoked"))
    with busy(successors) as made:
        count = made[0]
        eventually(lambda: made[0] > count + 50)
    assert pool.members == {"one/next": 2}


def test_ranks_join_and_leave_under_names_that_begin_with_their_keys_job(pool):
    clients = pool.join("one", on_rank_lost="continue")
    keys = pool.home / "jobs" / "one"
    common = {"servers": pool.address, "job": "one", "on_rank_lost": "continue", "join": True}
    with ThreadPoolExecutor(3) as threads:
        joining = threads.submit(connect, keys=keys, **common)
        eventually(lambda: any(threads.map(lambda client: client.admit(), clients)), WAIT_S)
        with joining.result() as newcomer:
            assert newcomer.admit()
            assert reduces([*clients, newcomer])
    assert reduces(clients)
    assert any(name.startswith("one~") for name in pool.members)


def test_another_reducer_takes_over(pool):
    with reducer_here(Keyring.load(pool.home / "pool")) as second:
        clients = pool.join("one", servers=[pool.address, second.address])
        with busy(clients) as made:
            second.stop()
            count = made[0]
            eventually(lambda: made[0] > count + 20)
        assert clients[0].counters.losses >= 1


def test_a_file_that_does_not_answer_holds_up_nobody(pool, monkeypatch):
    asked, answered, read = threading.Event(), threading.Event(), keyfiles.read

    def hang(directory, name):
        if name != keyfiles.ALLOWED:
            return read(directory, name)
        asked.set()
        assert answered.wait(WAIT_S)
        raise ConfigError("the machine that had it is gone")

    ended = threading.Thread(target=pool.close)
    try:
        with busy(pool.join("one")) as made:
            monkeypatch.setattr(keyfiles, "read", hang)
            pool.allow("two")
            assert asked.wait(WAIT_S)
            before = made[0]
            eventually(lambda: made[0] > before + 10)
            all_reduce(pool.join("two"))
            assert not answered.is_set(), "the list from before holds until the file answers"
        ended.start()
        ended.join(WAIT_S)
        assert not ended.is_alive()
    finally:
        answered.set()
