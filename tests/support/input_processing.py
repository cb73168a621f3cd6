"""An input processor whose steps are taken one after the other, without an event loop."""

from __future__ import annotations

from outrider.cooperative import run
from outrider.generation import GenerationRequest
from outrider_coordinator.requests.input_processor import InputProcessor
from outrider_coordinator.session.engine_request import EngineRequest


class SteppedProcessor(InputProcessor):
    """``InputProcessor`` for tests."""

    def process(self, request: GenerationRequest) -> EngineRequest:
        """Prepare a request; ``InvalidRequestError`` names the invalid field."""
        run(self.checking(request))
        rendered = "" if request.chat is None else self.text.chat.render(request.chat)
        return run(self.processing(request, self.tokenize(request, rendered)))
