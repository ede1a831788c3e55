"""Messages between clients and the service: typed, and checked when decoded.

A client attaches *segments*, memory that arrays pass through; then it opens *exchanges*, tensors
that all clients of its job sum shard by shard.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

VERSION = 6
"""Version of the protocol: equal on both sides."""

Number = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
Name = Annotated[str, Meta(max_length=256)]
Secret = Annotated[bytes, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Operation = Literal["sum", "average", "max"]


class Message(Struct, tag=True, forbid_unknown_fields=True):
    """Base of all messages; `nbytes` is the size of the payload, if there may be one."""


class Hello(Message, forbid_unknown_fields=False):
    """First message of a client: join a job of `clients` clients as number `rank`.

    Unknown fields are allowed, so that a client of another version is told the version.
    """

    version: Number
    job: Name
    rank: Number
    clients: Annotated[int, Meta(ge=1, le=4096)]
    nonce: Secret = b""


class Challenge(Message):
    """Nonce that the client must answer with `Proof`: see `handshake.proof`."""

    nonce: Secret


class Proof(Message):
    """Proof that the client knows the token."""

    digest: Secret


class Nearby(Message):
    """Unix socket of the service, for TCP clients on the same machine.

    A client that can connect there starts again with a new handshake, and shares memory. `digest`
    proves that the service knows the token.
    """

    name: Name
    digest: Secret


class Stay(Message):
    """The client cannot connect to the socket of `Nearby`, and keeps this connection."""


class Welcome(Message):
    """All clients of the job are connected; `digest` proves that the service knows the token."""

    device: Text
    devices: Number
    shard_bytes: Number
    queue_shards: Number
    beat_s: Annotated[float, Meta(gt=0)]
    digest: Secret


class Attach(Message):
    """A segment of the client's memory: a file descriptor beside the message shares it, or, on a
    connection without descriptors, the service allocates a copy of the same size."""

    segment: Number
    size: Number


class Detach(Message):
    """The client no longer uses a segment."""

    segment: Number


class Update(Struct, forbid_unknown_fields=True, frozen=True):
    """An optimizer step on the parameters stored as `key`/p, with states beside them.

    `hyper` is a JSON object of hyper-parameters.
    """

    key: Name
    optimizer: Name
    hyper: Text


class Open(Message):
    """Open an exchange: a tensor of `elements` float32 that all clients sum.

    The segment holds, from `offset` on, places for pushed shards, and behind them as many for
    results (`plan.Layout`): the sum, or with `update` the parameters after a step with the average
    of the gradients. `kind` describes the client's tensor, such as its dtype. `turn` is as in
    `Push`.
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
    """All clients have opened the exchange, and the devices have memory for it.

    `kept` names the parameters and states that the exchange updates.
    """

    exchange: Number
    kept: list[Name] = []


class Push(Message):
    """Push a shard of an exchange, which is in the segment.

    `step` and `hyper`, a JSON object or empty, belong to an update and are the same on all clients.
    `turn`, unless 0, numbers the sums of a client that makes the same sums, one after the other, as
    all other clients.
    """

    exchange: Number
    version: Number
    shard: Number
    nbytes: Number
    step: Number = 0
    hyper: Text = ""
    turn: Number = 0


class Check(Message):
    """Ask whether a step of an updating exchange can have these hyper-parameters; changes
    nothing."""

    request: Number
    exchange: Number
    step: Number
    hyper: Text


class Summed(Message):
    """The result of a shard is in the segment, or follows as payload."""

    exchange: Number
    version: Number
    shard: Number
    nbytes: Number


class Close(Message):
    """The client no longer uses an exchange."""

    exchange: Number


class Put(Message):
    """Store bytes under a name in the memory of all devices, replacing an earlier value."""

    request: Number
    key: Name
    segment: Number
    nbytes: Number
    offset: Number = 0


class Probe(Message):
    """Write bytes to the memory of a device and read them back, for measurements of time."""

    request: Number
    segment: Number
    nbytes: Number
    device: Number
    offset: Number = 0


class Get(Message):
    """Request the bytes stored under a name; answered once they exist."""

    request: Number
    key: Name
    segment: Number
    nbytes: Number
    offset: Number = 0


class Value(Message):
    """The requested bytes are in the segment, or follow as payload."""

    request: Number
    nbytes: Number


class Barrier(Message):
    """Request a `Done` once all clients have sent a `Barrier`."""

    request: Number


class Save(Message):
    """Write the values of these names to a snapshot, as one version."""

    request: Number
    keys: Annotated[list[Name], Meta(max_length=4096)]
    path: Text


class Load(Message):
    """Store the values of a snapshot again under their names."""

    request: Number
    path: Text


class Done(Message):
    """A request was carried out; `text` is its result."""

    request: Number
    text: Text = ""


class Missing(Message):
    """Ask for the clients that the sender waits for; `Done` has their ranks, separated by
    spaces."""

    request: Number


class Beat(Message):
    """The sender is alive."""


class Leave(Message):
    """The client ends normally."""


class Refused(Message):
    """A request, or an exchange, was refused; nothing was changed."""

    request: Number | None
    exchange: Number | None
    kind: Name
    detail: Text


class Failed(Message):
    """The job has ended with an error, caused by clients (`ranks`) or `devices`."""

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
