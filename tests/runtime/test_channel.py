"""Messages between a supervisor and its executors arrive whole, in order, or not at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowlock.runtime import channel, messages
from rowlock.runtime.channel import (
    FRAME_BYTES_MAX,
    BrokenChannel,
    Channel,
    Deframer,
    PolledChannel,
    frame,
)
from tests.support.fake_executor import run

texts = st.text(max_size=200)
some_messages = st.one_of(
    st.builds(messages.Hello, pid=st.integers(1, 2**22)),
    st.builds(messages.Completed, attempt=st.integers(1), result=texts, committed=st.booleans()),
    st.builds(run, texts, texts),
    st.just(messages.Exit()),
    st.builds(
        messages.Slices,
        request=st.integers(1),
        attempt=st.integers(1),
        keys=st.lists(texts),
        slices=st.lists(texts),
        weights=st.lists(st.integers()),
    ),
)


def completed(result: str) -> messages.Completed:
    return messages.Completed(attempt=1, result=result, committed=False)


@pytest.fixture
def pair() -> Iterator[tuple[PolledChannel, Channel]]:
    """Supervisor's side and executor's side."""
    left, right = socket.socketpair()
    with left, right:
        yield PolledChannel(left), Channel(right)


@given(st.lists(some_messages, max_size=8), st.data())
def test_bytes_cut_anywhere_give_the_messages_that_were_sent(
    sent: list[messages.Message], data: st.DataObject
) -> None:
    stream = b"".join(map(frame, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    deframer = Deframer()

    received: list[messages.Message] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += deframer.feed(stream[start:end])

    assert received == sent


@given(some_messages)
def test_one_byte_at_a_time_completes_a_message_with_its_last_byte(
    message: messages.Message,
) -> None:
    deframer = Deframer()
    *head, last = frame(message)

    assert [found for byte in head for found in deframer.feed(bytes([byte]))] == []
    assert deframer.feed(bytes([last])) == [message]


def test_lone_surrogates_of_an_author_survive_the_journey(
    pair: tuple[PolledChannel, Channel],
) -> None:
    supervisor, executor = pair
    message = messages.Failed(attempt=1, error='{"message": "\ud800 \x00"}', retry="policy")

    executor.send(message)

    assert supervisor.feed() == [message]


def test_a_message_over_the_limit_is_refused_before_anything_is_sent(
    pair: tuple[PolledChannel, Channel],
) -> None:
    supervisor, executor = pair
    large = completed("x" * FRAME_BYTES_MAX)

    with pytest.raises(ValueError, match=r"a Completed message of 4,194,\d\d\d bytes exceeds"):
        executor.send(large)
    with pytest.raises(ValueError, match="send it in parts"):
        supervisor.queue(large)

    assert supervisor.feed() == []
    assert supervisor.unsent == 0


def test_a_message_of_the_largest_size_passes(pair: tuple[PolledChannel, Channel]) -> None:
    supervisor, executor = pair
    message = completed("x" * (FRAME_BYTES_MAX - len(messages.encode(completed("")))))

    sender = threading.Thread(target=executor.send, args=[message])
    sender.start()
    received: list[messages.Message] = []
    while not received:
        received += supervisor.feed()
    sender.join()

    assert received == [message]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff\xff\xff\xff",
        (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
        *(
            len(body).to_bytes(4, "big") + body
            for body in (
                b"",
                b"hello",
                b"\xff",
                b"5",
                b"[]",
                b"[[]]",
                b'["NoSuchMessage"]',
                b'["Hello"]',
                b'["Hello",1,2]',
                b"[" * 100_000,
            )
        ),
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_bytes_that_are_no_message_break_the_channel(nonsense: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        supervisor = PolledChannel(left)
        right.sendall(nonsense)

        with pytest.raises(BrokenChannel):
            list(iter(supervisor.feed, None))  # the longest takes more than one call


def test_many_small_messages_arrive_with_one_call(pair: tuple[PolledChannel, Channel]) -> None:
    supervisor, executor = pair
    sent = [messages.Ready(attempt=number) for number in range(200)]

    for message in sent:
        executor.send(message)

    assert supervisor.feed() == sent
    assert supervisor.feed() == []


def test_queued_messages_are_sent_together_by_flush(pair: tuple[PolledChannel, Channel]) -> None:
    supervisor, executor = pair

    supervisor.queue(messages.Stop(attempt=1))
    supervisor.queue(messages.Exit())
    waiting = supervisor.unsent
    done = supervisor.flush()

    assert waiting == len(frame(messages.Stop(attempt=1))) + len(frame(messages.Exit()))
    assert done
    assert supervisor.unsent == 0
    assert [executor.receive(), executor.receive()] == [messages.Stop(attempt=1), messages.Exit()]


def test_a_peer_that_does_not_read_never_blocks_the_supervisor(
    pair: tuple[PolledChannel, Channel],
) -> None:
    supervisor, executor = pair
    message = messages.Reply(request=1, ok=True, body="x" * 100_000)

    for _ in range(30):
        supervisor.queue(message)
    assert not supervisor.flush()
    left = supervisor.unsent
    received = 0
    while not supervisor.flush():
        assert executor.receive() == message
        received += 1
    received += sum(executor.receive() == message for _ in range(30 - received))

    assert left > 0
    assert received == 30


def test_one_call_of_feed_reads_a_bounded_amount(
    pair: tuple[PolledChannel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "FEED_BYTES_MAX", 64 * 1024)
    supervisor, executor = pair
    sent = [completed("x" * 40_000)] * 4
    for message in sent:  # they fit into the socket
        executor.send(message)

    first, *rest = [supervisor.feed() for _ in range(4)]

    assert len(first) == 1
    assert [*first, *(message for found in rest for message in found)] == sent


def test_an_end_that_is_read_together_with_messages_does_not_hide_them(
    pair: tuple[PolledChannel, Channel],
) -> None:
    supervisor, executor = pair
    rest = 64 * 1024 - len(frame(completed("")))  # what one call of recv takes, to the byte
    executor.send(completed("x" * rest))
    executor.close()

    assert supervisor.feed() == [completed("x" * rest)]
    with pytest.raises(EOFError):
        supervisor.feed()


def test_what_came_before_the_end_is_delivered_before_the_end_is_reported(
    pair: tuple[PolledChannel, Channel],
) -> None:
    supervisor, executor = pair
    executor.send(messages.Hello(pid=7))
    executor.close()

    assert supervisor.feed() == [messages.Hello(pid=7)]
    with pytest.raises(EOFError):
        supervisor.feed()


def test_a_frame_cut_off_by_the_end_is_no_message() -> None:
    left, right = socket.socketpair()
    with left:
        with right:
            right.sendall(frame(messages.Hello(pid=7))[:-1])
        supervisor = PolledChannel(left)
        assert supervisor.feed() == []
        with pytest.raises(EOFError):
            supervisor.feed()


def test_writing_to_an_executor_that_is_gone_is_a_connection_error(
    pair: tuple[PolledChannel, Channel],
) -> None:
    supervisor, executor = pair
    executor.close()

    supervisor.queue(messages.Exit())
    with pytest.raises(ConnectionError):
        supervisor.flush()


@pytest.mark.parametrize("unread", [False, True], ids=["clean end", "reset"])
def test_the_executor_learns_that_the_supervisor_is_gone(
    pair: tuple[PolledChannel, Channel], unread: bool
) -> None:
    supervisor, executor = pair
    if unread:
        executor.send(messages.Hello(pid=7))
    supervisor.close()

    assert executor.receive() is None
    with pytest.raises(ConnectionError):
        executor.send(messages.Hello(pid=7))


def test_messages_of_several_threads_are_not_mixed_up(
    pair: tuple[PolledChannel, Channel],
) -> None:
    supervisor, executor = pair
    # Larger than the socket's buffer: each needs several writes, between which others could write.
    sent = [
        messages.Completed(attempt=number, result=str(number) * 500_000, committed=False)
        for number in range(4)
    ]
    senders = [threading.Thread(target=executor.send, args=[message]) for message in sent]
    for sender in senders:
        sender.start()

    received: list[messages.Message] = []
    while len(received) < len(sent):
        received += supervisor.feed()
    for sender in senders:
        sender.join()

    assert sorted(received, key=str) == sorted(sent, key=str)


def test_every_message_class_is_the_same_after_the_journey() -> None:
    examples: dict[str, object] = {"str": "é", "str | None": None, "int": 1, "int | None": 2}
    examples |= {"bool": True, "float | None": 0.5, "list[str]": ["a"], "list[int]": [1]}

    for cls in messages._CLASSES.values():
        message = cls(
            **{name: examples[cls.__annotations__[name]] for name in messages._FIELDS[cls]}
        )
        assert messages.decode(messages.encode(message)) == message
