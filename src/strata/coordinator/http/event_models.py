"""The events of the stream as models, for the OpenAPI document: one per kind, made from the core's own types."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel, create_model

from strata.core.stream_events import stream_types


class _Envelope(BaseModel):
    id: str = Field(description="Position in the stream; it resumes after the one given as `Last-Event-ID`")
    at: float = Field(description="When it was published, in Unix seconds. Not sent on the stream")


def _model(kind: str, data: Any) -> type[BaseModel]:
    name = "".join(part.title() for part in kind.split("_"))
    tag: Any = Literal[kind]
    return create_model(f"{name}Event", __base__=_Envelope, event=(tag, ...), data=(data, ...))


_ANY: Any = reduce(or_, (_model(kind, data) for kind, data in stream_types().items()))


class StreamEvent(RootModel[Annotated[_ANY, Field(discriminator="event")]]):
    """One event; `event` names its kind, which says what `data` holds."""
