"""Text in and out: tokenizing, incremental detokenizing, stop strings, chat templates."""
