"""Make load and write down what came back. Knows HTTP, SSE and API dialects, no statistics."""
