"""Base of the schemas of requests."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Model that refuses unknown fields, type coercion, NaN and infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
