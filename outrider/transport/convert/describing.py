"""``ModelDescription``: conversion in both directions."""

from __future__ import annotations

from outrider.errors import InvalidRequestError, ProtocolError
from outrider.transport.convert.bounds import check_description
from outrider.transport.convert.reading import shortened
from outrider.transport.convert.sampling import method_from_proto, method_to_proto
from outrider.types import AcceptanceMethod, ModelDescription, StepCost
from outrider.v1 import link_pb2 as pb


def description_to_proto(description: ModelDescription) -> pb.ModelDescription:
    """Convert all fields."""
    return pb.ModelDescription(
        role=description.role,
        model_name=description.model_name,
        architecture=description.architecture,
        vocab_size=description.vocab_size,
        num_token_ids=description.num_token_ids,
        max_model_len=description.max_model_len,
        eos_token_ids=description.eos_token_ids,
        bos_token_id=description.bos_token_id,
        dtype=description.dtype,
        quantization=description.quantization,
        batch_invariant=description.batch_invariant,
        device=description.device,
        device_id=description.device_id,
        device_name=description.device_name,
        page_size=description.page_size,
        num_pages=description.num_pages,
        tokenizer_files=[
            pb.TokenizerFile(name=name, content=content) for name, content in description.tokenizer_files.items()
        ],
        tokenizer_hash=description.tokenizer_hash,
        acceptance_methods=map(method_to_proto, description.acceptance_methods),
        version=description.version,
        tensor_parallel_size=description.tensor_parallel_size,
        heartbeat_interval_ms=description.heartbeat_interval_ms,
        hidden_size=description.hidden_size,
        num_layers=description.num_layers,
        hidden_state_layers=description.hidden_state_layers,
        longest_prefill=description.longest_prefill,
        plane_kinds=description.plane_kinds,
        channel_host=description.channel_host,
        step_costs=map(_cost_to_proto, description.step_costs),
    )


def description_from_proto(message: pb.ModelDescription) -> ModelDescription:
    """Convert all fields; unknown methods are left out."""
    if message.role not in ("draft", "target"):
        raise ProtocolError(f"role: must be draft or target, not {shortened(message.role)!r}")
    try:
        check_description(message)
    except InvalidRequestError as error:
        raise ProtocolError(str(error)) from error
    return ModelDescription(
        role=message.role,
        model_name=message.model_name,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        num_token_ids=message.num_token_ids,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        dtype=message.dtype,
        quantization=message.quantization,
        batch_invariant=message.batch_invariant,
        device=message.device,
        device_id=message.device_id,
        device_name=message.device_name,
        page_size=message.page_size,
        num_pages=message.num_pages,
        tokenizer_files={file.name: file.content for file in message.tokenizer_files},
        tokenizer_hash=message.tokenizer_hash,
        acceptance_methods=tuple(filter(None, map(_known_method, message.acceptance_methods))),
        version=message.version,
        tensor_parallel_size=message.tensor_parallel_size or 1,
        heartbeat_interval_ms=message.heartbeat_interval_ms,
        hidden_size=message.hidden_size,
        num_layers=message.num_layers,
        hidden_state_layers=tuple(message.hidden_state_layers),
        longest_prefill=message.longest_prefill,
        plane_kinds=tuple(map(shortened, message.plane_kinds)),
        channel_host=message.channel_host,
        step_costs=tuple(map(_cost_from_proto, message.step_costs)),
    )


def _cost_to_proto(cost: StepCost) -> pb.StepCost:
    return pb.StepCost(
        num_rows=cost.num_rows,
        num_tokens=cost.num_tokens,
        context_length=cost.context_length,
        duration_ns=cost.duration_ns,
    )


def _cost_from_proto(message: pb.StepCost) -> StepCost:
    return StepCost(message.num_rows, message.num_tokens, message.context_length, message.duration_ns)


def _known_method(number: int) -> AcceptanceMethod | None:
    try:
        return method_from_proto(number)
    except ProtocolError:
        return None
