"""Requests to an application in the same process."""

import asyncio

from fastapi import FastAPI, Request

from foredraft.batch.asgi_client import post_json


def test_the_application_receives_the_body_and_its_response_is_returned():
    app = FastAPI()

    @app.post("/path", status_code=418)
    async def answer(request: Request) -> dict[str, object]:
        return {"body": await request.json(), "type": request.headers["content-type"]}

    status, value = asyncio.run(post_json(app, "/path", {"a": "ü"}))
    assert (status, value) == (418, {"body": {"a": "ü"}, "type": "application/json"})
