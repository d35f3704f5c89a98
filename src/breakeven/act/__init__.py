"""Inside an engine: the policy chooses K there. Standard library and numpy only, and what the engine itself has."""
