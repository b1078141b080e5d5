"""The method `compose`: several drafters for one request."""
