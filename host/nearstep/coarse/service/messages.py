"""What clients and the service say to each other: typed, and checked when decoded.

A client describes memory of its own, *segments*, that arrays go through; then it opens *exchanges*,
tensors that are summed over all clients of its job, shard by shard.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

VERSION = 6
"""Of the protocol: both sides must have the same."""

Number = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
Name = Annotated[str, Meta(max_length=256)]
Secret = Annotated[bytes, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Operation = Literal["sum", "average", "max"]


class Message(Struct, tag=True, forbid_unknown_fields=True):
    """Base of all messages. Those with `nbytes` may be followed by as many bytes of payload."""


class Hello(Message, forbid_unknown_fields=False):
    """The first of a client: it wants to join a job of `clients` clients as number `rank`.

    One of another version may have other fields: it is to be told of the version.
    """

    version: Number
    job: Name
    rank: Number
    clients: Annotated[int, Meta(ge=1, le=4096)]
    nonce: Secret = b""


class Challenge(Message):
    """What the client has to show that it knows the token with: see `handshake.proof`."""

    nonce: Secret


class Proof(Message):
    """It knows the token."""

    digest: Secret


class Nearby(Message):
    """A Unix socket of the service, for clients of TCP on its machine.

    Who can connect to that goes on there, with a new handshake, and shares memory. The service
    shows that it knows the token.
    """

    name: Name
    digest: Secret


class Stay(Message):
    """The client cannot: it goes on here."""


class Welcome(Message):
    """All clients of the job are there. The service, too, shows that it knows the token."""

    device: Text
    devices: Number
    shard_bytes: Number
    queue_shards: Number
    beat_s: Annotated[float, Meta(gt=0)]
    digest: Secret


class Attach(Message):
    """Memory of the client: shared, as a file descriptor beside the message, or, on a connection
    without descriptors, as large as that on the side of the service, too."""

    segment: Number
    size: Number


class Detach(Message):
    """A segment is not used any more."""

    segment: Number


class Update(Struct, forbid_unknown_fields=True, frozen=True):
    """A step of an optimizer on parameters that are kept as `key`/p, its states beside them.

    `hyper` are hyper-parameters, as a JSON object.
    """

    key: Name
    optimizer: Name
    hyper: Text


class Open(Message):
    """A tensor of `elements` float32 that all clients sum.

    In the segment, at `offset`, are places for shards that the client pushes, and behind them as
    many for what comes back (`plan.Layout`): the sum, or with `update` the parameters after a step
    with the average of the gradients. `kind` says what the client has there, such as a dtype.
    `turn` is as of `Push`.
    """

    exchange: Number
    elements: Annotated[int, Meta(ge=1, le=1 << 40)]
    operation: Operation
    wire: Name
    segment: Number
    device: Number
    shard_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    update: Update | None = None
    kind: Name = ""
    turn: Number = 0
    offset: Number = 0


class Opened(Message):
    """All clients have opened it, and the devices have memory for it.

    `kept` are the names of the parameters and states that it updates.
    """

    exchange: Number
    kept: list[Name] = []


class Push(Message):
    """A shard of an exchange is in its segment; of one that updates, for this step.

    `hyper`, a JSON object or empty, are hyper-parameters of the step. All clients say the same.
    `turn`, if it is not 0, counts the sums of a client that makes one after the other, in the same
    order as all others.
    """

    exchange: Number
    version: Number
    shard: Number
    nbytes: Number
    step: Number = 0
    hyper: Text = ""
    turn: Number = 0


class Check(Message):
    """Could this step of an exchange that updates have these hyper-parameters? Nothing is done."""

    request: Number
    exchange: Number
    step: Number
    hyper: Text


class Summed(Message):
    """A shard has been summed, or updated: it is in the segment, or comes as payload."""

    exchange: Number
    version: Number
    shard: Number
    nbytes: Number


class Close(Message):
    """An exchange is not used any more."""

    exchange: Number


class Put(Message):
    """Bytes to be kept under a name in the memory of all devices, until another value comes."""

    request: Number
    key: Name
    segment: Number
    nbytes: Number
    offset: Number = 0


class Probe(Message):
    """Bytes to be written to the memory of a device and read from there, to measure the time."""

    request: Number
    segment: Number
    nbytes: Number
    device: Number
    offset: Number = 0


class Get(Message):
    """Bytes under a name, when they are there."""

    request: Number
    key: Name
    segment: Number
    nbytes: Number
    offset: Number = 0


class Value(Message):
    """They are in the segment, or come as payload."""

    request: Number
    nbytes: Number


class Barrier(Message):
    """The client waits for all others; `Done` when they have come."""

    request: Number


class Save(Message):
    """Write what is kept under these names to a snapshot, as one version."""

    request: Number
    keys: Annotated[list[Name], Meta(max_length=4096)]
    path: Text


class Load(Message):
    """Bring what a snapshot has back under its names."""

    request: Number
    path: Text


class Done(Message):
    """A request was carried out; what it has to tell."""

    request: Number
    text: Text = ""


class Missing(Message):
    """Which clients has the sender waited for? `Done` has their ranks, between spaces."""

    request: Number


class Beat(Message):
    """The sender is alive."""


class Leave(Message):
    """The client ends well."""


class Refused(Message):
    """A request, or an exchange, was refused; nothing was changed."""

    request: Number | None
    exchange: Number | None
    kind: Name
    detail: Text


class Failed(Message):
    """The job has ended: who is gone, or what failed."""

    kind: Name
    detail: Text
    ranks: list[int]
    devices: list[int]


FromClient = (
    Hello
    | Proof
    | Stay
    | Attach
    | Detach
    | Open
    | Check
    | Push
    | Close
    | Put
    | Get
    | Probe
    | Barrier
    | Save
    | Load
    | Missing
    | Beat
    | Leave
)
FromService = (
    Challenge | Nearby | Welcome | Opened | Summed | Value | Done | Beat | Refused | Failed
)
