"""Tables of the engines, one module each. The versions that they were read from are in `EngineTable.version`."""
