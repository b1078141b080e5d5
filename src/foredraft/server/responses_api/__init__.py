"""OpenAI's /v1/responses: input and output items, their events, and stored responses."""
