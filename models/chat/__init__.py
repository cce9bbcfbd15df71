"""Chat formats: how models write reasoning and tool calls, as data, and readers of answers in these formats."""
