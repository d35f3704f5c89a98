"""Numbers to what people read: the live line, tables, Markdown, CSV."""
