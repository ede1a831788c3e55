"""Messages between clients and the service: typed, and checked when decoded.

A client attaches memory of its own, *segments*, for arrays; then it opens *exchanges*, tensors that
are summed over all clients of its job, shard by shard.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from msgspec import Meta, Struct

VERSION = 10
"""Version of the protocol; both sides must have the same."""

MAX_KEYS = 1 << 14
"""Maximum number of names in a snapshot."""

Number = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
Name = Annotated[str, Meta(max_length=256)]
Secret = Annotated[bytes, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=1 << 16)]
ReduceOpName = Literal["sum", "average", "max"]
Operation = ReduceOpName | Literal["gather"]
FormName = Literal["fp32", "fp16", "bf16"]


class Message(Struct, tag=True, forbid_unknown_fields=True):
    """Base of all messages; a payload of `nbytes` bytes may follow a message."""


class FromClient(Message):
    """Base of the messages that clients send."""


class FromService(Message):
    """Base of the messages that the service sends."""


class Request(FromClient):
    """Base of a client's messages that are answered by `Done` or `Refused`."""

    request: Number


class Hello(FromClient, forbid_unknown_fields=False):
    """Join a job of `clients` clients as number `rank`; the first message of a client.

    A client of another version, with other fields, is refused by its version.
    """

    version: Number
    job: Name
    rank: Number
    clients: Annotated[int, Meta(ge=1, le=4096)]
    nonce: Secret = b""


class Challenge(FromService):
    """Ask for a proof of the token: see `handshake.proof`."""

    nonce: Secret


class Proof(FromClient):
    """Prove knowledge of the token."""

    digest: Secret


class Nearby(FromService):
    """Name a Unix socket of the service, for clients of TCP on its machine.

    A client that can connect there does so, with a new handshake, and shares memory. The digest
    proves that the service knows the token.
    """

    name: Name
    digest: Secret


class Stay(FromClient):
    """Decline `Nearby`, and continue with this connection."""


class Welcome(FromService):
    """All clients have joined; the digest proves that the service knows the token."""

    device: Text
    devices: Number
    shard_bytes: Number
    queue_shards: Number
    beat_s: Annotated[float, Meta(gt=0)]
    digest: Secret


class Attach(FromClient):
    """Attach memory of the client: shared, by a file descriptor sent with the message, or, without
    descriptors, mirrored in memory of the service of that size."""

    segment: Number
    size: Number


class Detach(FromClient):
    """Detach a segment."""

    segment: Number


class Update(Struct, forbid_unknown_fields=True, frozen=True):
    """An optimizer of the parameters that are stored as `key`/p, beside their states.

    `hyper` is a JSON object of hyper-parameters.
    """

    key: Name
    optimizer: Name
    hyper: Text


class Open(FromClient):
    """Open a tensor of `elements` that all clients sum, in float32; `form` is their format in the
    segment.

    The segment has, from `offset` on, slots for shards that the client pushes, and then as many for
    the results (`plan.Layout`): the sum, or with `update` the parameters after a step with the
    average of the gradients. `kind` describes the tensor, such as its dtype. `turn`: see `Push`.
    `addends`: arrays that each client pushes, of an exact sum; 0: a sum in the order of the rings.

    A `gather` sums nothing: each client pushes `elements` bytes, to memory that the service shares
    with all clients, and gets those of all.
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
    addends: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    form: FormName = "fp32"

    @property
    def amount(self) -> str:
        """The number of elements, with their unit."""
        return f"{self.elements} {'bytes' if self.operation == 'gather' else 'elements'}"


class Opened(FromService):
    """All clients have opened the exchange, which updates the values of the names `kept`.

    `common` : bytes of the memory of a gather, whose descriptor is sent with the message.
    """

    exchange: Number
    kept: list[Name] = []
    common: Number = 0


class Push(FromClient):
    """Push a shard of an exchange, which is in the segment.

    `step` and `hyper`, hyper-parameters as a JSON object or empty, are of an update; all clients
    send the same. `turn`, if not 0, counts the sums of a client; their order is equal on all
    clients.
    """

    exchange: Number
    version: Number
    shard: Number
    nbytes: Number
    step: Number = 0
    hyper: Text = ""
    turn: Number = 0


class Check(Request):
    """Ask whether a step of an update can have these hyper-parameters."""

    exchange: Number
    step: Number
    hyper: Text


class Summed(FromService):
    """The result of a shard is in the segment, or follows as payload."""

    exchange: Number
    version: Number
    shard: Number
    nbytes: Number


class Close(FromClient):
    """Close an exchange."""

    exchange: Number


class Access(Request):
    """Base of requests for stored bytes, with the place in a segment of the client."""

    key: Name
    segment: Number
    nbytes: Number
    offset: Number = 0


class Put(Access):
    """Store bytes under a name in the memory of all devices."""


class Get(Access):
    """Read the bytes under a name, when they are stored."""


class Probe(Request):
    """Write bytes to the memory of a device and read them, to measure the time."""

    segment: Number
    nbytes: Number
    device: Number
    offset: Number = 0


class Barrier(Request):
    """Wait for all clients; `Done` when each has sent one."""


class Save(Request):
    """Write the values of these names to a snapshot, as one version."""

    keys: Annotated[list[Name], Meta(max_length=MAX_KEYS)]
    path: Text


class Load(Request):
    """Store the values of a snapshot under their names."""

    path: Text


class Done(FromService):
    """A request has succeeded, with this text; requested bytes are in the segment, or follow.

    `sizes` : bytes of each value of a loaded snapshot, by name.
    """

    request: Number
    text: Text = ""
    nbytes: Number = 0
    sizes: Annotated[dict[Name, Number], Meta(max_length=MAX_KEYS)] = {}


class Missing(Request):
    """Ask which clients the sender waits for; `Done` has their ranks, separated by spaces."""


class Beat(Message):
    """Show that the sender is alive."""


class Leave(FromClient):
    """Leave the job without an error."""


class Refused(FromService):
    """A request, or an exchange, was refused; nothing was changed."""

    request: Number | None
    exchange: Number | None
    kind: Name
    detail: Text


class Failed(FromService):
    """The job has ended with this error."""

    kind: Name
    detail: Text
    ranks: list[int]
    devices: list[int]


Located = Open | Access | Probe
"""Messages that name bytes of a segment."""


def union(base: type[Message]) -> Any:
    """Return the union of the messages of a base, and `Beat`, for a decoder."""
    kinds = [each for each in globals().values() if isinstance(each, type)]
    kinds = [each for each in kinds if issubclass(each, base | Beat) and not each.__subclasses__()]
    return Union[tuple(kinds)]  # noqa: UP007
