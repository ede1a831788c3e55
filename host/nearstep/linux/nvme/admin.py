"""Admin commands, and the way of I/O commands to their namespaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nearstep.linux.nvme import identify
from nearstep.linux.nvme.controller import (
    COMPLETION_BYTES,
    ENTRY_BYTES,
    IDENTITY,
    VERSION,
    CompletionQueue,
    NvmeController,
    SubmissionQueue,
)
from nearstep.linux.nvme.namespace import Namespace, reachable
from nearstep.linux.nvme.standard import (
    ALL_NAMESPACES,
    IO_QUEUES,
    PAGE_BYTES,
    QUEUE_ENTRIES,
    TRANSFER_BYTES,
    Admin,
    CommandSet,
    Nvm,
    Status,
    StatusError,
    require,
)
from nearstep.linux.nvme.transfer import Command

ERROR_LOG, HEALTH_LOG, SLOT_LOG, EFFECTS_LOG = 0x01, 0x02, 0x03, 0x05
WRITE_CACHE, NUMBER_OF_QUEUES, PROFILE = 0x06, 0x07, 0x19
FEATURES = {0x01: 0, 0x02: 0, 0x04: 0x157, 0x05: 0, WRITE_CACHE: 1, NUMBER_OF_QUEUES: 0, 0x08: 0,
            0x09: 0, 0x0A: 0, 0x0B: 0, PROFILE: 0}  # fmt: skip
"""Values of features after a reset."""


class AdminCommands:
    """Executes the commands of a controller."""

    def __init__(self, controller: NvmeController) -> None:
        self._controller = controller
        self._features = dict(FEATURES)
        self._requests: list[tuple[SubmissionQueue, int]] = []
        self._event: int | None = None
        self._masked = False
        self._admin: Mapping[int, Callable[[SubmissionQueue, Command], int | None]] = {
            Admin.DELETE_SQ: self._delete_submissions,
            Admin.CREATE_SQ: self._create_submissions,
            Admin.GET_LOG: self._get_log,
            Admin.DELETE_CQ: self._delete_completions,
            Admin.CREATE_CQ: self._create_completions,
            Admin.IDENTIFY: self._identify,
            Admin.ABORT: lambda queue, command: 1,  # it was not aborted
            Admin.SET_FEATURES: self._set_features,
            Admin.GET_FEATURES: self._get_features,
            Admin.ASYNC_EVENT: self._request_event,
        }

    @property
    def _namespaces(self) -> list[Namespace]:
        """Those of the enabled command sets."""
        everything = self._controller.enabled_sets == 6
        return [
            each
            for each in self._controller.namespaces
            if everything or each.command_set == CommandSet.NVM
        ]

    def reset(self) -> None:
        """Forget features, requests and events."""
        self._features = dict(FEATURES)
        self._requests.clear()
        self._event, self._masked = None, False

    def report(self, information: int) -> None:
        """Complete a request for an event, now or when there is one: an error, of a doorbell.

        Further ones are masked until the host has read the error log.
        """
        if self._event is None and not self._masked:
            self._event = information << 8 | ERROR_LOG << 16
        self.complete_events()

    def execute(self, queue: SubmissionQueue, command: Command) -> int | None:
        """Execute a command of the admin queue; see `Commands`."""
        result = self._execute(queue, command)
        if command.opcode == Admin.SET_FEATURES and not self._caches:
            self._flush(command)  # what is in the cache that was switched off
        return result

    def _execute(self, queue: SubmissionQueue, command: Command) -> int | None:
        """The lock is held: a reset must not be in the middle. No admin command uses the card."""
        with self._controller.lock:
            require(queue.alive, Status.ABORTED_BY_DELETION)
            require(command.flags == 0)
            own = self._admin.get(command.opcode)
            if own is not None:
                return own(queue, command)
            known = {code: each for each in self._namespaces for code in each.admin_commands}
            require(command.opcode in known, Status.INVALID_OPCODE)
            namespace = known[command.opcode]
            require(command.namespace == namespace.number, Status.INVALID_NAMESPACE)
            return namespace.admin_commands[command.opcode](command) or 0

    def execute_io(self, queue: SubmissionQueue, command: Command) -> int | None:
        """Execute a command of an I/O queue; see `Commands`."""
        require(command.flags == 0)
        if command.opcode == Nvm.FLUSH and command.namespace == ALL_NAMESPACES:
            self._flush(command)
            return 0
        namespace = reachable(self._controller.namespaces, command.namespace)
        if namespace is None:
            raise StatusError(Status.INVALID_NAMESPACE)
        require(namespace in self._namespaces, Status.COMMAND_SET_NOT_ENABLED)
        own = namespace.commands.get(command.opcode)
        if own is None:
            raise StatusError(Status.INVALID_OPCODE)
        result = own(command) or 0
        drive = namespace.command_set == CommandSet.NVM
        if drive and command.opcode == Nvm.WRITE and not self._caches:
            self._flush(command)
        return result

    @property
    def _caches(self) -> bool:
        """Whether the host lets drives keep writes in volatile caches."""
        return bool(self._features[WRITE_CACHE] & 1)

    def _flush(self, command: Command) -> None:
        for each in self._namespaces:
            if each.command_set == CommandSet.NVM:
                each.commands[Nvm.FLUSH](command)

    def _identify(self, queue: SubmissionQueue, command: Command) -> int:
        vendor = (IDENTITY.vendor, IDENTITY.subsystem_vendor)
        head = identify.controller_data(
            self._controller.namespaces, VERSION, vendor, self._controller.serial
        )
        cns, command_set = command.bits(10, 7), command.bits(11, 31, 24)
        found = identify.identify(self._namespaces, cns, command.namespace, command_set, head)
        command.send(found.ljust(identify.IDENTIFY_BYTES, b"\0"))
        return 0

    def _get_log(self, queue: SubmissionQueue, command: Command) -> int:
        count = (command.bits(10, 31, 16) | command.bits(11, 15) << 16) + 1
        offset, nbytes = command.wide(12), 4 * count
        require(nbytes <= TRANSFER_BYTES and not command.bits(14, 23, 23))
        data = self._log(command)
        require(offset <= len(data) and offset % 4 == 0)
        command.send(data[offset : offset + nbytes].ljust(nbytes, b"\0"))
        if command.bits(10, 7) == ERROR_LOG and not command.bits(10, 15, 15):  # RAE
            self._masked = False
        return 0

    def _log(self, command: Command) -> bytes:
        """Contents of a log page."""
        identifier = command.bits(10, 7)
        namespace = next((e for e in self._namespaces if e.number == command.namespace), None)
        own = {} if namespace is None else namespace.logs
        if identifier in own:
            return own[identifier]()
        general: dict[int, Callable[[], bytes]] = {
            ERROR_LOG: lambda: bytes(64),
            HEALTH_LOG: lambda: identify.health(self._namespaces),
            SLOT_LOG: lambda: bytes([1, *bytes(7), *b"0.1     "]).ljust(512, b"\0"),
            EFFECTS_LOG: lambda: self._effects(command.bits(14, 31, 24)),
        }
        known = {*general, 0x00, *(log for each in self._namespaces for log in each.logs)}
        if identifier == 0x00:
            return identify.supported_logs(known)
        require(identifier in known, Status.INVALID_LOG_PAGE)
        require(identifier in general, Status.INVALID_NAMESPACE)
        return general[identifier]()

    def _effects(self, command_set: int) -> bytes:
        of_set = [each for each in self._namespaces if each.command_set == command_set]
        require(of_set, Status.INVALID_COMMAND_SET)
        admin = [*self._admin, *(code for each in of_set for code in each.admin_commands)]
        return identify.effects(admin, [code for each in of_set for code in each.commands])

    def _set_features(self, queue: SubmissionQueue, command: Command) -> int:
        feature, value = command.bits(10, 7), command.dwords[11]
        require(feature in FEATURES)
        require(not command.bits(10, 31, 31), Status.NOT_SAVEABLE)
        if feature == NUMBER_OF_QUEUES:
            require(0xFFFF not in (value & 0xFFFF, value >> 16))
            own = self._controller.submissions, self._controller.completions
            require(len(own[0]) == len(own[1]) == 1, Status.SEQUENCE_ERROR)
            value = min(value & 0xFFFF, IO_QUEUES - 1) | min(value >> 16, IO_QUEUES - 1) << 16
        require(feature != PROFILE or value & 0x1FF == 0, Status.COMBINATION_REJECTED)
        self._features[feature] = value
        return value if feature in (NUMBER_OF_QUEUES, PROFILE) else 0

    def _get_features(self, queue: SubmissionQueue, command: Command) -> int:
        feature, select = command.bits(10, 7), command.bits(10, 10, 8)
        require(feature in FEATURES and select <= 3)
        return {0: self._features, 1: FEATURES, 2: FEATURES, 3: {feature: 0b100}}[select][feature]

    def _request_event(self, queue: SubmissionQueue, command: Command) -> None:
        require(len(self._requests) < identify.EVENT_REQUESTS, Status.TOO_MANY_EVENT_REQUESTS)
        self._requests.append((queue, command.identifier))
        self.complete_events()

    def complete_events(self) -> None:
        """Complete a request for an event if there are both, and room."""
        event, requests = self._event, self._requests
        if event is not None and requests and not requests[0][0].completions.is_full:
            queue, identifier = requests.pop(0)
            self._event, self._masked = None, True
            self._controller.post(queue, identifier, Status.SUCCESS, event)

    def _create_completions(self, queue: SubmissionQueue, command: Command) -> int:
        queues = self._controller.completions
        number, size = self._queue(command, queues)
        require(self._controller.queue_entries[1] == COMPLETION_BYTES.bit_length() - 1,
                Status.INVALID_QUEUE_SIZE)  # fmt: skip
        vector = command.bits(11, 31, 16)
        require(vector < self._controller.msix.vectors, Status.INVALID_VECTOR)
        interrupts = vector if command.bits(11, 1, 1) else None
        made = CompletionQueue(number, command.wide(6), size, interrupts)
        self._controller.create_completions(made)
        return 0

    def _create_submissions(self, queue: SubmissionQueue, command: Command) -> int:
        queues, completions = self._controller.submissions, self._controller.completions
        number, size = self._queue(command, queues)
        require(self._controller.queue_entries[0] == ENTRY_BYTES.bit_length() - 1,
                Status.INVALID_QUEUE_SIZE)  # fmt: skip
        to = command.bits(11, 31, 16)
        require(0 < to <= IO_QUEUES, Status.INVALID_QUEUE_ID)
        require(to in completions, Status.COMPLETION_QUEUE_INVALID)
        made = SubmissionQueue(number, command.wide(6), size, completions[to])
        self._controller.create_submissions(made)
        return 0

    def _queue(self, command: Command, queues: Mapping[int, object]) -> tuple[int, int]:
        """Number and size of a queue to be created."""
        number, size = command.bits(10, 15), command.bits(10, 31, 16) + 1
        require(0 < number <= IO_QUEUES and number not in queues, Status.INVALID_QUEUE_ID)
        require(1 < size <= QUEUE_ENTRIES, Status.INVALID_QUEUE_SIZE)
        require(command.bits(11, 0))  # physically contiguous
        require(command.wide(6) % PAGE_BYTES == 0, Status.PRP_OFFSET_INVALID)
        return number, size

    def _delete_submissions(self, queue: SubmissionQueue, command: Command) -> int:
        number = command.bits(10, 15)
        require(number and number in self._controller.submissions, Status.INVALID_QUEUE_ID)
        self._controller.delete_submissions(number)
        return 0

    def _delete_completions(self, queue: SubmissionQueue, command: Command) -> int:
        number, queues = command.bits(10, 15), self._controller.completions
        require(number and number in queues, Status.INVALID_QUEUE_ID)
        users = [each.completions.number for each in self._controller.submissions.values()]
        require(number not in users, Status.INVALID_QUEUE_DELETION)
        self._controller.delete_completions(number)
        return 0
