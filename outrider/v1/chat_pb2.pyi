from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "fields_json")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    fields_json: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., fields_json: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools_json", "documents_json", "chat_template", "template_kwargs_json", "add_generation_prompt", "continue_final_message", "has_tools", "has_documents")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HAS_TOOLS_FIELD_NUMBER: _ClassVar[int]
    HAS_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: _containers.RepeatedScalarFieldContainer[str]
    documents_json: _containers.RepeatedScalarFieldContainer[str]
    chat_template: str
    template_kwargs_json: str
    add_generation_prompt: bool
    continue_final_message: bool
    has_tools: bool
    has_documents: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[_Iterable[str]] = ..., documents_json: _Optional[_Iterable[str]] = ..., chat_template: _Optional[str] = ..., template_kwargs_json: _Optional[str] = ..., add_generation_prompt: bool = ..., continue_final_message: bool = ..., has_tools: bool = ..., has_documents: bool = ...) -> None: ...
