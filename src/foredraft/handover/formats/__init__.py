"""Ways to write a handover, one module each. A module with an `OutputFormat` named FORMAT is a format."""
