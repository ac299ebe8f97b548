"""Tokenizers beyond llama2.c, chat templates, conversations, detokenization and structured output."""
