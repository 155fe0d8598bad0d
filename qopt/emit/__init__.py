"""Writers that turn a rewritten graph into an artifact."""
