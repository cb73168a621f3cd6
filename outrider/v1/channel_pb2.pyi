from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ProposalChannelRequest(_message.Message):
    __slots__ = ("connection", "wants_verdicts", "begins_next")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    WANTS_VERDICTS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_NEXT_FIELD_NUMBER: _ClassVar[int]
    connection: int
    wants_verdicts: bool
    begins_next: bool
    def __init__(self, connection: _Optional[int] = ..., wants_verdicts: bool = ..., begins_next: bool = ...) -> None: ...

class ProposalChannelOffer(_message.Message):
    __slots__ = ("connection", "offer_id", "token", "port", "num_outcomes", "target_address", "target_server_name")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    TARGET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TARGET_SERVER_NAME_FIELD_NUMBER: _ClassVar[int]
    connection: int
    offer_id: bytes
    token: bytes
    port: int
    num_outcomes: int
    target_address: str
    target_server_name: str
    def __init__(self, connection: _Optional[int] = ..., offer_id: _Optional[bytes] = ..., token: _Optional[bytes] = ..., port: _Optional[int] = ..., num_outcomes: _Optional[int] = ..., target_address: _Optional[str] = ..., target_server_name: _Optional[str] = ...) -> None: ...

class ProposalChannelClose(_message.Message):
    __slots__ = ("connection",)
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    connection: int
    def __init__(self, connection: _Optional[int] = ...) -> None: ...

class ProposalChannelState(_message.Message):
    __slots__ = ("connection", "is_open", "reason")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    connection: int
    is_open: bool
    reason: str
    def __init__(self, connection: _Optional[int] = ..., is_open: bool = ..., reason: _Optional[str] = ...) -> None: ...

class ChannelBytes(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    def __init__(self, content: _Optional[bytes] = ...) -> None: ...
